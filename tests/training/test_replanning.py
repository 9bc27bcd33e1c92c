"""A run whose blocks take other times than planned moves them at an epoch's end, and computes the same."""

import copy
import os
import time
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state, chained, plain_loop
from shares import Serial, adapters_of, pairs, plans
from shares import batches as random_batches

import autobd
from autobd.costs import Profile
from autobd.errors import PlanError, SplitError
from autobd.program import build
from autobd.training import Batches, Task, ToPair
from autobd.training.train import train

NAMES = "012"
CUTS = [(n, n) for n in NAMES[:-1]]
ROWS, STEPS = 4, 6


class Slow:
    """The default loss in a few words, and a nap."""

    def __call__(self, student, teacher):
        time.sleep(0.02)
        return (student - teacher).square().flatten(1).mean(1)


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, 6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def models():
    return mlp(16).double(), mlp(4, seed=1).double()


def run(devices=2, recipe=None, **options):
    """A run that was planned for a last block that takes the longest; in truth the first two do."""
    teacher, student = models()
    costs = Profile.of([1.0, 1.0, 6.0], [1.0, 1.0, 6.0], ROWS, devices=devices)
    costs = costs.on(("cpu",) * devices, costs.kind_of, costs.nodes)
    options = {"strategy": "tr+dpu", "epochs": 4, **options}
    result = autobd.distill(
        teacher, student, batches(), cuts=CUTS, devices=open_ranks(devices), threads=1, profile=costs, progress=False,
        recipe=recipe or autobd.Recipe(block_input="teacher", logits=False, loss={0: Slow(), 1: Slow()}), **options,
    )  # fmt: skip
    return result, student


def plainly(recipe, epochs=4):
    """The same without ranks."""
    teacher, student = models()
    options = {"cuts": CUTS, "threads": 1, "progress": False, "epochs": epochs, "recipe": recipe}
    autobd.distill(teacher, student, batches(), devices=1, **options)
    return student


@pytest.mark.timeout(90)
def test_blocks_are_moved_and_the_result_is_that_of_one_rank_to_the_bit():
    recipe = autobd.Recipe(block_input="teacher", logits=False, loss={0: Slow(), 1: Slow()})
    result, student = run(recipe=recipe)
    assert [a.blocks for a in result.plan.assignments] == [(0,), (1, 2)]
    assert result.program.plan == result.plan
    assert result.profile.source == "measured"
    (note,) = [n for n in result.notes if n.startswith("planned again")]
    assert "moved from 0-1 on 0 (4 rows); 2-2 on 1 (4 rows) to 0-0 on 0 (4 rows); 1-2 on 1 (4 rows)" in note
    assert result.history.steps == 4 * STEPS
    assert result.history.epoch_ends == [STEPS * n for n in range(1, 5)]
    assert_equal_state(student, plainly(recipe))


@pytest.mark.timeout(90)
def test_a_plain_loop_gives_the_same():
    teacher, student = models()
    with torch.no_grad():
        boundary, scale = batches()[0], []
        for block in teacher:
            boundary = block(boundary)
            scale.append(boundary.square().mean())
    loss = {b: lambda s, t, b=b: Slow()(s, t) / scale[b] for b in (0, 1)}
    plain_loop(teacher, student, chained(*NAMES), batches() * 4)
    result, own = run(recipe=autobd.Recipe(block_input="teacher", logits=False, loss=loss))
    assert any(n.startswith("planned again") for n in result.notes)
    for name, value in own.state_dict().items():
        assert torch.allclose(value, student.state_dict()[name], rtol=0, atol=1e-10)


@pytest.mark.timeout(90)
def test_moved_blocks_keep_momentum_schedule_and_replicas():
    recipe = autobd.Recipe(
        logits=False, block_input="teacher", loss={0: Slow(), 1: Slow()}, clip=0.5,
        lr=lambda block, progress: 0.01 * (1 - progress),
        optimizer=partial(torch.optim.SGD, momentum=0.9, nesterov=True),
    )  # fmt: skip
    result, student = run(devices=3, strategy="ahd", recipe=recipe)
    assert any(n.startswith("planned again") for n in result.notes)
    expected = plainly(recipe).state_dict()
    for name, value in student.state_dict().items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-10), name


@pytest.mark.timeout(90)
def test_frozen_weights_that_came_from_the_teacher_stay_through_a_move_and_are_handed_back():
    teacher, student = mlp(4).double(), mlp(4, seed=1).double()
    for part in student:
        part[0].requires_grad_(False)
    costs = Profile.of([1.0, 1.0, 6.0], [1.0, 1.0, 6.0], ROWS, devices=2).on(("cpu", "cpu"), (0, 0), (0, 0))
    recipe = autobd.Recipe(block_input="teacher", logits=False, loss={0: Slow(), 1: Slow()}, epochs=3)
    result = autobd.distill(
        teacher, student, batches(), cuts=CUTS, devices=open_ranks(2), profile=costs, progress=False, recipe=recipe,
        strategy="tr+dpu", init="teacher",
    )  # fmt: skip
    assert any(n.startswith("planned again") for n in result.notes)
    for mine, theirs in zip(student, teacher, strict=True):
        assert torch.equal(mine[0].weight, theirs[0].weight)


@pytest.mark.timeout(90)
def test_moving_can_be_switched_off():
    result, _ = run(replan=False)
    assert [a.blocks for a in result.plan.assignments] == [(0, 1), (2,)]
    assert not any("planned again" in n for n in result.notes)
    result, _ = run(strategy=result.plan)
    assert [a.blocks for a in result.plan.assignments] == [(0, 1), (2,)]


@pytest.mark.timeout(120)
@settings(
    max_examples=int(os.environ.get("AUTOBD_EXAMPLES", "10")), deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(st.data())
def test_moves_from_any_plan_to_any_other_change_nothing(data):
    tied, image = data.draw(st.booleans()), data.draw(st.booleans())
    teacher, student = data.draw(pairs(image and not tied, tied))
    mine, given_batches = copy.deepcopy(student), data.draw(random_batches(image and not tied))
    recipe = autobd.Recipe(
        logits=False, epochs=3, lr=lambda block, progress: 1e-3 * (2 - progress),
        optimizer=partial(torch.optim.AdamW, eps=1e-5), block_input=data.draw(st.sampled_from(["teacher", "student"])),
    )  # fmt: skip
    cuts = list(zip(teacher.cuts, student.cuts, strict=True))
    try:
        found = autobd.split(
            teacher, student, given_batches[0], cuts=cuts, logits=False, adapters=data.draw(ADAPTERS), ties="first"
        )
        verification = found.verify()
        found = found.fit(found.teacher.example, verification.teacher_writes)
        own_input = recipe.block_input == "student"
        todo = [data.draw(plans(len(found), ("cpu",) * 3, replicas=False, microbatched=False)) for _ in range(3)]
        programs = [build(p, found, own_input=own_input) for p in todo]
    except (PlanError, SplitError):
        assume(False)
    moves = iter(programs[1:])
    arguments = ToPair.of(teacher, student, None, None, None, False)
    result = train(
        Task(
            found, recipe, Batches(given_batches, None, 3), arguments, 3, verification.teacher_writes,
            replan=lambda program, trace, stopped: next(moves),
        ),
        programs[0], open_ranks(3),
    )  # fmt: skip
    serial = Serial(teacher, mine, adapters_of(found), todo[0], recipe, own_input, False, 3)
    losses = serial.train(given_batches, 3)
    torch.testing.assert_close(result.history.losses, losses, rtol=0, atol=0)
    folded = {f"{name}.weight" for a in adapters_of(found).values() for name in a.folds}
    for name, value in mine.state_dict().items():
        close = 1e-10 if name in folded else 0
        torch.testing.assert_close(student.state_dict()[name], value, rtol=close, atol=close)
    assert result.program.plan == todo[-1]


ADAPTERS = st.sampled_from(["auto", "matched"])
