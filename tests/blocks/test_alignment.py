"""Alignment of two models: monotone, deterministic, blind to names, and able to explain itself."""

import copy
import itertools
from collections import OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import Stages, mlp, pairs
from torch import nn

import autobd
from autobd.blocks.align import align, matching
from autobd.blocks.cuts import candidates
from autobd.blocks.dataflow import Dataflow
from autobd.blocks.initialise import weights_from_teacher
from autobd.errors import SplitError

RELAXED = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
IMAGE = torch.randn(2, 3, 16, 16)


def chosen(split):
    return [(p.teacher.position, p.student.position) for p in split.alignment.pairs]


@RELAXED
@given(pairs())
def test_pairs_of_networks_are_aligned_in_order_and_trained(models):
    teacher, student = models
    split = autobd.split(teacher, student, IMAGE)
    places = chosen(split)
    assert all(a < c and b < d for (a, b), (c, d) in itertools.pairwise(places))
    for pair in split.pairs:
        assert any(teacher.get_parameter(n).ndim >= 2 for n in pair.teacher.parameters)
        assert any(student.get_parameter(n).ndim >= 2 for n in pair.student.parameters)
        for t, s in zip(pair.teacher.returns, pair.student.returns, strict=True):
            assert t.grid == s.grid
    assert split.verify().exact
    assert chosen(autobd.split(copy.deepcopy(teacher), copy.deepcopy(student), IMAGE)) == places
    result = autobd.distill(teacher, student, [IMAGE], progress=False)
    assert all(0 <= v < float("inf") for v in result.history.relative[0])


def renamed(module):
    """A copy with every child under another name."""
    twin = copy.deepcopy(module)
    for parent in list(twin.modules()):
        if isinstance(parent, nn.Sequential):
            parent._modules = OrderedDict((f"part_{k}", v) for k, v in parent._modules.items())
    return twin


@RELAXED
@given(pairs())
def test_names_of_modules_do_not_matter(models):
    assert chosen(autobd.split(*models, IMAGE)) == chosen(autobd.split(*map(renamed, models), IMAGE))


@RELAXED
@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.sampled_from([4, 6]))
def test_a_model_against_itself_pairs_like_with_like(depths, width):
    model = Stages([width] * len(depths), depths)
    split = autobd.split(copy.deepcopy(model), model, IMAGE)
    assert len(split) >= 3
    assert [a for a, _ in chosen(split)] == [b for _, b in chosen(split)]


def brute_force(pairs, weights, blocks, cost):
    """The cheapest chain of `blocks` - 1 pairs, by trying every one."""
    from itertools import combinations

    best = float("inf")
    for chain in combinations(pairs, blocks - 1):
        ends = [(p.teacher.weights, p.student.weights, p.teacher.position, p.student.position) for p in chain]
        edges = [(0, 0, -1, -1), *ends, (*weights, 1 << 30, 1 << 30)]
        if all(all(b > a for a, b in zip(one, two, strict=True)) for one, two in itertools.pairwise(edges)):
            best = min(best, cost(chain))
    return best


@pytest.mark.parametrize("blocks", [2, 3, 4])
def test_the_chain_is_the_cheapest_of_all(blocks):
    from autobd.blocks.align import _DEPTH, _STUDENT_PASSES, _penalty, _progress

    teacher, student = Stages([4, 6], [2, 1]), Stages([6, 4], [1, 1])
    flows = [
        Dataflow(autobd.capture(m, IMAGE), "output", trained=trained)
        for m, trained in ((teacher, False), (student, True))
    ]
    pairs = [p for p in matching(*map(candidates, flows)) if p.teacher.border and p.student.border]
    weights = tuple(f.weights_until[-1] for f in flows)
    flops = tuple(f.flops_until[-1] for f in flows)
    progress = _progress([p.teacher for p in pairs]) | _progress([p.student for p in pairs])

    def cost(chain):
        share = flops[0] / (flops[0] + _STUDENT_PASSES * flops[1])
        work = [0.0, *(share * p.teacher.depth + (1 - share) * p.student.depth for p in chain), 1.0]
        unequal = sum(_penalty(p) + _DEPTH * (progress[id(p.teacher)] - progress[id(p.student)]) ** 2 for p in chain)
        return sum((b - a) ** 2 for a, b in itertools.pairwise(work)) + unequal

    found = align(pairs, weights, flops, blocks)
    assert cost(found.pairs) == pytest.approx(brute_force(pairs, weights, blocks, cost), abs=1e-12)


def test_unequal_depths_pair_every_other_layer():
    split = autobd.split(mlp(8, blocks=8), mlp(8, blocks=4), torch.randn(4, 6), blocks=4)
    assert [(p.teacher.name, p.student.name) for p in split.alignment.pairs] == [("1", "0"), ("3", "1"), ("5", "2")]


def test_a_wrong_name_lists_the_nearest_valid_ones():
    with pytest.raises(SplitError, match=r"no module or node 'stages.O'(.|\n)*one of: .*stages.0"):
        autobd.split(Stages([4, 4], [1, 1]), Stages([4, 4], [1, 1]), IMAGE, cuts=[("stages.O", "stages.0")])


def test_the_split_explains_what_was_chosen_and_what_was_passed_over():
    teacher, student = Stages([8, 8], [3, 3]), Stages([4, 4], [1, 2])
    text = autobd.split(teacher, student, IMAGE).explain()
    assert "teacher: " in text
    assert "places to cut" in text
    assert "stages.0" in text
    assert "matched 8 to 4" in text
    assert "largest" in text


def test_the_explanation_counts_partners_of_other_sizes_only_where_they_are_allowed():
    def net(stride):
        layers = nn.Conv2d(3, 4, 3, stride, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))

    for resample, partners in ((False, 2), (True, 6)):
        split = autobd.split(net(1), net(2), torch.randn(2, 3, 8, 8), resample=resample, cuts=[("5", "5")])
        assert f"{partners} have a partner" in split.explain()


def test_given_cuts_that_change_partners_of_what_passes_through_are_refused():
    class PreviousTwo(nn.Module):
        def __init__(self, width, cells, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
            self.cells = nn.ModuleList(nn.Sequential(nn.Linear(16, width), nn.Linear(width, 8)) for _ in range(cells))

        def forward(self, x):
            before = now = self.stem(x)
            for cell in self.cells:
                before, now = now, cell(torch.cat([now, before], -1))
            return self.head(before + now)

    with pytest.raises(SplitError, match=r"Block 1(.|\n)*paired alike at both"):
        autobd.split(PreviousTwo(9, 6, 0), PreviousTwo(6, 6, 1), torch.randn(4, 6),
                     cuts=[("cells.1", "cells.1"), ("cells.3", "cells.2")])  # fmt: skip


def test_without_a_common_cut_both_sides_are_shown():
    with pytest.raises(SplitError, match=r"no common cut(.|\n)*teacher can be cut at: N x 8 (.|\n)*student can be cut"):
        autobd.split(mlp(8), nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 3), nn.Linear(3, 3), nn.Flatten(1)),
                     torch.randn(4, 6))  # fmt: skip


def test_starting_weights_are_found_under_every_name_of_a_tied_one():
    class Net(nn.Module):
        def __init__(self, tied, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.one, self.head = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
            if tied:
                self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(torch.relu(self.one(self.embed(x))))

    x = torch.randint(0, 9, (4, 5))
    for tied in itertools.product((False, True), repeat=2):
        teacher, student = Net(tied[0], 0), Net(tied[1], 1)
        start = weights_from_teacher(autobd.split(teacher, student, x, blocks=2))
        assert start.keys() == dict(student.named_parameters()).keys()
        assert all(torch.equal(value, teacher.state_dict()[key]) for key, value in start.items())


def test_a_student_may_start_from_its_teachers_weights():
    def net(depth, seed):
        torch.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(depth)]
        return nn.Sequential(*layers, nn.Linear(6, 3))

    teacher, student = net(4, 0), net(2, 1)
    teacher[0][1].running_mean.add_(3.0)
    recipe = autobd.Recipe(lr=0.0, optimizer=torch.optim.SGD)
    x = torch.randn(8, 6)
    result = autobd.distill(
        teacher, student, [x], recipe=recipe, init="teacher", cuts=[("1", "0"), ("3", "1")], progress=False
    )
    assert 'init="teacher" set 16 of the student\'s 16 parameters and buffers' in result.notes
    for mine, theirs in (("0.0", "0.0"), ("1.0", "2.0"), ("2", "4")):
        assert torch.equal(student.get_submodule(mine).weight, teacher.get_submodule(theirs).weight)
    assert student[0][1].running_mean.sum() > 10  # the statistics too, then one step of the student's own
    with pytest.raises(autobd.errors.InputError, match="init="):
        autobd.distill(teacher, student, [x], init="random", progress=False)
