"""Every field of a recipe does what its name says: as a plain loop written for it, to the bit on one rank, and on two
as on one."""

import copy
import warnings

import pytest
import torch
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state

import autobd
from autobd import Recipe
from autobd.errors import InputError, NonFiniteError

CUTS = [("0", "0"), ("1", "1")]
ROWS, STEPS = 8, 5


def models(dtype=torch.float32):
    return mlp(16).to(dtype), mlp(4, seed=1).to(dtype)


def batches(dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(ROWS, 6, generator=generator, dtype=dtype) for _ in range(STEPS)]


def distilled(recipe, dtype=torch.float32, data=None, **options):
    teacher, student = models(dtype)
    options = {"devices": 1, **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(
        teacher, student, batches(dtype) if data is None else data, recipe=recipe, cuts=CUTS, threads=1,
        progress=False, profile="analytic", **options,
    )  # fmt: skip


class Plain:
    """Blockwise distillation in plain PyTorch, for one option at a time."""

    def __init__(self, epochs=1, make=torch.optim.AdamW, lr=1e-3, accumulate=1, half=None, scaled=False, ema=None):
        self.epochs, self.make, self.lr, self.accumulate, self.half, self.ema = epochs, make, lr, accumulate, half, ema
        self.scalers = [torch.amp.GradScaler("cpu", enabled=scaled) for _ in range(3)]

    def train(self, dtype=torch.float32, data=None):
        teacher, student = models(dtype)
        teacher.eval(), student.train()
        data = batches(dtype) if data is None else data
        optimizers = [self.optimizer(b, block) for b, block in enumerate(student)]
        scales, averages, waiting = [None] * 3, copy.deepcopy(student), [0] * 3
        for _ in range(self.epochs):
            for batch in data:
                x = batch
                for b in range(3):
                    with torch.no_grad(), self.cast():
                        target = teacher[b](x)
                    target = target.to(dtype)
                    scales[b] = target.square().mean() if scales[b] is None else scales[b]
                    with self.cast():
                        output = student[b](x)
                    loss = (output.to(dtype) - target).square().flatten(1).mean(1).mean() / scales[b]
                    loss = loss / self.accumulate if self.accumulate > 1 else loss
                    self.scalers[b].scale(loss).backward()
                    waiting[b] += 1
                    if waiting[b] == self.accumulate:
                        self.step(b, student, optimizers[b], averages)
                        waiting[b] = 0
                    x = target
            for b in range(3):
                if waiting[b]:
                    for p in student[b].parameters():
                        p.grad *= self.accumulate / waiting[b]
                    self.step(b, student, optimizers[b], averages)
                    waiting[b] = 0
        return averages if self.ema else student

    def optimizer(self, number, block):
        return self.make(block.parameters(), lr=self.lr)

    def cast(self):
        return torch.autocast("cpu", self.half, enabled=self.half is not None)

    def step(self, b, student, optimizer, averages):
        self.scalers[b].step(optimizer)
        self.scalers[b].update()
        optimizer.zero_grad()
        if self.ema:
            with torch.no_grad():
                for mean, p in zip(averages[b].parameters(), student[b].parameters(), strict=True):
                    mean.lerp_(p, 1 - self.ema)


def equal_on_two_ranks(recipe, exact=True):
    """Of one rank and two stages to the bit; of replicas within rounding, in double precision."""
    one = distilled(recipe).student
    assert_equal_state(distilled(recipe, devices=2, strategy="tr+dpu").student, one)
    one, two = (distilled(recipe, torch.float64, devices=d, strategy=s).student for d, s in ((1, "tr+dpu"), (2, "dp")))
    for name, value in one.state_dict().items():
        torch.testing.assert_close(two.state_dict()[name], value, rtol=0, atol=1e-10)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", [2, 3, 7])
def test_accumulated_batches_make_one_step_and_what_is_left_its_own(count):
    recipe = Recipe(block_input="teacher", logits=False, accumulate=count, epochs=2)
    assert_equal_state(distilled(recipe).student, Plain(epochs=2, accumulate=count).train())
    if count == 3:
        equal_on_two_ranks(recipe)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("precision", "half"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_precision_acts_and_weights_stay_whole(precision, half):
    recipe = Recipe(block_input="teacher", logits=False, precision=precision, lr=1e-2)
    result = distilled(recipe)
    assert_equal_state(result.student, Plain(half=half, scaled=precision == "fp16", lr=1e-2).train())
    assert {p.dtype for p in result.student.parameters()} == {torch.float32}
    assert result.history.losses != distilled(Recipe(block_input="teacher", logits=False, lr=1e-2)).history.losses
    assert_equal_state(distilled(recipe, devices=2, strategy="tr+dpu").student, result.student)


@pytest.mark.timeout(120)
def test_half_precision_for_one_block_leaves_the_others_alone():
    result, whole = (
        distilled(Recipe(block_input="teacher", logits=False, precision={1: "bf16"})),
        distilled(Recipe(block_input="teacher", logits=False)),
    )
    mine, theirs = result.history.losses[0], whole.history.losses[0]
    assert mine[0] == theirs[0]
    assert mine[1] != theirs[1]


def test_a_scale_of_gradients_that_is_too_large_is_made_less():
    huge = torch.optim.SGD
    loss = {0: lambda s, t: (s - t).square().flatten(1).mean(1) * 1e36}
    result = distilled(
        Recipe(block_input="teacher", logits=False, precision={0: "fp16"}, optimizer=huge, lr=0.0, loss=loss)
    )
    assert result.history.steps == STEPS  # the first gradients are infinite


@pytest.mark.timeout(120)
def test_the_student_gets_the_moving_average():
    recipe = Recipe(block_input="teacher", logits=False, ema=0.8, epochs=3, lr=1e-2)
    expected = Plain(epochs=3, ema=0.8, lr=1e-2).train()
    result = distilled(recipe)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(result.student.state_dict()[name], value, rtol=1e-6, atol=1e-7)
    equal_on_two_ranks(recipe)


class Decayed(Plain):
    """Weights decay, biases do not; the last block's biases learn ten times slower."""

    def optimizer(self, number, block):
        weights = [p for p in block.parameters() if p.ndim > 1]
        biases = [p for p in block.parameters() if p.ndim < 2]
        slow = {"lr": self.lr * (0.1 if number == 2 else 1)}
        return torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0, **slow}], lr=self.lr
        )


def scaled(name, parameter):
    return {"lr_scale": 0.1} if name.startswith("2.") and parameter.ndim < 2 else None


@pytest.mark.parametrize("lr", [1e-2, lambda block, progress: 1e-2])
def test_weights_decay_and_groups_have_rates_of_their_own(lr):
    expected = Decayed(lr=1e-2).train()
    mine = distilled(Recipe(block_input="teacher", logits=False, lr=lr, weight_decay=0.5, groups=scaled)).student
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.timeout(120)
def test_recomputed_activations_change_nothing():
    recipe = Recipe(block_input="teacher", logits=False, recompute=True, epochs=2)
    assert_equal_state(distilled(recipe).student, Plain(epochs=2).train())


@pytest.mark.timeout(300)
def test_compiled_blocks_learn_the_same():
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        mine = distilled(Recipe(block_input="teacher", logits=False, compile={1: True})).student
    for name, value in Plain().train().state_dict().items():
        torch.testing.assert_close(mine.state_dict()[name], value, rtol=1e-4, atol=1e-5)


def test_blocks_that_cannot_be_compiled_run_as_they_are_with_one_warning(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda module: broken)
    with pytest.warns(UserWarning, match="block 0 runs as it is, torch.compile has failed: ZeroDivisionError") as told:
        mine = distilled(Recipe(block_input="teacher", logits=False, compile=True)).student
    assert len([w for w in told if "torch.compile" in str(w.message)]) == 1
    assert_equal_state(mine, Plain().train())


def broken(*given):
    raise ZeroDivisionError("no compiler")


@pytest.mark.parametrize("freeze", [["0"], ["0.*"], ["0.[03].*"], lambda name: name.startswith("0.")])
def test_frozen_parts_are_not_trained_and_stay_trainable(freeze):
    before, mine = models()[1], distilled(Recipe(block_input="teacher", logits=False, freeze=freeze)).student
    expected = Plain().train()
    for name, value in mine.state_dict().items():
        assert torch.equal(value, (before if name.startswith("0.") else expected).state_dict()[name])
    assert all(p.requires_grad for p in mine.parameters())


def test_a_pattern_that_freezes_nothing_is_refused():
    with pytest.raises(InputError, match=r"(?s)names nothing in the student.*perhaps you meant 2.0.bias"):
        distilled(Recipe(block_input="teacher", freeze=["O.0"]))


@pytest.mark.timeout(120)
def test_batches_with_nan_are_skipped_if_asked_for_and_named_if_not():
    data = batches()
    data[2] = data[2].clone()
    data[2][3, 1] = float("nan")
    clean = [b for i, b in enumerate(data) if i != 2]
    assert_equal_state(
        distilled(Recipe(block_input="teacher", logits=False, non_finite="skip"), data=data).student,
        Plain().train(data=clean),
    )
    recipe = Recipe(block_input="teacher", logits=False, non_finite="skip")
    assert_equal_state(distilled(recipe, data=data, devices=2, strategy="tr+dpu").student, Plain().train(data=clean))
    with pytest.raises(NonFiniteError, match=r"(?s)Rank 0, block 0 .*step 2.*input of the block from nan to nan"):
        distilled(Recipe(block_input="teacher", logits=False), data=data)


def test_running_statistics_are_not_spoilt_by_what_is_skipped():
    def model(seed):
        torch.manual_seed(seed)
        layers = [torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)) for _ in range(2)]
        return torch.nn.Sequential(*layers)

    data = batches()
    data[0] = torch.full_like(data[0], float("inf"))
    found = [
        autobd.distill(
            model(0), model(1), given, example=data[1], cuts=[("0", "0")], progress=False, devices=1,
            recipe=Recipe(block_input="teacher", logits=False, non_finite="skip"),
        ).student.state_dict()
        for given in (data, data[1:])
    ]  # fmt: skip
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


@pytest.mark.parametrize("found", [{"lr": 0.0}, {"params": []}, 3])
def test_groups_that_give_no_options_are_refused(found):
    with pytest.raises(InputError, match=r"Recipe.groups gives no options for 0\.0\.weight"):
        distilled(Recipe(block_input="teacher", groups=lambda name, parameter: found))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"lr": lambda block, progress: "x"}, "Recipe.lr gives no learning rate for block 0"),
        ({"lr": lambda block, progress: 1 / 0}, "(?s)Recipe.lr fails for block 0.*ZeroDivisionError"),
        ({"groups": lambda name, parameter: 1 / 0}, "(?s)Recipe.groups fails for block 0.*ZeroDivisionError"),
        ({"optimizer": lambda parameters, lr: None}, "Recipe.optimizer makes no optimizer for block 0"),
        ({"optimizer": lambda parameters: None}, "(?s)Recipe.optimizer fails for block 0.*TypeError"),
    ],
)
def test_functions_of_a_recipe_that_fail_are_named(fields, said):
    with pytest.raises(InputError, match=said):
        distilled(Recipe(block_input="teacher", **fields))


class Endless:
    """Batches, without a length."""

    def __iter__(self):
        return iter(batches())


RATE = autobd.Schedule(1e-2, warmup=0.05)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("recipe", [Recipe(lr=RATE), Recipe(lr={1: RATE}), Recipe(block_input="teacher-then-student")])
def test_what_goes_by_the_progress_needs_a_length(recipe):
    with pytest.raises(InputError, match="length of the training is not known"):
        distilled(recipe, data=Endless())


@pytest.mark.timeout(60)
def test_an_epoch_shows_the_length_to_the_training_after_it():
    endless, plain = (
        distilled(Recipe(block_input="teacher", logits=False), data=d, finish=2) for d in (Endless(), None)
    )
    assert_equal_state(endless.student, plain.student)
    assert endless.history.finish.steps == 2 * STEPS


@pytest.mark.parametrize("count", [1, 4])
def test_what_is_left_of_an_epoch_can_be_skipped_too(count):
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)) for _ in "ab"))
        for _ in range(2)
    ]
    data = [*batches(), torch.full((ROWS, 6), float("nan"))]
    recipe = Recipe(block_input="teacher", logits=False, non_finite="skip", accumulate=count)
    student = autobd.distill(*models, data, cuts=[("0", "0")], progress=False, devices=1, recipe=recipe).student
    assert all(t.isfinite().all() for t in student.state_dict().values())


@pytest.mark.parametrize(
    ("values", "message"),
    [({"precision": "fp16"}, "scales its gradients"), ({"accumulate": {0: 2}}, "differ in precision or accumulation")],
)
def test_weights_that_are_trained_together_have_one_way(values, message):
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
            self.c = torch.nn.Linear(6, 6)
            self.c.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x).relu()).relu())

    with pytest.raises(InputError, match=message):
        autobd.distill(
            Tied(), Tied(), batches(), cuts=[("a", "a"), ("b", "b")], ties="together", progress=False, devices=1,
            recipe=Recipe(block_input="teacher", logits=False, **values),
        )  # fmt: skip
