"""The assembled student and the teacher are judged through the ranks that hold their blocks, as their owner would."""

import copy

import pytest
import torch
from opened import open_ranks
from torch import nn
from torch.utils.data import TensorDataset

import autobd
from autobd import Recipe, Validation
from autobd.errors import InputError

CUTS = [("0", "0"), ("1", "1")]
ROWS = 8


def model(width, seed, dropout=0.0):
    torch.manual_seed(seed)
    parts = [
        nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 6))
        for _ in range(3)
    ]
    return nn.Sequential(*parts)


def models():
    return model(16, 0), model(4, 1, dropout=0.2)


def batches(sizes=(ROWS,) * 5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, 6, generator=generator), torch.randint(6, (n,), generator=generator)) for n in sizes]


HELD_OUT = batches((ROWS, ROWS, 3, 1), seed=9)


def distilled(student=None, data=None, **options):
    teacher, own = models()
    options = {"recipe": Recipe(logits=True, block_input="teacher"), "epochs": 2, "validate": HELD_OUT, **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(
        teacher, own if student is None else student, batches() if data is None else data, cuts=CUTS, threads=1,
        profile="analytic", progress=False, timeout=30, **options,
    )  # fmt: skip


def correct(model):
    """Part of all rows, with the whole model in one place."""
    used = copy.deepcopy(model).eval()
    rows = sum(len(y) for _, y in HELD_OUT)
    return sum(int((used(x).argmax(1) == y).sum()) for x, y in HELD_OUT) / rows


PLANS = [(1, "tr+dpu"), (2, "tr+dpu"), (2, "tr"), (2, "dp"), (2, "ir"), (3, "ls"), (3, "ahd")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("devices", "strategy"), PLANS)
def test_both_models_get_the_score_that_they_have_in_one_place(devices, strategy):
    result = distilled(devices=devices, strategy=strategy)
    history = result.history
    assert [(s.what, s.epoch, s.step) for s in history.scores] == [
        ("teacher", 1, 5), ("assembled", 1, 5), ("assembled", 2, 10),
    ]  # fmt: skip
    assert history.of("teacher")[0].values["accuracy"] == pytest.approx(correct(models()[0]))
    assert history.of("assembled")[-1].values["accuracy"] == pytest.approx(correct(result.student))
    assert "assembled" in str(history)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["tr+dpu", "ir"])
def test_judging_changes_nothing(strategy):
    with_it, without = (distilled(devices=2, strategy=strategy, validate=v) for v in (HELD_OUT, None))
    for name, value in without.student.state_dict().items():
        assert torch.equal(with_it.student.state_dict()[name], value)
    assert with_it.history.losses == without.history.losses


class Dropped(nn.Module):
    """Dropout by the module's own flag."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        return nn.functional.dropout(self.mix(x), 0.5, self.training)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("devices", [1, 2])
def test_judging_changes_nothing_where_sequences_have_several_lengths(devices):
    def model(seed):
        torch.manual_seed(seed)
        return nn.Sequential(*(Dropped() for _ in range(3)))

    def sequences(lengths, seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(4, n, 6, generator=generator) for n in lengths]

    found = []
    for lengths in ((), (5, 3, 4), (3, 4, 5)):
        validate = Validation(sequences(lengths, 1), {"size": lambda y, _: y.abs().mean()}) if lengths else None
        result = autobd.distill(
            model(0), model(1), sequences((3, 4, 3, 4), 2), cuts=CUTS, devices=open_ranks(devices), strategy="tr+dpu",
            epochs=3, validate=validate, profile="analytic", progress=False, replan=False,
        )  # fmt: skip
        found.append(result.history.losses)
    assert found[0] == found[1] == found[2]


@pytest.mark.timeout(120)
def test_metrics_see_every_row_once_and_in_order():
    class Rows:
        """Counts by itself, as metrics of torchmetrics do."""

        def reset(self):
            self.seen = []

        def update(self, output, targets):
            self.seen.append((output.clone(), targets.clone()))

        def compute(self):
            return float(sum(len(o) for o, _ in self.seen))

    rows = Rows()
    metrics = {"rows": rows, "error": lambda output, targets: output.square().mean()}
    result = distilled(devices=3, strategy="ahd", validate=Validation(HELD_OUT, metrics, every=5))
    student = result.student.eval()
    assert [s.what for s in result.history.scores] == ["teacher", "assembled"]  # at the end, whatever `every`
    assert result.history.scores[-1].values["rows"] == sum(len(y) for _, y in HELD_OUT)
    for (x, y), (output, targets) in zip(HELD_OUT, rows.seen, strict=True):
        torch.testing.assert_close(output, student(x).detach())
        assert torch.equal(targets, y)
    squares = sum(float(student(x).detach().square().mean()) * len(y) for x, y in HELD_OUT) / sum(
        len(y) for _, y in HELD_OUT
    )
    assert result.history.scores[-1].values["error"] == pytest.approx(squares)


@pytest.mark.timeout(120)
def test_datasets_are_read_in_their_order_and_the_average_is_judged():
    data = TensorDataset(*(torch.cat(t) for t in zip(*HELD_OUT, strict=True)))
    result = distilled(
        devices=2, strategy="tr+dpu", validate=Validation(data, batch_size=7), recipe=Recipe(logits=True, ema=0.9)
    )
    assert result.history.of("assembled")[-1].values["accuracy"] == pytest.approx(correct(result.student))


def recalibrated(student, data):
    """Batch norms set by the batches, in plain PyTorch."""
    found = copy.deepcopy(student).eval()
    norms = [m for m in found.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for x, _ in data:
            found(x)
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("devices", "strategy"), [(1, "tr+dpu"), (2, "tr+dpu"), (3, "ls")])
def test_batch_norms_take_the_statistics_of_the_assembled_student(devices, strategy):
    plain = distilled(devices=devices, strategy=strategy, validate=None).student
    result = distilled(devices=devices, strategy=strategy, recalibrate=3)
    expected = recalibrated(plain, batches()[:3])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(result.student.state_dict()[name], value)
    assert [s.what for s in result.history.scores[-2:]] == ["assembled", "recalibrated"]
    assert result.history.of("recalibrated")[0].values["accuracy"] == pytest.approx(correct(result.student))
    assert result.student[0][1].momentum == 0.1


@pytest.mark.timeout(120)
def test_replicas_share_their_statistics():
    result, plain = (distilled(devices=2, strategy="ir", recalibrate=r, validate=None) for r in (2, 0))
    halves = [[(x[a:b], y) for x, y in batches()[:2]] for a, b in ((0, 4), (4, 8))]
    means = [recalibrated(plain.student, half)[0][1].running_mean for half in halves]
    torch.testing.assert_close(result.student[0][1].running_mean, (means[0] + means[1]) / 2)


def convolutional(width, seed):
    torch.manual_seed(seed)
    parts = [
        nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 1))
        for _ in range(3)
    ]
    return nn.Sequential(*parts)


def images(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 3, n, n, generator=generator) for n in sizes]


SIZE = {"size": lambda output, targets: output.abs().mean()}
APART = autobd.Plan(  # an evaluation, which has nobody send to itself, runs on rank 0 alone
    "mine", 6, ("cpu", "cpu"),
    (autobd.Assignment((0,), (0,), (6,), "prefix"), autobd.Assignment((1, 2), (0, 1), (3, 3), "prefix")),
)  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("devices", "strategy"), [(1, "tr+dpu"), (2, "tr+dpu"), (2, APART)])
def test_images_of_other_sizes_are_judged_and_counted_in_the_modes_that_belong_there(devices, strategy):
    student, held_out = convolutional(4, 1), images((9, 8, 10), 1)
    options = {
        "cuts": CUTS, "devices": open_ranks(devices), "strategy": strategy, "epochs": 3, "profile": "analytic",
        "progress": False, "replan": False, "timeout": 30,
    }  # fmt: skip
    result = autobd.distill(
        convolutional(8, 0), student, images((8, 6), 2), validate=Validation(held_out, SIZE), **options
    )
    assert {int(m.num_batches_tracked) for m in student.modules() if isinstance(m, nn.BatchNorm2d)} == {6}
    sizes = [float(student.eval()(x).detach().abs().mean()) for x in held_out]
    assert result.history.of("assembled")[-1].values["size"] == pytest.approx(sum(sizes) / 3)
    again = convolutional(4, 1)
    autobd.distill(
        convolutional(8, 0), again, images((8, 6), 2), validate=Validation(held_out, SIZE), recalibrate=2, **options
    )
    expected = recalibrated(student, [(x, None) for x in images((8, 6), 2)])
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.timeout(120)
def test_a_metric_that_raises_is_named_and_the_student_is_as_at_the_epochs_end():
    def broken(output, targets):
        raise KeyError("f1")

    student, reference = models()[1], distilled(devices=2, strategy="tr+dpu", epochs=1, validate=None).student
    with pytest.raises(InputError, match=r"The metric 'f1' has failed: KeyError"):
        distilled(student, devices=2, strategy="tr+dpu", validate=Validation(HELD_OUT, {"f1": broken}))
    for name, value in reference.state_dict().items():
        assert torch.equal(student.state_dict()[name], value)


@pytest.mark.parametrize(
    ("validate", "message"),
    [
        (lambda: Validation(HELD_OUT, {"f1": 3}), "cannot be called"),
        (lambda: Validation(HELD_OUT, every=0), "every is no count"),
        (lambda: [], "has no batch"),
        (lambda: iter(HELD_OUT), "cannot be read every time"),
        (lambda: 5, "cannot be read every time"),
        (lambda: {"x": HELD_OUT}, "cannot be read every time"),
        (lambda: [(torch.randn(4, 5), torch.zeros(4).long())], "another size than the first one"),
    ],
)
@pytest.mark.timeout(60)
def test_validation_that_makes_no_sense(validate, message):
    student, before = models()[1], models()[1]
    with pytest.raises((InputError, autobd.AutobdError), match=message):
        distilled(student, devices=1, validate=validate())
    assert torch.equal(student[0][0].weight, before[0][0].weight)  # refused before anything is trained


@pytest.mark.parametrize(
    ("recalibrate", "data", "message"),
    [(-1, None, "no count"), ("yes", None, "no count"), (2, iter(batches()), "read once only")],
)
def test_recalibration_that_makes_no_sense(recalibrate, data, message):
    with pytest.raises(InputError, match=message):
        distilled(data=data, devices=1, recalibrate=recalibrate)


def test_data_alone_is_not_enough_for_what_is_no_classifier():
    with pytest.raises(InputError, match="does not say what to measure"):
        distilled(devices=1, recipe=Recipe(logits=False))
