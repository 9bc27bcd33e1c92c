"""`distill` takes data of every kind, whole batches only, and says what it cannot use."""

from dataclasses import replace

import pytest
import torch
from networks import mlp
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autobd
from autobd.errors import InputError, SplitError

SAMPLES = torch.randn(10, 6)
LABELS = torch.randint(0, 3, (10,))
VALIDATION = autobd.Validation([(SAMPLES, LABELS)], {"size": lambda output, targets: output.norm()})


class Raises:
    def __iter__(self):
        raise RuntimeError("no data")


class Idle(nn.Module):
    """Has weights and gives back what it gets."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


def run(data, **kwargs):
    options = {"cuts": [("0", "0")], "progress": False, **kwargs}
    return autobd.distill(mlp(16), mlp(4, seed=1), data, **options)


@pytest.mark.parametrize(
    ("data", "kwargs", "steps"),
    [
        (DataLoader(TensorDataset(SAMPLES, LABELS), 4, shuffle=True), {}, 3),
        (TensorDataset(SAMPLES, LABELS), {"batch_size": 4}, 3),
        (TensorDataset(SAMPLES), {}, 1),
        (Stream(), {"batch_size": 3}, 4),
        (SAMPLES, {"batch_size": 5}, 2),
        ([SAMPLES, SAMPLES[:1]], {}, 2),
        ([(SAMPLES, LABELS)], {"epochs": 3}, 3),
        ([{"input": SAMPLES, "labels": LABELS}], {}, 1),
        ((SAMPLES[i : i + 2] for i in range(0, 10, 2)), {}, 5),
        (SAMPLES, {"recipe": autobd.Recipe(steps=7), "batch_size": 5}, 7),
    ],
    ids=[
        "loader",
        "dataset",
        "default batch",
        "iterable dataset",
        "tensor",
        "list",
        "targets",
        "dict",
        "generator",
        "steps",
    ],
)
def test_data_of_every_kind(data, kwargs, steps):
    assert run(data, **kwargs).history.steps == steps


def test_the_order_of_a_dataset_follows_the_seed():
    losses = [run(SAMPLES, batch_size=2, seed=s).history.losses for s in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]


def test_each_model_gets_its_own_inputs():
    class Two(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.blocks = mlp(width)

        def forward(self, x, y):
            return self.blocks(x + y)

    batches = [{"left": SAMPLES, "right": SAMPLES, "other": SAMPLES * 2}]
    inputs = (lambda b: (b["left"], b["right"]), lambda b: {"x": b["other"], "y": b["left"] * 0})
    result = autobd.distill(Two(16), Two(4), batches, inputs=inputs, progress=False)
    assert result.history.steps == 1
    both = autobd.distill(Two(16), Two(4), [(SAMPLES, SAMPLES, LABELS)], progress=False)
    assert len(both.split.student.example.tensors) == 2


def test_no_data_is_a_smoke_run_and_says_so():
    with pytest.warns(UserWarning, match="smoke run"):
        result = run(None, example=torch.randn(4, 6))
    assert "smoke run" in str(result)
    with pytest.raises(InputError, match="does not say what inputs it takes"):
        run(None)


def test_models_of_timm_and_torchvision_declare_their_input():
    import timm
    from torchvision.models import inception_v3, resnet18

    from autobd.graph.declared import declared_size

    assert declared_size(timm.create_model("resnet10t")) == (3, 176, 176)
    assert declared_size(resnet18()) == (3, 224, 224)
    assert declared_size(inception_v3(init_weights=False)) == (3, 299, 299)
    assert declared_size(mlp(4)) is None


@pytest.mark.parametrize(
    ("data", "kwargs", "message"),
    [
        ([], {}, "no batch"),
        (TensorDataset(SAMPLES[:0]), {}, "dataset is empty"),
        (iter([SAMPLES]), {"epochs": 2}, "no batch in epoch 1"),
        (3, {}, "Nothing to iterate over"),
        ("digits", {}, "Nothing to iterate over"),
        ([SAMPLES], {"batch_size": 4}, "comes in batches already"),
        ([SAMPLES, torch.randn(4, 5)], {}, "another size than the first one"),
        ([SAMPLES, SAMPLES.double()], {}, "does not fit the teacher"),
        ([SAMPLES, {"nothing": SAMPLES}], {}, "no tensor with a batch dimension"),
        ([()], {}, "batch is empty"),
        (torch.tensor(1.0), {}, "no rows"),
        (Raises(), {}, "(?s)cannot be read.*RuntimeError: no data"),
        (SAMPLES, {"batch_size": -1}, "no number of rows"),
        ([SAMPLES.double()], {}, "(?s)teacher fails on its own example.*one dtype"),
        ([SAMPLES], {"inputs": 3}, "inputs= is not a pair"),
        ([SAMPLES], {"inputs": (1, None)}, "inputs= holds no function"),
        ([SAMPLES], {"inputs": (lambda batch: 1 / 0, None)}, "(?s)inputs= fails on a batch.*ZeroDivisionError"),
        ([SAMPLES], {"targets": 3}, "targets= is no function"),
        (
            [SAMPLES],
            {"targets": lambda batch: 1 / 0, "validate": VALIDATION},
            "(?s)targets= fails on a batch.*ZeroDivisionError",
        ),
        (
            [SAMPLES],
            {"validate": replace(VALIDATION, targets=lambda batch: 1 / 0)},
            "(?s)Validation.targets= fails on a batch.*ZeroDivisionError",
        ),
        ([SAMPLES], {"validate": replace(VALIDATION, data=Raises())}, "(?s)validate with cannot be read.*no data"),
        ([SAMPLES], {"callbacks": "x"}, "callbacks= is no list"),
        ([SAMPLES], {"recipe": 3}, "recipe= is no recipe"),
        ([SAMPLES], {"progress": 3}, "progress= is a switch"),
        ([SAMPLES], {"cuts": 3}, "cuts= holds something else"),
        ([SAMPLES], {"epochs": 0}, "epochs is no count"),
        ([SAMPLES], {"strategy": "trdpu"}, "No such strategy"),
        ([SAMPLES], {"devices": 0}, "no number of devices"),
        ([SAMPLES], {"devices": []}, "names none"),
        ([SAMPLES], {"devices": "cuda:99"}, "No such GPU"),
        ([SAMPLES], {"devices": "meta"}, "No such device"),
        ([SAMPLES], {"devices": "xpu:3"}, "No such device"),
        ([SAMPLES], {"seed": 2**70}, "no seed"),
        ([SAMPLES], {"threads": -1}, "no number of threads"),
        ([SAMPLES], {"timeout": 0}, "no time"),
        ([SAMPLES], {"devices": "gpu"}, "No such device"),
    ],
)
def test_data_and_options_that_cannot_be_used(data, kwargs, message):
    with pytest.raises(InputError, match=message):
        run(data, **kwargs)


@pytest.mark.parametrize("whose", [0, 1])
def test_models_that_compute_nothing_are_refused(whose):
    models = [Idle() if whose == i else mlp(4) for i in range(2)]
    with pytest.raises(SplitError, match=f"The {('teacher', 'student')[whose]} computes nothing"):
        autobd.distill(*models, [SAMPLES], progress=False)


def test_dicts_are_read_by_key_whatever_their_order():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, first, second):
            return self.head(self.a(first) - self.b(second))

    torch.manual_seed(0)
    teacher, batches = Two(), [{"first": torch.randn(4, 3), "second": torch.randn(4, 3)} for _ in range(3)]
    turned = [dict(reversed(b.items())) if i else b for i, b in enumerate(batches)]
    students = [Two(), Two()]
    students[1].load_state_dict(students[0].state_dict())
    for student, data in zip(students, (batches, turned), strict=True):
        autobd.distill(teacher, student, data, blocks=1, progress=False)
    for key, value in students[0].state_dict().items():
        assert torch.equal(value, students[1].state_dict()[key]), key
    with pytest.raises(InputError, match="does not fit"):
        autobd.distill(teacher, students[0], [batches[0], {"first": torch.randn(4, 3)}], blocks=1, progress=False)
