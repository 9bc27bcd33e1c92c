"""Models with more between their blocks than one tensor per row: as on one rank, whatever the plan."""

import copy

import pytest
import torch
from opened import open_ranks
from torch import nn

import autobd
from autobd.planner import Assignment, Plan

DEVICES = ("cpu",) * 3
STAGES = [Assignment((0,), (2,), (6,), "relay"), Assignment((1, 2), (0,), (6,), "relay")]
STAGES += [Assignment((3,), (1,), (6,), "relay")]
SPLIT = [Assignment((0, 1), (0, 1), (4, 2), "relay"), Assignment((2, 3), (2,), (6,), "relay")]


class Layers(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8), nn.LayerNorm(8)) for _ in range(3)
        )


class Masked(Layers):
    """A mask that an activation decides is read by every layer; what crosses is not a number that can be learned."""

    def forward(self, x):
        x = self.embed(x)
        mask = x.sum(-1, keepdim=True) > 0
        for layer in self.layers:
            x = x + layer(x).masked_fill(mask, 0.0)
        return self.head(x.mean(1))


class Table(Layers):
    """An input that is the same for all rows, and may have as many rows as a batch."""

    def forward(self, x, table):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x + table)
        return self.head(x.mean(1))


class Folded(Layers):
    """Tokens folded into the batch."""

    def forward(self, x):
        rows, tokens, _ = x.shape
        x = self.embed(x).reshape(rows * tokens, 8)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.reshape(rows, tokens, 8).mean(1))


class Strided(Layers):
    """Boundaries that are transposed, and every second column of something."""

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x).repeat_interleave(2, -1)[..., ::2].transpose(0, 1).contiguous().transpose(0, 1)
        return self.head(x.mean(1))


def rows(model, *counts):
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 5, 6, generator=generator).double() for n in counts]
    table = torch.randn(5, 8, generator=generator).double()
    return [{"x": v, "table": table} for v in x] if model is Table else x


@pytest.mark.timeout(60)
@pytest.mark.parametrize("block_input", ["teacher", "student"])
@pytest.mark.parametrize("assignments", [STAGES, SPLIT], ids=["stages", "replicas"])
@pytest.mark.parametrize("model", [Masked, Table, Folded, Strided])
def test_many_ranks_train_as_one_does(model, assignments, block_input):
    teacher, student = model(16, 0).double(), model(4, 1).double()
    alone = copy.deepcopy(student)
    recipe = autobd.Recipe(lr=1e-2, block_input=block_input, logits=False, optimizer=torch.optim.SGD)
    options = {"recipe": recipe, "epochs": 2, "blocks": 4}
    batches = rows(model, 6, 5, 1)
    one = autobd.distill(teacher, alone, batches, devices=["cpu"], threads=1, progress=False, **options)
    plan = Plan("mine", 6, DEVICES, tuple(assignments))
    many = autobd.distill(teacher, student, batches, devices=open_ranks(3), progress=False, strategy=plan, **options)
    assert [len(p.teacher.returns) for p in many.split.pairs] == [len(p.teacher.returns) for p in one.split.pairs]
    close = {"rtol": 0, "atol": 0} if assignments is STAGES else {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(many.history.losses, one.history.losses, **close)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(student.state_dict()[name], value, **close)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("assignments", [STAGES, SPLIT], ids=["stages", "replicas"])
def test_statistics_of_one_share_are_told(assignments):
    pair = []
    for width in (8, 4):
        blocks = [nn.Sequential(nn.Linear(5, width), norm, nn.Linear(width, 5)) for norm in (
            nn.BatchNorm1d(width), nn.LayerNorm(width), nn.BatchNorm1d(width), nn.BatchNorm1d(width)
        )]  # fmt: skip
        pair.append(nn.Sequential(*blocks))
    plan = Plan("mine", 6, DEVICES, tuple(assignments))
    notes = autobd.distill(
        *pair, [torch.randn(6, 5)], devices=open_ranks(3), progress=False, strategy=plan, blocks=4
    ).notes
    assert [n.partition(":")[0] for n in notes] == (
        [] if assignments is STAGES else ["the batch is split over replicas or into microbatches in blocks 0"]
    )


def embedded(width, sparse, dtype=torch.float64):
    torch.manual_seed(width)
    layers = [nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(3)]
    return nn.Sequential(nn.Embedding(20, 8, sparse=sparse), *layers).to(dtype)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("assignments", [STAGES, SPLIT], ids=["stages", "replicas"])
def test_sparse_gradients_are_summed_clipped_and_used_as_dense_ones_are(assignments, clip):
    batches = [torch.randint(0, 20, (6, 5)) for _ in range(3)]
    plan = Plan("mine", 6, DEVICES, tuple(assignments))
    students, losses = [embedded(4, sparse) for sparse in (False, True)], []
    for student in students:
        recipe = autobd.Recipe(lr=0.1, clip=clip, logits=False, optimizer=torch.optim.SGD)
        cuts = [(str(i), str(i)) for i in range(3)]
        result = autobd.distill(
            embedded(16, False),
            student,
            batches,
            devices=open_ranks(3),
            progress=False,
            strategy=plan,
            cuts=cuts,
            recipe=recipe,
        )
        losses.append(result.history.losses)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(students[0].state_dict(), students[1].state_dict(), rtol=1e-12, atol=1e-12)


@pytest.mark.timeout(60)
def test_an_optimizer_for_sparse_gradients_gets_them():
    batches = [torch.randint(0, 20, (6, 5)) for _ in range(3)]
    recipe = autobd.Recipe(
        lr=0.1, logits=False, optimizer={0: torch.optim.SparseAdam, 1: torch.optim.SGD, 2: torch.optim.SGD}
    )
    states = []
    for assignments in (STAGES, SPLIT):
        student = embedded(4, True)
        plan = Plan("mine", 6, DEVICES, tuple(assignments))
        cuts = [(str(i), str(i)) for i in range(3)]
        autobd.distill(
            embedded(16, False),
            student,
            batches,
            devices=open_ranks(3),
            progress=False,
            strategy=plan,
            cuts=cuts,
            recipe=recipe,
        )
        states.append(student.state_dict())
    torch.testing.assert_close(*states, rtol=1e-10, atol=1e-10)
