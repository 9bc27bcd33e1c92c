"""Blocks keep their best weights, and those that learn no more are left alone."""

import copy

import pytest
import torch
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state

import autobd
from autobd import Callback, Recipe
from autobd.costs import Profile
from autobd.errors import InputError

CUTS = [("0", "0"), ("1", "1")]
STEPS = 5


def batches():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 6, generator=generator), torch.zeros(4).long()) for _ in range(STEPS)]


class Kept(Callback):
    """The student at every epoch's end."""

    def __init__(self, student):
        self.student, self.states = student, []

    def on_epoch(self, run):
        self.states.append(copy.deepcopy(self.student.state_dict()))


def distilled(recipe, devices=1, **options):
    student = mlp(4, seed=1)
    kept = Kept(student)
    options = {"strategy": "tr+dpu", "profile": "analytic", **options}
    result = autobd.distill(
        mlp(16), student, batches(), cuts=CUTS, threads=1, progress=False, recipe=recipe, devices=open_ranks(devices),
        callbacks=[kept], **options,
    )  # fmt: skip
    return result, kept.states


def epoch_means(history):
    return [
        [sum(step[b] for step in history.relative[e * STEPS : (e + 1) * STEPS]) / STEPS for b in range(3)]
        for e in range(len(history.epoch_ends))
    ]


def rising(block, progress):
    """Block 1 learns at first and is then thrown about."""
    return 1e-2 if block != 1 or progress < 0.5 else 3.0


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("devices", "strategy"), [(1, "tr+dpu"), (2, "tr+dpu"), (2, "dp")])
def test_every_block_gets_the_weights_of_its_best_epoch(devices, strategy):
    recipe = Recipe(block_input="teacher", logits=True, lr=rising, epochs=6, keep_best=True, loss=autobd.MSE())
    result, states = distilled(recipe, devices, strategy=strategy, validate=batches())
    means = epoch_means(result.history)
    best = [min(range(6), key=lambda e: means[e][b]) for b in range(3)]
    assert best[1] == 2
    # the last state is written with the best ones in it
    assert best[0] == best[2] == 5
    for name, value in result.student.state_dict().items():
        assert torch.equal(value, states[best[int(name[0])]][name]), name
    used = copy.deepcopy(result.student).eval()
    correct = sum(int((used(x).argmax(1) == y).sum()) for x, y in batches()) / (4 * STEPS)
    assert result.history.of("assembled")[-1].values["accuracy"] == pytest.approx(correct)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_block_that_is_good_enough_is_left_as_it_is_and_others_go_on(devices):
    free, _ = distilled(Recipe(block_input="teacher", logits=False, lr=1e-2, epochs=6))
    threshold = sorted(m[1] for m in epoch_means(free.history))[3]  # reached on the way
    result, states = distilled(
        Recipe(block_input="teacher", logits=False, lr=1e-2, epochs=6, stop_at={1: threshold}), devices
    )
    (note,) = [n for n in result.notes if "stopped" in n]
    assert note.startswith("block 1 stopped after epoch 3")
    assert result.program.stopped == {1}
    assert "student_forward(1" not in str(result.program)
    for name, value in result.student.state_dict().items():
        assert torch.equal(value, states[2][name] if name.startswith("1") else free.student.state_dict()[name]), name
    history = result.history
    assert history.steps == 6 * STEPS
    assert {step[1] for step in history.losses[3 * STEPS :]} == {history.losses[3 * STEPS - 1][1]}
    assert [step[2] for step in history.losses] == [step[2] for step in free.history.losses]


@pytest.mark.timeout(90)
def test_patience_counts_epochs_without_a_gain():
    recipe = Recipe(block_input="teacher", logits=False, lr={0: 0.0, 1: 1e-2, 2: 1e-2}, epochs=5, patience={0: 2})
    result, _ = distilled(recipe)
    assert next(n for n in result.notes if "stopped" in n).startswith("block 0 stopped after epoch 3")


@pytest.mark.timeout(90)
def test_the_training_ends_when_all_blocks_have_stopped():
    result, _ = distilled(Recipe(block_input="teacher", logits=False, lr=0.0, epochs=9, patience=1), 2)
    assert result.history.epoch_ends == [STEPS, 2 * STEPS]


@pytest.mark.timeout(90)
@pytest.mark.parametrize("devices", [1, 2])
def test_later_blocks_still_get_the_own_boundary_of_one_that_has_stopped(devices):
    recipe = Recipe(logits=False, lr={0: 0.0, 1: 1e-2, 2: 1e-2}, epochs=4, patience={0: 1}, block_input="student")
    plain, _ = distilled(Recipe(logits=False, lr={0: 0.0, 1: 1e-2, 2: 1e-2}, epochs=4, block_input="student"))
    result, _ = distilled(recipe, devices)
    assert result.program.stopped == {0}
    assert_equal_state(result.student, plain.student)


@pytest.mark.timeout(90)
def test_its_time_goes_to_others():
    costs = Profile.of([0.1] * 3, [4.0, 4.0, 8.0], 4, devices=2).on(("cpu", "cpu"), (0, 0), (0, 0))
    recipe = Recipe(
        block_input="teacher", logits=False, lr=1e-2, epochs=2, stop_at={2: 1e9}
    )  # at once: later times are measured ones
    result, _ = distilled(recipe, 2, profile=costs)
    assert result.program.stopped == {2}
    assert [a.blocks for a in result.plan.assignments] == [(0,), (1, 2)]
    plain, states = distilled(Recipe(block_input="teacher", logits=False, lr=1e-2, epochs=2))
    for name, value in result.student.state_dict().items():
        assert torch.equal(value, (states[0] if name.startswith("2") else plain.student.state_dict())[name])


@pytest.mark.timeout(90)
def test_skipped_batches_count_for_nothing():
    data = batches()
    data[2] = (torch.full((4, 6), float("nan")), data[2][1])
    recipe = Recipe(
        block_input="teacher", logits=False, lr=1e-2, epochs=3, patience=1, keep_best=True, non_finite="skip"
    )
    student = mlp(4, seed=1)
    kept = Kept(student)
    result = autobd.distill(
        mlp(16),
        student,
        data,
        cuts=CUTS,
        devices=1,
        progress=False,
        profile="analytic",
        recipe=recipe,
        callbacks=[kept],
    )
    assert result.history.epoch_ends == [STEPS, 2 * STEPS, 3 * STEPS]
    assert not [n for n in result.notes if "stopped" in n]
    assert_equal_state(student, _state(kept.states[-1]))


def _state(values):
    model = mlp(4)
    model.load_state_dict(values)
    return model


@pytest.mark.timeout(90)
def test_a_block_that_has_stopped_keeps_its_statistics():
    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)) for _ in "abc")
        )

    student = model(1)
    kept = Kept(student)
    recipe = Recipe(logits=False, epochs=3, stop_at={0: 1e9}, block_input="student")
    autobd.distill(
        model(0), student, batches(), cuts=CUTS, devices=1, progress=False, profile="analytic", recipe=recipe,
        callbacks=[kept],
    )  # fmt: skip
    for name, value in student.state_dict().items():
        assert torch.equal(value, kept.states[0][name]) == name.startswith("0"), name


@pytest.mark.timeout(90)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_judged_at_the_end_has_the_best_weights_also_where_they_are_tied(devices):
    class Tied(torch.nn.Module):
        def __init__(self, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.first, self.middle = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
            self.last = torch.nn.Linear(6, 6)
            self.last.weight = self.first.weight

        def forward(self, x):
            return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))

    student = Tied(1)
    recipe = Recipe(
        block_input="teacher",
        logits=False,
        epochs=4,
        keep_best=True,
        lr=lambda block, progress: 1e-2 if progress < 0.4 else 0.5,
    )
    validation = autobd.Validation(batches(), {"size": lambda output, targets: output.square().mean()})
    result = autobd.distill(
        Tied(0), student, batches(), cuts=[("first", "first"), ("middle", "middle")], devices=open_ranks(devices),
        progress=False, profile="analytic", strategy="tr+dpu", recipe=recipe, ties="first", validate=validation,
    )  # fmt: skip
    assert result.split.ties
    size = sum(float(student.eval()(x).detach().square().mean()) for x, _ in batches()) / STEPS
    assert result.history.of("assembled")[-1].values["size"] == pytest.approx(size)


@pytest.mark.parametrize("values", [{"patience": 0}, {"stop_at": -1.0}, {"keep_best": 1}])
def test_values_that_make_no_sense(values):
    with pytest.raises(InputError, match=next(iter(values))):
        Recipe(block_input="teacher", **values)
