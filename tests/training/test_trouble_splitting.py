"""Values that cross cuts, blocks with nothing to train, models of other depths: split, and trained like plain loops.

The number of a test is that of the report in the project's bank of trouble reports. The oracles are plain PyTorch.
"""

import copy
import sys
from types import SimpleNamespace

import pytest
import torch
from networks import assert_same, fingerprint
from plain import (
    assert_blocks_are_the_models,
    assert_equal_state,
    chained,
    distilled_like_plain_loop,
    hidden,
    pair,
    same,
)
from torch import nn

import autobd
from autobd.cli import main
from autobd.errors import SplitError


def inspected(monkeypatch, capsys, teacher, student, *options):
    """What `autobd inspect` prints for these models, which it leaves as they were."""
    before = fingerprint(teacher), fingerprint(student)
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(teacher=lambda: teacher, student=lambda: student))
    assert main(["inspect", "mine:teacher", "mine:student", *options]) == 0
    assert_same(before[0], fingerprint(teacher)), assert_same(before[1], fingerprint(student))
    return capsys.readouterr().out


def crossing(split):
    """The shapes of one row of what crosses each cut of both models; all of it is of floats."""
    found = []
    for p in split.pairs:
        assert {t.dtype for b in (p.teacher, p.student) for t in b.returns} == {torch.float32}
        found.append([t.shape for t in p.student.returns])
        assert [t.shape for t in p.teacher.returns] == found[-1]
    return found


class Unused(nn.Module):
    """A head that forward never calls."""

    def __init__(self, width):
        super().__init__()
        self.one, self.two, self.head = hidden(6, width), hidden(6, width), nn.Linear(6, 3)
        self.pretraining = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x):
        return self.head(self.two(self.one(x)))


def test_23_modules_that_forward_never_uses_stay_with_all_their_keys_and_values(monkeypatch, capsys):
    teacher, student = pair(Unused)
    before = copy.deepcopy(student)
    batches = [torch.randn(n, 6) for n in (3, 3, 2, 1)]
    result = distilled_like_plain_loop(teacher, student, chained("one", "two", "head"), batches, same("one", "two"))
    assert_blocks_are_the_models(result.split, batches)
    assert len([k for k in student.state_dict() if k.startswith("pretraining")]) == 7
    assert_equal_state(student.pretraining, before.pretraining)
    assert all(p.requires_grad and p.grad is None for p in student.pretraining.parameters())
    names = [n for n, _ in student.named_parameters() if n.startswith("pretraining")]
    told = f"left as they are: {', '.join(names)}"
    assert told in str(result)
    assert told in inspected(monkeypatch, capsys, teacher, student, "--input", "6")


class Sized(nn.Module):
    """Reads sizes of its input at the start and uses them at the end."""

    def __init__(self, width):
        super().__init__()
        self.c1, self.c2, self.c3 = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, width, 3, 1, 1), nn.Conv2d(width, 4, 1)
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        rows, height, width = x.size(0), x.size(2), x.size(3)
        x = self.c1(x).relu()
        x = self.c3(self.c2(x).relu())
        x = x.flatten(2).sum(-1) / (height * width)
        return self.fc(x).view(rows, 5) * rows


def test_26_sizes_that_are_read_early_and_used_late_are_those_of_each_batch_and_do_not_cross():
    teacher, student = pair(Sized)
    stages = [
        (lambda m, x, _: m.c1(x).relu(), ["c1"]),
        (lambda m, x, _: m.c3(m.c2(x).relu()).flatten(2), ["c2", "c3"]),
        (lambda m, x, _: m.fc(x.sum(-1) / 64) * len(x), ["fc"]),
    ]
    batches = [torch.randn(n, 3, 8, 8) for n in (4, 3, 4, 1)]
    result = distilled_like_plain_loop(teacher, student, stages, batches, same("relu", "flatten"))
    assert_blocks_are_the_models(result.split, batches)
    assert crossing(result.split) == [[(4, 4, 4)], [(4, 16)], [(5,)]]
    assert [p.teacher.inputs for p in result.split.pairs] == [(0,), (), ()], "no block needs the images for their size"


class UNet(nn.Module):
    def __init__(self, width):
        super().__init__()

        def convs(a, b):
            return nn.Sequential(nn.Conv2d(a, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, b, 1))

        self.d0, self.d1, self.mid, self.u1, self.u0 = convs(3, 4), convs(4, 6), convs(6, 6), convs(12, 4), convs(8, 2)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x):
        s0 = self.d0(x)
        s1 = self.d1(self.pool(s0))
        y = self.mid(self.pool(s1))
        y = self.u1(torch.cat([self.up(y), s1], 1))
        return self.u0(torch.cat([self.up(y), s0], 1))


def down(m, x, _):
    s0 = m.d0(x)
    return s0, m.d1(m.pool(s0))


def up(m, x, _):
    s0, s1, y = x
    return m.u0(torch.cat([m.up(m.u1(torch.cat([m.up(y), s1], 1))), s0], 1))


def test_27_a_skip_over_a_whole_block_is_carried_through_it_and_trains_like_a_plain_loop():
    teacher, student = pair(UNet)
    stages = [
        (down, ["d0", "d1"]),
        (lambda m, x, _: (*x, m.mid(m.pool(x[1]))), ["mid"], {2}),
        (up, ["u1", "u0"]),
    ]
    batches = [torch.randn(n, 3, 8, 8) for n in (2, 2, 3, 1)]
    result = distilled_like_plain_loop(teacher, student, stages, batches, same("d1", "mid"))
    assert_blocks_are_the_models(result.split, batches)
    skips = [(4, 8, 8), (6, 4, 4)]
    assert crossing(result.split) == [skips, [*skips, (6, 2, 2)], [(2, 8, 8)]]
    assert [p.student.passes for p in result.split.pairs] == [(), (0, 1), ()]


def weightless(width):
    """Blocks 1, 2 and 4 have nothing to train."""
    first = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 6, 1))
    middle = nn.Sequential(nn.MaxPool2d(2), nn.ReLU()), nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
    return nn.Sequential(first, *middle, nn.Linear(6, 4), nn.Sequential(nn.Tanh(), nn.Softplus()))


def test_30_blocks_with_nothing_to_train_that_cuts_force_pass_on_and_cost_nothing():
    batches = [torch.randn(n, 3, 8, 8) for n in (2, 2, 3, 1)]
    result = distilled_like_plain_loop(*pair(weightless), chained(*"01234"), batches, same(*"0123"))
    assert_blocks_are_the_models(result.split, batches)
    assert [bool(p.student.parameters) for p in result.split.pairs] == [True, False, False, True, False]
    for losses in result.history.losses:
        assert [loss == 0 for loss in losses] == [False, True, True, False, True]


def test_30_blocks_with_nothing_to_train_are_never_chosen():
    x = torch.randn(2, 3, 8, 8)
    for options in ({}, {"blocks": 2}, {"blocks": 3}):
        split = autobd.split(*pair(weightless), x, **options)
        assert all(block.parameters for p in split.pairs for block in (p.teacher, p.student))
    with pytest.raises(SplitError, match=r"5 blocks were asked for.*\n.*\n.*at most 3"):
        autobd.split(*pair(weightless), x, blocks=5)


def test_30_what_is_before_every_weight_is_no_block_and_the_error_says_why():
    models = pair(lambda w: nn.Sequential(nn.Sequential(nn.AvgPool2d(2), nn.ReLU()), *weightless(w)))
    with pytest.raises(
        SplitError, match=r"after module '0' of the teacher: it works on inputs alone.*\n.*\n.*one of: "
    ):
        autobd.split(*models, torch.randn(2, 3, 8, 8), cuts=same("0", "1"))


def test_31_a_block_that_the_user_froze_stays_bit_identical_and_its_loss_is_told():
    teacher, student = pair(lambda w: nn.Sequential(hidden(6, w), hidden(6, w), nn.Linear(6, 2)))
    student[1].requires_grad_(False)
    before = copy.deepcopy(student)
    batches = [torch.randn(n, 6) for n in (3, 3, 2, 1)]
    result = distilled_like_plain_loop(teacher, student, chained(*"012"), batches, same(*"01"))
    assert_blocks_are_the_models(result.split, batches)
    assert_equal_state(student[1], before[1])
    assert not torch.equal(student[0][0].weight, before[0][0].weight)
    assert [p.requires_grad for p in student.parameters()] == [p.requires_grad for p in before.parameters()]
    assert all(losses[1] > 0 for losses in result.history.relative)


class Deep(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.inp, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), *hidden(6, width)) for _ in range(depth))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def deep_pair():
    return pair(lambda w: Deep(w, 12 if w == 32 else 4), 32, 8)


def quarter(i):
    """The i-th quarter of a model's layers, with what comes before or after them."""

    def run(m, x, _):
        x = m.inp(x) if i == 0 else x
        each = len(m.layers) // 4
        for layer in m.layers[i * each : (i + 1) * each]:
            x = x + layer(x)
        return m.head(x) if i == 3 else x

    return run, [["inp"], [], [], ["head"]][i] + [f"layers.{i}"]


THIRDS = [("add_2", "add"), ("add_5", "add_1"), ("add_8", "add_2")]


def test_32_twelve_layers_and_four_are_aligned_in_quarters_and_train_like_a_plain_loop(monkeypatch, capsys):
    teacher, student = deep_pair()
    batches = [torch.randn(n, 4) for n in (3, 3, 2, 1)]
    split = autobd.split(teacher, student, batches[0], blocks=4)
    assert [(c.teacher.name, c.student.name) for c in split.alignment.pairs] == THIRDS
    distilled_like_plain_loop(teacher, student, list(map(quarter, range(4))), batches, THIRDS)
    assert_blocks_are_the_models(split, batches)
    printed = inspected(monkeypatch, capsys, teacher, student, "--input", "4", "--blocks", "4").splitlines()
    rows = [" ".join(line.split()[1:7]) for line in printed if "layers" in line]
    assert rows[1].startswith("layers.3 .. layers.5 layers.1 N")
    assert rows[2].startswith("layers.6 .. layers.8 layers.2 N")


def test_32_without_a_number_of_blocks_depths_are_proportional():
    cuts = autobd.split(*deep_pair(), torch.randn(3, 4)).alignment.pairs
    assert len(cuts) >= 3
    assert all(abs(c.teacher.depth - c.student.depth) < 0.1 for c in cuts)


def test_32_more_blocks_than_the_student_has_borders_is_an_error_with_both_numbers():
    with pytest.raises(SplitError, match=r"12 blocks were asked for.*\n.*blocks=12\n.*at most 6 for this pair\n.*do: "):
        autobd.split(*deep_pair(), torch.randn(3, 4), blocks=12)
