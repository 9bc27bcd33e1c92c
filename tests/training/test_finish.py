"""After its blocks the whole student is trained end to end: as a plain loop would, on any number of ranks."""

import copy

import pytest
import torch
from networks import mlp
from opened import open_ranks
from torch import nn
from torch.nn import functional

import autobd
from autobd import Finish, Recipe
from autobd.errors import InputError

CUTS = [("0", "0"), ("1", "1")]
ROWS, STEPS = 6, 4


def models():
    return mlp(16).double(), mlp(4, seed=1).double()


def batches(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, 6, generator=generator, dtype=torch.float64), torch.randint(6, (ROWS,), generator=generator))
        for _ in range(STEPS)
    ]


def distilled(finish, **options):
    options = {"devices": 1, "recipe": Recipe(block_input="teacher", logits=True), "data": batches(), **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(
        *models(), options.pop("data"), cuts=CUTS, threads=1, progress=False, profile="analytic", finish=finish,
        **options,
    )  # fmt: skip


def plainly(start, loss_of, epochs, make=torch.optim.AdamW):
    """The student from `start` on, end to end."""
    teacher, student = models()[0].eval(), copy.deepcopy(start)
    optimizer = make(student.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for x, labels in batches():
            loss = loss_of(student(x), teacher(x).detach(), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return student, losses


def softened(output, target, labels):
    log_q, p = (output / 2).log_softmax(-1), (target / 2).softmax(-1)
    return 4 * functional.kl_div(log_q, p, reduction="batchmean")


def entropy(output, target, labels):
    return functional.cross_entropy(output, labels)


def both(output, target, labels):
    return softened(output, target, labels) + 0.5 * entropy(output, target, labels)


def squares(output, target):
    return (output - target).square().mean(1)


WAYS = [
    (Finish(2, "kd", 1e-2, temperature=2.0), softened),
    (Finish(2, "ce", 1e-2), entropy),
    (Finish(2, "kd", 1e-2, temperature=2.0, target_loss=autobd.TargetLoss("ce", 0.5)), both),
    (Finish(2, squares, 1e-2), lambda output, target, labels: squares(output, target).mean()),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_it_is_what_a_plain_loop_gives(way):
    finish, loss_of = WAYS[way]
    start = distilled(None).student
    expected, losses = plainly(start, loss_of, 2)
    for devices in (1, 2):
        result = distilled(finish, devices=devices)
        assert [step[0] for step in result.history.finish.losses] == pytest.approx(losses, rel=1e-9)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(result.student.state_dict()[name], value, rtol=1e-9, atol=1e-9)
        assert result.history.steps == STEPS


@pytest.mark.timeout(120)
def test_scores_are_kept_apart():
    result = distilled(1, devices=2, strategy="tr+dpu", validate=batches(9))
    assert [s.what for s in result.history.scores] == ["teacher", "assembled", "finished"]
    found = sum(int((result.student(x).argmax(1) == y).sum()) for x, y in batches(9)) / (ROWS * STEPS)
    assert result.history.of("finished")[0].values["accuracy"] == pytest.approx(found)


@pytest.mark.timeout(120)
def test_each_rank_may_load_its_own_rows():
    data = torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*batches(), strict=True)))
    options = {"data": data, "batch_size": ROWS, "devices": 2}
    mine, theirs = (distilled(Finish(1, "ce", 1e-2), own_rows=own, **options).student for own in (True, False))
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(theirs.state_dict()[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.timeout(120)
def test_frozen_parts_stay_frozen():
    before = models()[1]
    result = distilled(1, recipe=Recipe(block_input="teacher", logits=True, freeze=["0"]))
    assert torch.equal(result.student[0][0].weight, before[0][0].weight)
    assert not torch.equal(result.student[1][0].weight, before[1][0].weight)


@pytest.mark.timeout(60)
def test_targets_that_are_missing_are_told_before_anything_is_trained():
    student, before = models()[1], models()[1]
    with pytest.raises(InputError, match="A batch has no targets"):
        autobd.distill(
            models()[0], student, [x for x, _ in batches()], cuts=CUTS, devices=1, progress=False,
            finish=Finish(loss="ce"), recipe=Recipe(block_input="teacher", logits=True),
        )  # fmt: skip
    assert torch.equal(student[0][0].weight, before[0][0].weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Finish(loss="mse"), "no loss"), (lambda: Finish(loss="ce", target_loss="ce"), "two losses"),
        (lambda: Finish(0), "epochs is no count"), (lambda: distilled(True), "no way to finish"),
        (lambda: distilled(1, hybrid=True), "cannot be finished"),
        (lambda: distilled(1, data=iter(batches()), example=batches()[0][0]), "read once only"),
    ],
)  # fmt: skip
def test_what_makes_no_sense(make, message):
    with pytest.raises(InputError, match=message):
        make()


class Counting(nn.Linear):
    """Counts its calls."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


@pytest.mark.parametrize(("finish", "runs"), [(Finish(2, "ce"), False), (Finish(2, "kd"), True)])
def test_the_teacher_runs_only_where_its_output_is_wanted(finish, runs):
    teacher, student = models()
    teacher[0][0] = Counting(teacher[0][0].in_features, teacher[0][0].out_features, dtype=teacher[0][0].weight.dtype)
    seen = []

    class Watch(autobd.Callback):
        def on_start(self, run):
            seen.append(Counting.calls)

        def on_end(self, run):
            seen.append(Counting.calls)

    autobd.distill(
        teacher, student, batches(), cuts=CUTS, devices=1, progress=False, finish=finish, callbacks=[Watch()],
        recipe=Recipe(block_input="teacher", logits=True),
    )  # fmt: skip
    assert seen[1] - seen[0] == STEPS
    assert seen[3] - seen[2] == (2 * STEPS if runs else 0)
