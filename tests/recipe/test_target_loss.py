"""A loss against the data's own targets, on the rank that has the last block."""

import pytest
import torch
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state
from torch.nn import functional
from torch.utils.data import TensorDataset

import autobd
from autobd import Recipe, TargetLoss
from autobd.errors import InputError, LossError

CUTS = [("0", "0"), ("1", "1")]
ROWS, STEPS = 6, 5


def models(dtype=torch.float64):
    return mlp(16).to(dtype), mlp(4, seed=1).to(dtype)


def batches(rows=ROWS):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(rows, 6, generator=generator, dtype=torch.float64),
            torch.randint(6, (rows,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def distilled(recipe, data=None, **options):
    options = {"devices": 1, "recipe": recipe, **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(
        *models(), batches() if data is None else data, cuts=CUTS, threads=1, progress=False, profile="analytic",
        **options,
    )  # fmt: skip


def plainly(weight, alone):
    """The last block of the student in plain PyTorch, behind blocks that learn from the teacher alone."""
    teacher, student = models()
    optimizers, scales = [torch.optim.AdamW(b.parameters(), lr=1e-3) for b in student], [None] * 3
    for x, labels in batches():
        for b in range(3):
            target = teacher[b](x).detach()
            scales[b] = scales[b] or target.square().mean()
            output = student[b](x)
            loss = (output - target).square().flatten(1).mean(1).mean() / scales[b]
            if b == 2:
                against = weight * functional.cross_entropy(output, labels, reduction="none").mean()
                loss = against if alone else loss + against
            optimizers[b].zero_grad()
            loss.backward()
            optimizers[b].step()
            x = target
    return student


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("weight", "alone"), [(0.5, False), (1.0, True)])
def test_cross_entropy_is_added_to_the_last_block_or_put_in_its_place(weight, alone):
    recipe = Recipe(block_input="teacher", logits=False, target_loss=TargetLoss("ce", weight, alone))
    expected = plainly(weight, alone)
    assert_equal_state(distilled(recipe).student, expected)
    assert_equal_state(distilled(recipe, devices=2, strategy="tr+dpu").student, expected)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("strategy", ["dp", "ir", "ls"])
def test_targets_are_split_as_the_rows_are(strategy):
    recipe = Recipe(block_input="teacher", logits=False, target_loss="ce")
    expected = plainly(1.0, False).state_dict()
    found = distilled(recipe, devices=2, strategy=strategy).student.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-10)


@pytest.mark.timeout(90)
def test_microbatches_and_own_rows_have_their_targets():
    inputs, labels = (torch.cat(tensors) for tensors in zip(*batches(), strict=True))
    data = TensorDataset(inputs, labels)
    plan = autobd.Plan("mine", ROWS, ("cpu", "cpu"), (
        autobd.Assignment((0, 1), (0,), (ROWS,), "relay"),
        autobd.Assignment((2,), (1,), (ROWS,), "relay", microbatches=3),
    ))  # fmt: skip
    recipe = Recipe(block_input="teacher", logits=False, target_loss="ce")
    one = distilled(recipe, data, batch_size=ROWS).student.state_dict()
    two = distilled(recipe, data, batch_size=ROWS, devices=2, strategy=plan, own_rows=True).student.state_dict()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-10)


def test_targets_come_from_where_they_are_said_to_be():
    dicts = [{"input": x, "y": labels} for x, labels in batches()]
    recipe = Recipe(block_input="teacher", logits=False, target_loss="ce")
    found = distilled(recipe, dicts, targets=lambda batch: batch["y"]).student
    assert_equal_state(found, plainly(1.0, False))
    assert_equal_state(distilled(recipe, [{"input": x, "labels": y} for x, y in batches()]).student, found)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([x for x, _ in batches()], "A batch has no targets"),
        ([(x, None) for x, _ in batches()], "A batch has no targets"),
        ([{"input": x} for x, _ in batches()], "A batch has no targets"),
        ([(x, y[:2]) for x, y in batches()], "The targets are not one for each row"),
        (None, "does not give one value per row"),
    ],
)
def test_targets_that_are_missing_or_do_not_fit(data, message):
    def summed(output, targets):
        return functional.cross_entropy(output, targets)

    recipe = Recipe(block_input="teacher", logits=False, target_loss="ce" if data else TargetLoss(summed))
    with pytest.raises((InputError, LossError), match=message):
        distilled(recipe, data)


def test_classes_that_do_not_exist_name_the_block():
    data = [(x, y + 5) for x, y in batches()]
    with pytest.raises(LossError, match=r"block 2 .*step 0: the loss against the targets has failed"):
        distilled(Recipe(block_input="teacher", logits=False, target_loss="ce"), data)


@pytest.mark.parametrize("values", [{"loss": "mse"}, {"weight": -1.0}, {"weight": None}])
def test_losses_that_make_no_sense(values):
    with pytest.raises(InputError, match=r"TargetLoss\."):
        TargetLoss(**values)
    with pytest.raises(InputError, match="no loss against targets"):
        Recipe(block_input="teacher", target_loss="kd")


class Two(torch.nn.Module):
    """Takes two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, z):
        return self.b(self.a(x) + z)


@pytest.mark.timeout(60)
def test_the_last_of_several_inputs_is_no_target():
    pairs = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(2)]
    options = {"devices": 1, "progress": False, "recipe": Recipe(block_input="teacher", logits=False, target_loss="ce")}
    with pytest.raises(InputError, match="A batch has no targets"):
        autobd.distill(Two(), Two(), pairs, **options)
    autobd.distill(Two(), Two(), [(*p, torch.zeros(4).long()) for p in pairs], **options)
