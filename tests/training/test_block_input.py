"""What blocks are given where nothing is said: the teacher's boundary, then the student's own."""

import copy

import pytest
import torch
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state, row_losses

import autobd
from autobd import Callback, Recipe
from autobd.errors import PlanError
from autobd.planner import Assignment, Plan

CUTS = [("0", "0"), ("1", "1")]
STEPS = 6


def batches():
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(4, 6, generator=generator) for _ in range(STEPS)]


class Endless:
    """Batches, without a length."""

    def __iter__(self):
        return iter(batches())


def distilled(block_input=None, data=None, student=None, devices=1, **options):
    of_recipe = ("keep_best", "epochs", "steps", "lr", "patience", "accumulate")
    fields = {name: options.pop(name) for name in of_recipe if name in options}
    recipe = Recipe(logits=False, block_input=block_input, **fields)
    return autobd.distill(
        mlp(16), student or mlp(4, seed=1), data or batches(), cuts=CUTS, recipe=recipe, devices=open_ranks(devices),
        profile="analytic", progress=False, **options,
    )  # fmt: skip


def plainly(student, lr=1e-3, accumulate=1):
    """Every block by itself: in the first half on the teacher's boundary, then on what the student's block before it
    gives, from the first batch of an update on."""
    over = -(-STEPS // (2 * accumulate)) * accumulate
    teacher = mlp(16).eval()
    optimizers = [torch.optim.AdamW(block.parameters(), lr) for block in student]
    scales = [None] * 3
    for step, x in enumerate(batches()):
        with torch.no_grad():
            targets = [teacher[: b + 1](x) for b in range(3)]
            scales = [scale or target.square().mean() for scale, target in zip(scales, targets, strict=True)]
            own = [x, *(t.clone() for t in targets[:2])]
        for b in range(3):
            given = own[b]
            output = student[b](given)
            if step >= over and b < 2:
                own[b + 1] = output.detach()
            loss = row_losses(output, targets[b]).mean() / scales[b]
            (loss / accumulate).backward()
            if (step + 1) % accumulate == 0:
                optimizers[b].step()
                optimizers[b].zero_grad()
    return student


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("devices", "strategy"), [(1, "auto"), (2, "tr"), (2, "tr+dpu"), (2, "dp"), (2, "ls"), (2, "ir")]
)
def test_the_second_half_is_on_the_students_own_boundary(devices, strategy):
    found = distilled(devices=devices, strategy=strategy)
    expected = plainly(mlp(4, seed=1))
    if strategy in ("ir", "dp"):  # replicas sum in another order
        for name, value in found.student.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=1e-4, atol=1e-6)
    else:
        assert_equal_state(found.student, expected)
    assert found.program.own_input
    assert not found.notes


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", [1, 2])
def test_it_does_not_change_between_batches_that_make_one_update(devices):
    found = distilled(devices=devices, strategy="tr+dpu", accumulate=2)
    assert_equal_state(found.student, plainly(mlp(4, seed=1), accumulate=2))


@pytest.mark.timeout(60)
def test_without_a_length_it_is_the_teachers_throughout_and_a_note_says_so():
    found = distilled(data=Endless(), epochs=2)
    assert_equal_state(found.student, distilled("teacher", epochs=2).student)
    assert found.notes == (
        "blocks are given the teacher's boundary throughout: the length of the training is not known",
    )
    steps = distilled(data=Endless(), steps=STEPS)
    assert_equal_state(steps.student, distilled("teacher-then-student").student)


@pytest.mark.timeout(60)
def test_so_it_is_where_a_plan_cannot_hand_the_students_boundary_over():
    halves = (2, 2)
    assignments = (Assignment((0,), (0,), (4,), "relay"), Assignment((1, 2), (0, 1), halves, "prefix"))
    plan = Plan("by hand", 4, ("cpu", "cpu"), assignments)
    found, said = distilled(devices=2, strategy=plan), distilled("teacher", devices=2, strategy=plan)
    assert_equal_state(found.student, said.student)
    assert found.notes[-1] == (
        "blocks are given the teacher's boundary throughout: this plan cannot hand the student's own over"
    )
    with pytest.raises(PlanError, match="cannot be handed over"):
        distilled("teacher-then-student", devices=2, strategy=plan)


@pytest.mark.timeout(60)
def test_and_with_candidates_and_for_a_single_block():
    found = distilled(candidates={"1": [torch.nn.Linear(6, 6)]})
    assert found.notes[0].endswith("candidates are compared on it")
    whole = autobd.distill(mlp(16), mlp(4, seed=1), batches(), blocks=1, progress=False)
    assert not whole.notes
    assert not whole.program.own_input


class Kept(Callback):
    """The student at every epoch's end."""

    def __init__(self, student):
        self.student, self.states = student, []

    def on_epoch(self, run):
        self.states.append(copy.deepcopy(self.student.state_dict()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("epochs", [4, 5])
def test_best_weights_are_those_of_epochs_on_the_boundary_that_counts_in_the_end(epochs):
    def rising(block, progress):
        """Good while blocks are given the teacher's boundary, and worse and worse afterwards."""
        return 1e-2 if progress < 0.5 else 0.5 * progress

    student = mlp(4, seed=1)
    kept = Kept(student)
    found = distilled(student=student, keep_best=True, epochs=epochs, lr=rising, callbacks=[kept])
    relative = found.history.relative
    of_epoch = [relative[e * STEPS : (e + 1) * STEPS] for e in range(epochs)]
    means = [[sum(s[b] for s in steps) / len(steps) for b in range(3)] for steps in of_epoch]
    own = range((epochs + 1) // 2, epochs)  # those whose first step already had it
    best = [min(own, key=lambda e: means[e][b]) for b in range(3)]
    assert any(min(range(epochs), key=lambda e: means[e][b]) not in own for b in range(3))
    for name, value in found.student.state_dict().items():
        assert torch.equal(value, kept.states[best[int(name[0])]][name]), name


@pytest.mark.timeout(60)
def test_patience_starts_anew_with_the_students_boundary():
    found = distilled(epochs=4, patience=2, lr=0.0)
    # nothing is learned: each boundary has a first epoch, the second and third count as no gain
    ends = found.history.epoch_ends
    assert len(ends) == 4
    assert all("stopped" not in note for note in found.notes)
