"""Any plan's student equals a serial loop over the same row intervals: the loop is plain PyTorch (`shares.Serial`)."""

import copy
import functools
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from networks import assert_same, fingerprint
from opened import open_ranks
from shares import FEATURES, TOKENS, Model, Part, Serial, adapters_of, batches, pairs, plans

import autobd
from autobd.errors import LossError, PlanError, SplitError
from autobd.planner import STRATEGIES, Assignment, Plan

DEVICES = ("cpu",) * 4
# What random models and plans may rightly be refused for: tensors of equal shape that pair in two ways, hand-overs
# between shares that overlap in part, orders in which ranks wait for each other.
REFUSED = (
    "cannot be learned as a block",
    "cannot be handed over",
    "wait for each other",
    "whose own boundary it takes",
)
EXAMPLES = settings(
    max_examples=int(os.environ.get("AUTOBD_EXAMPLES", "10")),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink what hangs would take an hour
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
RECIPES = st.builds(
    lambda optimizer, lr, clip, block_input: autobd.Recipe(
        optimizer=optimizer, lr=lr, clip=clip, block_input=block_input, logits=False
    ),
    # AdamW divides a gradient that is nothing but rounding (of a bias before a norm) by `eps`.
    st.sampled_from([functools.partial(torch.optim.AdamW, eps=1e-5), functools.partial(torch.optim.SGD, momentum=0.9)]),
    st.sampled_from([1e-3, lambda block, progress: 1e-3 * (1 + block) * (1 - progress / 2)]),
    st.sampled_from([None, 0.1]),
    st.sampled_from(["teacher", "student", "teacher-then-student", lambda progress: min(1.0, 2 * progress)]),
)


def assert_the_plan_gives_what_the_serial_loop_gives(data, image, tied=False, **options):
    teacher, student = data.draw(pairs(image, tied))
    blocks = len(student.parts)
    policy, apart = "first", []
    if tied:
        policy = data.draw(st.sampled_from(["first", "together"]))
        layers = [part.mix for part in student.parts]
        shared = [i for i, layer in enumerate(layers) if layers.count(layer) > 1]
        together = policy == "together" and layers[shared[0]].weight.requires_grad
        apart = [not (together and shared[0] < b <= shared[1]) for b in range(blocks)]
    plan = data.draw(plans(blocks, DEVICES, apart=apart, **options), label="plan")
    adapters = data.draw(st.sampled_from(["auto", "matched"]))
    try:
        result = assert_like_serial(
            teacher, student, data.draw(batches(image)), data.draw(RECIPES), data.draw(st.integers(1, 2)),
            data.draw(st.integers(0, 9)), strategy=plan, adapters=adapters, ties=policy,
        )  # fmt: skip
    except (PlanError, SplitError) as error:
        assume(not any(text in str(error) for text in REFUSED))
        raise
    assert result.plan == plan


def assert_like_serial(teacher, student, given_batches, recipe, epochs, seed, **options):
    """Train with `options`, and with the serial loop over the row intervals of the plan that was chosen."""
    mine, before, student_before = copy.deepcopy(student), fingerprint(teacher), fingerprint(student)
    cuts = list(zip(teacher.cuts, student.cuts, strict=True))
    result = autobd.distill(
        teacher, student, given_batches, recipe=recipe, epochs=epochs, seed=seed, cuts=cuts, progress=False,
        devices=open_ranks(len(DEVICES)), **options,
    )  # fmt: skip
    together = options.get("ties") == "together"
    serial = Serial(teacher, mine, adapters_of(result.split), result.plan, recipe, recipe.own_input, together, seed)
    losses = serial.train(given_batches, epochs)
    assert result.history.epoch_ends == [len(given_batches) * (e + 1) for e in range(epochs)]
    exact = recipe.clip is None and not any(a.replicated or a.microbatches > 1 for a in result.plan.assignments)
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-10, "atol": 1e-10}
    folded = {f"{name}.weight" for a in adapters_of(result.split).values() for name in a.folds}
    torch.testing.assert_close(result.history.losses, losses, **close)
    torch.testing.assert_close(result.history.relative, losses, **close)
    for name, value in mine.state_dict().items():
        wanted = {"rtol": 1e-10, "atol": 1e-10} if name in folded else close
        torch.testing.assert_close(student.state_dict()[name], value, **wanted, msg=lambda m, n=name: f"{n}: {m}")
    assert_same(before, fingerprint(teacher))
    after = fingerprint(student)
    assert result.student is student
    assert {n: (i, g) for n, (i, _, g) in student_before[0].items()} == {n: (i, g) for n, (i, _, g) in after[0].items()}
    assert student_before[1:] == after[1:]
    return result


@pytest.mark.timeout(60)
@EXAMPLES
@given(st.data())
def test_images_with_batch_norm(data):
    assert_the_plan_gives_what_the_serial_loop_gives(data, True)


@pytest.mark.timeout(60)
@EXAMPLES
@given(st.data())
def test_tokens_with_layer_norm_and_a_mask(data):
    assert_the_plan_gives_what_the_serial_loop_gives(data, False)


@pytest.mark.timeout(60)
@EXAMPLES
@given(st.data())
def test_tied_layers(data):
    assert_the_plan_gives_what_the_serial_loop_gives(data, False, tied=True)


@pytest.mark.timeout(60)
@EXAMPLES
@given(st.data())
def test_bit_by_bit_where_nothing_is_replicated(data):
    assert_the_plan_gives_what_the_serial_loop_gives(data, False, replicas=False)


def tokens(width, seed):
    torch.manual_seed(seed)
    parts = [Part(False, width if i else FEATURES, width, True, 0.3 * seed) for i in range(3)]
    return Model(parts, [None] * 3, [False, True, False], width).double()


def some_batches(*rows):
    return [{"x": torch.randn(n, TOKENS, FEATURES).double(), "mask": torch.ones(n, TOKENS).double()} for n in rows]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("block_input", ["teacher", "student"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_of_the_paper(strategy, block_input):
    recipe = autobd.Recipe(lr=1e-2, block_input=block_input, logits=False, optimizer=torch.optim.SGD)
    assert_like_serial(
        tokens(4, 0), tokens(4, 1), some_batches(5, 5, 2, 1), recipe, 2, 3, strategy=strategy, adapters="matched"
    )


@pytest.mark.timeout(60)
def test_a_barrier_is_for_the_ranks_that_train():
    stages = [Assignment((0,), (2,), (4,), "relay"), Assignment((1, 2), (1,), (4,), "relay")]
    recipe = autobd.Recipe(logits=False, block_input="teacher")
    for own in (stages, [Assignment((0, 1, 2), (1,), (4,), "relay")]):
        strategy = Plan("tr", 4, DEVICES, tuple(own))
        assert_like_serial(tokens(4, 0), tokens(4, 1), some_batches(4, 4), recipe, 1, 0, strategy=strategy)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rows", [1, 8])
def test_losses_that_do_not_add_up_are_refused_where_the_batch_is_split(rows):
    def one_value(student, teacher):
        return (student - teacher).square().mean()

    def train(count):
        ranks = tuple(range(count))
        strategy = Plan("ir", count, DEVICES[:count], (Assignment((0, 1, 2), ranks, (1,) * count, "store"),))
        return autobd.distill(
            tokens(4, 0), tokens(4, 1), some_batches(rows, 8), devices=open_ranks(count), threads=1, strategy=strategy,
            recipe=autobd.Recipe(loss=one_value), cuts=[("parts.0", "parts.0"), ("parts.1", "parts.1")],
            progress=False, timeout=20,
        )  # fmt: skip

    assert train(1).history.steps == 2
    with pytest.raises(LossError, match="one value for all rows"):
        train(2)
