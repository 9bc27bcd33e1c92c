"""A recipe: its losses against formulas written out, values per block, and what it refuses."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import mlp
from torch import nn

import autobd
from autobd import KL, MSE, CosineDistance, Recipe, RelativeL1, Schedule, Weighted
from autobd.errors import InputError, LossError, NonFiniteError

X = [torch.randn(8, 6) for _ in range(4)]
CUTS = [("0", "0"), ("1", "1")]


def run(recipe, student=None, teacher=None, data=X, **kwargs):
    return autobd.distill(
        teacher or mlp(16), student or mlp(4, seed=1), data, recipe=recipe, cuts=CUTS, progress=False, **kwargs
    )


def mean_square_error(s, t):
    return ((s - t) ** 2).mean()


def softened_kl(s, t):
    p, log_q = (t / 2).softmax(-1), (s / 2).log_softmax(-1)
    return 4 * (p * (p.log() - log_q)).sum(-1).mean()


def one_minus_cosine(s, t):
    s, t = s.flatten(), t.flatten()
    return 1 - (s @ t) / (s.norm() * t.norm())


def relative_error(s, t):
    return (s - t).abs().sum() / t.abs().sum()


def two_errors(s, t):
    return 2 * mean_square_error(s, t) + relative_error(s, t) / 2


@given(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=3))
def test_losses_give_one_value_per_row_that_adds_up(rows, dims):
    s, t = torch.randn(2, rows, *dims, 3, dtype=torch.float64)
    formulas = [
        (MSE(), mean_square_error), (KL(2.0), softened_kl), (CosineDistance(), one_minus_cosine),
        (RelativeL1(), relative_error),
        (Weighted((2.0, MSE()), (0.5, RelativeL1())), two_errors),
    ]  # fmt: skip
    for loss, expected in formulas:
        values = loss(s, t)
        assert values.shape == (rows,)
        for i in range(rows):
            assert torch.allclose(values[i], expected(s[i], t[i]))
            assert torch.allclose(loss(s[i : i + 1], t[i : i + 1])[0], values[i])


def test_the_normaliser_is_a_constant_of_the_first_batch():
    teacher = mlp(16)
    student = mlp(4, seed=1)
    with torch.no_grad():
        for p in student.parameters():
            p.zero_()
    data = [torch.randn(8, 6), torch.randn(8, 6) * 10]
    result = run(Recipe(lr=0.0), student, teacher, data)
    first, second = (teacher[0].eval()(x).square().mean() for x in data)
    assert result.history.relative[0][0] == pytest.approx(1.0)
    assert result.history.relative[1][0] == pytest.approx((second / first).item())


def test_values_per_block_act_on_their_block_alone():
    student = mlp(4, seed=1)
    before = copy.deepcopy(student)
    run(Recipe(lr={0: 0.0, 1: 0.1, 2: 0.0}, optimizer={1: torch.optim.SGD}, clip={2: 1.0}), student)
    changed = [not torch.equal(a[0].weight, b[0].weight) for a, b in zip(student, before, strict=True)]
    assert changed == [False, True, False]


def test_a_schedule_gets_block_and_progress():
    seen = []

    def schedule(block, progress):
        seen.append((block, progress))
        return 0.0

    run(Recipe(lr=schedule, epochs=2))
    assert sorted(set(seen)) == [(b, s / 8) for b in range(3) for s in range(8)]


def test_kl_is_for_declared_or_known_logits_on_the_last_block():
    recipe = Recipe()
    assert recipe.for_block(2, 3, True).loss == KL(4.0)
    assert recipe.for_block(1, 3, True).loss == MSE()
    assert recipe.for_block(2, 3, None).loss == MSE()
    assert Recipe(logits=False).for_block(2, 3, True).loss == MSE()
    assert Recipe(logits=True, temperature=2.0).for_block(2, 3, None).loss == KL(2.0)


def test_classifiers_of_the_libraries_are_known_and_two_dimensional_outputs_are_not_guessed():
    import timm
    from torchvision.models import resnet18

    image = torch.randn(2, 3, 64, 64)
    assert autobd.split(resnet18(), resnet18(), image, blocks=2).logits is True
    made = [timm.create_model("resnet10t", num_classes=n) for n in (5, 5, 0, 0)]
    assert autobd.split(made[0], made[1], image, blocks=2).logits is True
    assert autobd.split(made[2], made[3], image, blocks=2).logits is None
    assert autobd.split(mlp(4), mlp(4), X[0], blocks=2).logits is None


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda s, t: (s - t).square(), "neither one value nor one per row"),
        (lambda s, t: (s - t).square().mean(0), "neither one value nor one per row"),
        (lambda s, t: 3.0, "neither one value nor one per row"),
        (lambda s, t: (s.detach() - t).square().mean(), "does not depend on the student"),
    ],
)
def test_a_loss_of_the_wrong_shape_names_its_block(loss, message):
    with pytest.raises(LossError, match=rf"block 1 .*step 0.*{message}"):
        run(Recipe(loss={1: loss}))


def test_any_callable_loss_trains():
    result = run(Recipe(loss=lambda s, t: nn.functional.smooth_l1_loss(s, t), lr=1e-2, epochs=30))
    assert all(last < first for first, last in zip(result.history.losses[0], result.history.losses[-1], strict=True))


def test_a_nan_names_rank_block_step_and_leaves_the_student_whole():
    student = mlp(4, seed=1)
    before = copy.deepcopy(student)
    scale = iter([1.0, 1.0, float("nan"), 1.0])
    recipe = Recipe(loss={1: lambda s, t: (s - t).square().mean() * next(scale)})
    with pytest.raises(NonFiniteError, match=r"Rank 0, block 1 .* step 2: .*the student"):
        run(recipe, student)
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), before.parameters(), strict=True))


def test_a_nan_of_the_teacher_or_of_a_gradient_is_named_as_such():
    teacher = mlp(16)
    teacher[1][0].weight.data.fill_(1e38)
    with pytest.raises(NonFiniteError, match=r"block 1 .*the teacher's boundary"):
        run(Recipe(), teacher=teacher)
    recipe = Recipe(loss={1: lambda s, t: (s - t).square().mean() * 0 + (s * 0).sqrt().mean()})
    with pytest.raises(NonFiniteError, match=r"block 1 .*gradient"):
        run(recipe)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"epochs": 0}, "epochs is no count"),
        ({"epochs": 1.5}, "epochs is no count"),
        ({"steps": 0}, "steps is no count"),
        ({"lr": -1.0}, "lr has an impossible value"),
        ({"clip": {0: float("nan")}}, "clip has an impossible value"),
        ({"weight_decay": -0.1}, "weight_decay has an impossible value"),
        ({"accumulate": 0}, "accumulate has an impossible value"),
        ({"accumulate": {0: 1.5}}, "accumulate has an impossible value"),
        ({"precision": "fp8"}, "precision has an impossible value"),
        ({"compile": 1}, "compile has an impossible value"),
        ({"recompute": None}, "recompute has an impossible value"),
        ({"ema": 1.0}, "ema has an impossible value"),
        ({"non_finite": "ignore"}, "non_finite has an impossible value"),
        ({"loss": 3}, "loss has an impossible value"),
        ({"optimizer": "adam"}, "optimizer has an impossible value"),
        ({"groups": {0: "norm"}}, "groups has an impossible value"),
        ({"freeze": "stem"}, "freeze is one text"),
        ({"temperature": 0.0}, "temperature is not positive"),
    ],
)
def test_values_that_make_no_sense(kwargs, message):
    with pytest.raises(InputError, match=message):
        Recipe(**kwargs)


def test_a_block_that_does_not_exist():
    with pytest.raises(InputError, match=r"Recipe.lr names a block that does not exist"):
        run(Recipe(lr={3: 0.1}))


def test_a_callable_gives_a_value_for_each_block():
    recipe = Recipe(clip=lambda block: block + 1.0, weight_decay=lambda block: None, ema=lambda block: 0.9)
    assert [recipe.for_block(b, 3, None).clip for b in range(3)] == [1.0, 2.0, 3.0]
    with pytest.raises(InputError, match="accumulate has an impossible value"):
        run(Recipe(accumulate=lambda block: block))


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(["cosine", "linear", "constant"]), st.floats(0, 1))
def test_a_schedule_rises_and_falls(warmup, final, decay, progress):
    rate = Schedule(0.1, warmup, decay, final)
    value, later = rate(0, progress), rate(0, min(progress + 0.01, 1.0))
    assert 0 <= value <= 0.1 + 1e-12
    if progress + 0.01 <= warmup:
        assert value <= later
    elif progress >= warmup:
        assert later <= value + 1e-12
    if 1e-9 < warmup < 1:
        assert rate(0, warmup) == pytest.approx(0.1)
        assert rate(0, warmup / 2) == pytest.approx(0.05)
    if warmup < 1:
        assert rate(0, 1.0) == pytest.approx(0.1 if decay == "constant" else 0.1 * final)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"warmup": 1.5}, "longer than the training"), ({"warmup": -0.1}, "negative"), ({"decay": "step"}, "No such"),
        ({"final": 2.0}, "no learning rates"), ({"lr": float("nan")}, "no learning rates"),
    ],
)  # fmt: skip
def test_schedules_that_make_no_sense(values, message):
    with pytest.raises(InputError, match=message):
        Schedule(**{"lr": 0.1, **values})


@pytest.mark.parametrize("terms", [(), (MSE(),), ((1.0, 2.0),), (("a", MSE()),)])
def test_sums_of_losses_that_are_none(terms):
    with pytest.raises(InputError, match=r"weighted loss|no losses"):
        Weighted(*terms)
