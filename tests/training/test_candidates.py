"""Several modules for one place in the student: each is trained as if it were the only one, and the best are taken."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import assert_same, fingerprint
from opened import open_ranks
from plain import assert_equal_state, chained, plain_loop
from torch import nn

import autobd
from autobd import Budget, Recipe
from autobd.errors import InputError
from autobd.training.choice import check_budget, choose, contest

NAMES = ("stem", "body", "tail", "head")
CUTS = [(n, n) for n in NAMES[:-1]]
WIDTH, ROWS, STEPS = 6, 6, 5


class Net(nn.Module):
    """Four stages, between them images of equal size."""

    def __init__(self, seed, inner=None):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, padding=1), nn.ReLU())
        self.body = inner or nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.tail = nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Dropout(0.2), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 5))

    def forward(self, x):
        return self.head(self.tail(self.body(self.stem(x))))


def separable(seed, norm=True):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH), nn.Conv2d(WIDTH, WIDTH, 1)]
    return nn.Sequential(*layers, *([nn.BatchNorm2d(WIDTH)] if norm else []), nn.ReLU())


def pointwise(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.ReLU())


def linear():
    torch.manual_seed(4)
    return nn.Conv2d(WIDTH, WIDTH, 1)


def batches(dtype=torch.float32, size=5):
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(ROWS, 3, size, size, generator=generator, dtype=dtype), torch.arange(ROWS) % 5)
        for _ in range(STEPS)
    ]


def distilled(candidates, student=None, dtype=torch.float32, data=None, **options):
    student = (student or Net(1)).to(dtype)
    for modules in candidates.values():
        for module in modules:
            module.to(dtype)
    options = {"cuts": CUTS, "devices": 1, "strategy": "tr+dpu", "profile": "analytic", "threads": 1, **options}
    options = {"recipe": Recipe(block_input="teacher", logits=True, loss=autobd.MSE()), "progress": False, **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(Net(0).to(dtype), student, data or batches(dtype), candidates=candidates, **options)


def alone(path, module):
    """The student with one candidate in its place, after a plain loop."""
    student = Net(1)
    setattr(student, path, copy.deepcopy(module))
    losses = plain_loop(Net(0), student, chained(*NAMES), [x for x, _ in batches()])
    return student, losses


@pytest.mark.timeout(120)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_candidate_is_trained_as_if_it_were_the_only_one(devices):
    dropped = nn.Sequential(pointwise(6), nn.Dropout(0.3))
    given = {"body": [separable(5), dropped], "stem": [copy.deepcopy(Net(7).stem)]}
    expected = {path: [alone(path, m) for m in modules] for path, modules in given.items()}
    own, own_losses = alone("body", Net(1).body)
    student = Net(1)
    result = distilled(given, student, devices=devices)
    for path, modules in given.items():
        block = NAMES.index(path)
        for number, (module, (reference, losses)) in enumerate(zip(modules, expected[path], strict=True), 1):
            assert_equal_state(module, reference.get_submodule(path))
            column = result.history.columns.index((block, number))
            assert [step[column] for step in result.history.losses] == [step[block] for step in losses]
    assert [step[:4] for step in result.history.losses] == own_losses
    chosen = {s.path: s.candidate for s in result.candidates.rows if s.chosen}
    for name in NAMES:  # what was not replaced is as without candidates
        module = given[name][chosen[name] - 1] if chosen.get(name) else own.get_submodule(name)
        assert_equal_state(student.get_submodule(name), module)
    assert result.student is student
    assert type(student) is Net
    for path, number in chosen.items():
        assert number == 0 or student.get_submodule(path) is given[path][number - 1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["ir", "dp", "tr"])
def test_the_schedule_does_not_change_what_candidates_learn(strategy):
    """In double precision; without norms and dropout, which are local to a rank's rows."""

    def run(**options):
        given = {"tail": [separable(5, norm=False), pointwise(6)]}
        student = Net(1, pointwise(2))
        student.tail = pointwise(4)
        result = distilled(given, student, torch.float64, epochs=2, **options)
        return student, given["tail"], result

    a, b = run(), run(devices=2, strategy=strategy)
    assert a[2].candidates.chosen == b[2].candidates.chosen
    for one, other in zip([a[0], *a[1]], [b[0], *b[1]], strict=True):
        for (name, p), q in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            assert torch.allclose(p, q, rtol=0, atol=1e-10), name
    if strategy == "ir":
        assert b[2].program.code(0).count("candidate=") == 2 * 4  # forward, backward, all-reduce, update


def test_layers_of_the_block_beside_the_place_are_each_candidates_own():
    """A block of two stages, one of them the place: the other one goes with its candidate."""
    given = {"tail": [pointwise(6)]}
    cuts = [CUTS[0], CUTS[2]]  # body and tail are one block
    expected = Net(1)
    expected.tail = copy.deepcopy(given["tail"][0])
    two = [(lambda m, x, batch: m.tail(m.body(x)), ("body", "tail"))]
    stages = chained("stem") + two + chained("head")
    plain_loop(Net(0), expected, stages, [x for x, _ in batches()])
    student = Net(1)
    result = distilled(given, student, cuts=cuts, budget=Budget(parameters=700))
    assert result.candidates.chosen == [(1, 1)]
    assert_equal_state(student, expected)


def test_the_student_that_comes_out_is_judged_recalibrated_and_finished():
    data = batches()
    student = Net(1)
    result = distilled(
        {"body": [separable(5)]}, student, validate=data, recalibrate=True, finish=1, epochs=2,
        budget=Budget(parameters=700),
    )  # fmt: skip
    assert result.candidates.chosen == [(1, 1)]
    final = {s.what: s for s in result.history.scores}
    assert {"teacher", "assembled", "recalibrated", "finished"} <= set(final)
    assert final["recalibrated"].step == 2 * STEPS
    assert [s.step for s in result.history.of("assembled")] == [STEPS, 2 * STEPS]
    model = copy.deepcopy(student).eval()
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in data) / (ROWS * STEPS)
    assert final["finished"].values["accuracy"] == pytest.approx(correct)
    assert result.split.student.model is student
    assert result.verification.exact
    assert "block  place      candidate" in str(result)
    assert "1, candidate 1" in str(result.history)
    assert {row["candidate"] for row in result.history.rows()} == {0, 1}


def test_inputs_of_other_sizes_reach_candidates_too():
    data = batches() + batches(size=7)
    student = Net(1)
    distilled({"body": [separable(5)]}, student, data=data, budget=Budget(parameters=700))
    expected = Net(1)
    expected.body = separable(5)
    plain_loop(Net(0), expected, chained(*NAMES), [x for x, _ in data])
    assert_equal_state(student.body, expected.body)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_candidate_stops_by_itself_and_keeps_its_best_weights(devices):
    """The learning rate is such that everything becomes worse in the end."""

    def rate(block, progress):
        return 1e-2 if progress < 0.5 else 30.0

    recipe = Recipe(
        block_input="teacher", logits=True, loss=autobd.MSE(), lr=rate, epochs=6, keep_best=True, patience={1: 1}
    )
    given = {"body": [linear()]}
    result = distilled(given, Net(1, pointwise(3)), recipe=recipe, devices=devices)
    column = result.history.columns.index((1, 1))
    relative = [step[column] for step in result.history.relative]
    means = [sum(relative[i : i + STEPS]) / STEPS for i in range(0, len(relative), STEPS)]
    best = means.index(min(means))
    assert best < 3
    assert any(n.startswith("block 1, candidate 1 for 'body' stopped after epoch") for n in result.notes)
    score = next(s for s in result.candidates.rows if s.candidate == 1)
    assert score.loss == pytest.approx(min(means))
    assert score.seconds > 0
    short = {"body": [linear()]}  # with the same rates, to the best epoch only
    steps = Recipe(block_input="teacher", logits=True, loss=autobd.MSE(), lr=1e-2, epochs=best + 1)
    distilled(short, Net(1, pointwise(3)), recipe=steps)
    assert_equal_state(given["body"][0], short["body"][0])


@pytest.mark.timeout(90)
def test_candidates_move_with_their_blocks():
    """Blocks are profiled wrongly, so that the ranks move them between epochs; the result stays the same."""
    from autobd.costs import Profile

    def run(**options):
        given = {"tail": [separable(5, norm=False)]}
        student = Net(1, pointwise(2))
        result = distilled(
            given, student, recipe=Recipe(block_input="teacher", logits=True, epochs=3, ema=0.9), **options
        )
        return given["tail"][0], student, result

    wrong = Profile.of([10.0, 1e-6, 1e-6, 1e-6], [10.0, 1e-6, 1e-6, 1e-6], batch_size=ROWS, devices=2)
    wrong = replace(wrong, devices=("cpu", "cpu"))
    a, b = run(), run(devices=2, strategy="tr+dpu", profile=wrong)
    assert any("moved from" in note for note in b[2].notes)
    assert_equal_state(a[0], b[0])
    assert_equal_state(a[1], b[1])


def test_costs_of_a_block_are_those_of_all_its_candidates():
    data = batches()
    plain = autobd.split(Net(0), Net(1), data[0][0], cuts=CUTS)
    several = autobd.split(Net(0), Net(1), data[0][0], cuts=CUTS, candidates={"body": [separable(5), pointwise(6)]})
    for how in ({"devices": "1xA100"}, {"devices": ["cpu"], "cached": False, "budget": 1.0, "progress": False}):
        one, all_of_them = (autobd.profile(s, batch_size=ROWS, **how) for s in (plain, several))
        assert all_of_them.blocks[1].student_bytes > one.blocks[1].student_bytes
        assert all_of_them.blocks[0].student_bytes == one.blocks[0].student_bytes
        assert all_of_them.blocks[1].student[0].at(ROWS) > one.blocks[1].student[0].at(ROWS)


# -------------------------------------------------------------------- which are taken

amounts = st.integers(0, 9).map(float)
option = st.tuples(amounts, st.tuples(amounts, amounts, amounts))
limit = st.none() | st.integers(1, 30).map(float)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(option, min_size=1, max_size=4), min_size=1, max_size=4),
    st.tuples(*[amounts] * 3),
    limit,
    limit,
    limit,
)
def test_the_choice_is_the_best_of_all_that_keep_within_the_budget(options, fixed, parameters, flops, seconds):
    limits = (parameters, flops, seconds)

    def total(picks):
        own = [o[i] for o, i in zip(options, picks, strict=True)]
        return sum(loss for loss, _ in own), [fixed[k] + sum(cost[k] for _, cost in own) for k in range(3)]

    every = itertools.product(*(range(len(o)) for o in options))
    fitting = [
        total(p)[0]
        for p in every
        if all(most is None or c <= most for c, most in zip(total(p)[1], limits, strict=True))
    ]
    found = choose(options, fixed, Budget(*limits))
    assert (found is None) == (not fitting)
    if found is not None:
        loss, costs = total(found)
        assert loss == min(fitting)
        assert all(most is None or c <= most for c, most in zip(costs, limits, strict=True))


def test_a_budget_takes_the_smaller_one_and_the_table_says_so():
    free = distilled({"body": [separable(5)]})
    least = min(s.loss for s in free.candidates.rows)
    assert next(s for s in free.candidates.rows if s.chosen).loss == least
    other = distilled({"body": [separable(5)]}, budget=Budget(flops=3e4))
    assert other.candidates.chosen == [(1, 1)]
    assert other.candidates.rows[1].flops < other.candidates.rows[0].flops


def test_where_nothing_is_fast_enough_the_fastest_is_taken_and_a_note_says_so():
    result = distilled({"body": [pointwise(5)]}, budget=Budget(seconds=1e-12))
    fastest = min(result.candidates.rows, key=lambda s: s.seconds)
    assert fastest.chosen
    assert any("no choice of candidates keeps within Budget(seconds=1e-12) too" in n for n in result.notes)


def test_judging_leaves_folded_channel_maps_alone():
    """The student is the wider one, so that a map and back is not what it was."""

    def net(width, seed):
        torch.manual_seed(seed)
        sizes = [(3, width), (width, width), (width, width), (width, width)]
        layers = [nn.Conv2d(i, o, 3, padding=1) for i, o in sizes]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 16, 5))

    def trained(**options):
        student = net(WIDTH, 1)
        result = autobd.distill(
            net(4, 0), student, [(torch.ones(4, 3, 4, 4) * i, torch.zeros(4).long()) for i in range(3)], devices=1,
            cuts=[(str(i), str(i)) for i in range(4)], candidates={"0": [nn.Conv2d(3, WIDTH, 3, padding=1)]},
            progress=False, recipe=Recipe(block_input="teacher", logits=True), **options,
        )  # fmt: skip
        assert [pair.adapters[0].kind for pair in result.split.pairs].count("trainable") == 2
        return student

    torch.manual_seed(2)
    plain = trained()
    torch.manual_seed(2)
    assert_equal_state(plain, trained(validate=[(torch.ones(2, 3, 4, 4), torch.zeros(2).long())]))


def test_tied_weights_count_once():
    class Tied(nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.embed, self.middle = nn.Embedding(40, 8), nn.Linear(8, 8)
            self.head = nn.Linear(8, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.middle(self.embed(x)))

    split = autobd.split(
        Tied(0), Tied(1), torch.arange(6).view(2, 3), cuts=[("embed", "embed"), ("middle", "middle")],
        candidates={"middle": [nn.Linear(8, 8, bias=False)]},
    )  # fmt: skip
    check_budget(split, Budget(parameters=40 * 8 + 8 * 8))
    with pytest.raises(InputError, match="at least 384 parameters"):
        check_budget(split, Budget(parameters=40 * 8 + 8 * 8 - 1))


def test_a_chosen_module_is_in_the_mode_of_what_it_replaces():
    student, other = Net(1).eval(), pointwise(5)
    result = distilled({"body": [other.train()]}, student, budget=Budget(parameters=700))
    assert result.candidates.chosen == [(1, 1)]
    assert not any(m.training for m in student.modules())


def test_candidates_may_start_from_the_teacher_too():
    inside = [copy.deepcopy(Net(1).body)]  # is no better than the student's own, if both begin alike
    student = Net(1)
    result = distilled({"body": inside}, student, init="teacher")
    own, other = result.candidates.rows
    assert other.loss == own.loss


def test_the_fastest_is_one_that_keeps_within_the_rest_of_the_budget():
    split = autobd.split(Net(0), Net(1), batches()[0][0], cuts=CUTS, candidates={"body": [pointwise(5), separable(6)]})
    seconds = {(b, None): 1.0 for b in range(4)} | {(1, 4): 5.0, (1, 5): 3.0}
    small = autobd.Budget(parameters=700, seconds=3.5)  # the student's own is fast enough and too large
    found, notes = contest(split, [0.1, 0.1, 0.1, 0.1, 0.2, 0.3], seconds, small)
    assert found.chosen == [(1, 2)]
    assert "takes 6 s for one row" in notes[0]


def test_a_block_that_never_learned_does_not_hide_what_others_have():
    inf, nothing = float("inf"), (0.0, 0.0, 0.0)
    assert choose([[(inf, nothing)] * 2, [(0.9, nothing), (0.1, nothing)]], nothing, Budget()) == [0, 1]


def test_running_statistics_of_a_candidate_are_told_of_where_its_rows_are_split():
    given = {"body": [nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH))]}
    result = distilled(given, Net(1, pointwise(3)), devices=2, strategy="ir")
    assert any("in blocks 1: batch norms there use their own rows" in note for note in result.notes)


# -------------------------------------------------------------------- what cannot be

SHARED, TWICE, TEACHER = pointwise(3), Net(1), Net(0)
TWICE.body[1] = nn.BatchNorm2d(WIDTH, affine=False)  # has buffers only
HEADLESS = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"candidates": {"bodi": [pointwise(1)]}}, "names no module"),
        ({"candidates": [pointwise(1)]}, "candidates= is no mapping"),
        ({"candidates": {"body": []}}, "are no list"),
        ({"candidates": {"body": pointwise(1)}}, "are no list"),
        ({"candidates": {"body": [3]}}, "is no module"),
        ({"candidates": {"body": [SHARED, SHARED]}}, "shares weights"),
        ({"candidates": {"body": [TEACHER.body]}, "teacher": TEACHER}, "shares weights or buffers"),
        ({"candidates": {"body": [SHARED], "tail": [SHARED]}}, "shares weights or buffers"),
        ({"candidates": {"body": [TWICE.body[1]]}, "student": TWICE}, "shares weights or buffers"),
        ({"candidates": {"body": [nn.Conv2d(WIDTH, WIDTH + 1, 1)]}}, "does not fit there"),
        ({"candidates": {"body": [nn.Conv2d(WIDTH, WIDTH, 3)]}}, "a tensor behind it is another"),
        ({"candidates": {"head": [HEADLESS]}}, "a tensor behind it is another"),
        ({"candidates": {"body.0": [nn.Conv2d(WIDTH, WIDTH, 1)], "body.1": [nn.Identity()]}}, "Two places"),
        ({"candidates": {"body": [pointwise(1)]}, "cuts": [("body.0", "body.0")]}, "lies in several blocks"),
        ({"candidates": {"body": [pointwise(1)]}, "recipe": Recipe(block_input="student")}, "the teacher's boundary"),
        ({"candidates": {"body": [pointwise(1)]}, "hybrid": True}, "cannot have candidates"),
        ({"candidates": {"body": [pointwise(1)]}, "budget": 5}, "budget= is no budget"),
        ({"candidates": {"body": [pointwise(1)]}, "budget": Budget(parameters=10)}, "keeps within the budget"),
        ({"budget": Budget(parameters=10)}, "nothing to choose"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_trained(options, text):
    options = {"cuts": CUTS, "devices": 1, "progress": False, **options}
    student = options.pop("student", Net(1))
    before = fingerprint(student)
    with pytest.raises(InputError, match=text):
        autobd.distill(options.pop("teacher", Net(0)), student, batches(), **options)
    assert_same(before, fingerprint(student))


@pytest.mark.parametrize("limit", [0, -1, "small", True])
def test_a_limit_is_a_positive_number(limit):
    with pytest.raises(InputError, match=r"Budget\.flops is no limit"):
        Budget(flops=limit)


def test_cuts_keep_clear_of_places_with_candidates():
    deep = nn.Sequential(*(nn.Sequential(nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.ReLU()) for _ in range(4)))
    teacher, student = Net(0, copy.deepcopy(deep)), Net(1, deep)
    free = autobd.split(teacher, student, batches()[0][0], blocks=6)
    assert any("body." in p.student.name for p in free.alignment.pairs)
    found = autobd.split(teacher, student, batches()[0][0], blocks=3, candidates={"body": [pointwise(1)]})
    assert not any("body." in p.student.name for p in found.alignment.pairs)
    with pytest.raises(autobd.AutobdError):
        autobd.split(teacher, student, batches()[0][0], blocks=6, candidates={"body": [pointwise(1)]})


def test_next_to_candidates_no_channel_map_is_trained():
    """Elsewhere it may be: the teacher is twice as wide."""

    def net(width, seed):
        torch.manual_seed(seed)
        sizes = [(3, width), *[(width, width)] * 4]
        return nn.Sequential(*(nn.Conv2d(i, o, 3, padding=1) for i, o in sizes), nn.Flatten(), nn.Linear(width * 16, 5))

    options = {"cuts": [(str(i), str(i)) for i in range(5)]}
    x = torch.randn(4, 3, 4, 4)
    free = autobd.split(net(12, 0), net(6, 1), x, **options)
    found = autobd.split(net(12, 0), net(6, 1), x, candidates={"1": [pointwise(1)]}, **options)
    kinds = [[pair.adapters[0].kind for pair in s.pairs[:5]] for s in (free, found)]
    assert kinds[0] == [*["trainable"] * 4, "matched"]
    assert kinds[1] == ["matched", "matched", "trainable", "trainable", "matched"]
    student = net(6, 1)
    result = autobd.distill(
        net(12, 0), student, [(x, torch.zeros(4).long())] * 3, candidates={"1": [pointwise(1)]}, devices=1,
        progress=False, **options,
    )  # fmt: skip
    assert result.verification.exact
    assert len(result.candidates.rows) == 2
