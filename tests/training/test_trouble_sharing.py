"""Modules and weights that several blocks use, or that belong to the model itself: each is where it should be.

The number of a test is that of the report in the project's bank of trouble reports. The oracles are plain PyTorch.
"""

import copy

import pytest
import torch
from networks import assert_same, fingerprint
from plain import (
    assert_blocks_are_the_models,
    distilled_like_plain_loop,
    hidden,
    pair,
    row_losses,
    same,
    teacher_boundaries,
)
from torch import nn
from torch.nn import functional

import autobd


class Reused(nn.Module):
    """One activation object after three layers."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 6), nn.Linear(6, width), nn.Linear(width, 6), nn.Linear(6, 2)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.d(self.act(self.c(self.act(self.b(self.act(self.a(x)))))))


REUSED = [
    (lambda m, x, _: m.a(x).relu(), ["a"]),
    (lambda m, x, _: m.c(m.b(x).relu()).relu(), ["b", "c"]),
    (lambda m, x, _: m.d(x), ["d"]),
]


def test_19_cuts_between_two_uses_of_one_module_give_each_uses_own_value():
    batches = [torch.randn(n, 4) for n in (3, 3, 2, 1)]
    teacher, student = pair(Reused)
    result = distilled_like_plain_loop(teacher, student, REUSED, batches, same("act", "act_2"))
    assert_blocks_are_the_models(result.split, batches)
    crossing = [block.returns[0].node.name for block in (p.teacher for p in result.split.pairs)]
    assert len(set(crossing)) == 3
    for bound in result.split.bind_student()[:2]:
        assert any(m is student.act for m in bound.modules()), "both blocks own it"
    with torch.no_grad():
        b1 = teacher.a(batches[2]).relu()
        b2 = teacher.c(teacher.b(b1).relu()).relu()
        expected = [b1, b2, teacher.d(b2)]
    assert all(torch.equal(a, b) for a, b in zip(teacher_boundaries(result.split, batches[2]), expected, strict=True))


def test_19_the_cuts_that_are_chosen_between_uses_are_exact_too():
    split = autobd.split(*pair(Reused), torch.randn(3, 4), blocks=4)
    assert_blocks_are_the_models(split, [torch.randn(n, 4) for n in (3, 1)])
    assert split.verify().exact


class Tied(nn.Module):
    """The output layer's weight is the embedding's."""

    def __init__(self, width):
        super().__init__()
        self.emb, self.one, self.two = nn.Embedding(9, 6), hidden(6, width), hidden(6, width)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens):
        return self.head(self.two(self.one(self.emb(tokens))))


TOKENS = [torch.randint(0, 9, (n, 5), generator=torch.Generator().manual_seed(n)) for n in (4, 3, 1)]


def tied_loop(teacher, student, joined, together):
    """Two epochs of `Tied`, with the output layer in the block of `two` or in one of its own.

    The weight learns in the embedding's block, and from the output layer as well if `together`; else that uses the
    weight as it was at the epoch's start.
    """
    teacher, stale = copy.deepcopy(teacher).eval(), student.emb.weight.detach().clone()
    own = [student.emb.parameters(), student.one.parameters(), student.two.parameters()]
    optimizers = [torch.optim.AdamW(list(p), lr=1e-2) for p in own]
    runs = [lambda m, x, w: m.emb(x), lambda m, x, w: m.one(x)]
    if joined:
        runs += [lambda m, x, w: functional.linear(m.two(x), w)]
    else:
        runs += [lambda m, x, w: m.two(x), lambda m, x, w: functional.linear(x, w)]
    scales = None
    for _ in range(2):
        for tokens in TOKENS:
            x, outputs = tokens, []
            for run in runs:
                with torch.no_grad():
                    y = run(teacher, x, teacher.emb.weight)
                outputs.append((run(student, x, student.emb.weight if together else stale), y))
                x = y
            scales = scales or [y.square().mean() for _, y in outputs]
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(row_losses(s, y).mean() / n for (s, y), n in zip(outputs, scales, strict=True)).backward()
            for optimizer in optimizers:
                optimizer.step()
        stale.copy_(student.emb.weight.detach())


@pytest.mark.parametrize(
    ("policy", "joined", "together"),
    [
        ("auto", False, True),
        ("first", False, False),
        ("auto", True, False),
        ("first", True, False),
        ("together", True, True),
    ],
)
def test_20_tied_weights_stay_tied_and_are_trained_like_a_plain_loop(policy, joined, together):
    teacher, student = pair(Tied)
    expected, before, keys = copy.deepcopy(student), fingerprint(teacher), list(student.state_dict())
    tied_loop(teacher, expected, joined, together)
    cuts = same("emb", "one") if joined else same("emb", "one", "two")
    result = autobd.distill(
        teacher,
        student,
        TOKENS,
        cuts=cuts,
        ties=policy,
        epochs=2,
        recipe=autobd.Recipe(block_input="teacher", lr=1e-2),
        progress=False,
    )
    assert_same(before, fingerprint(teacher))
    assert student.head.weight is student.emb.weight
    assert list(student.state_dict()) == keys
    for key, value in expected.state_dict().items():
        assert torch.allclose(student.state_dict()[key], value, atol=1e-6), key
    (tie,) = result.split.ties
    assert tie.together is together
    assert result.verification.exact
    assert_blocks_are_the_models(result.split, TOKENS)


def test_20_a_tie_is_told_under_both_keys_before_training():
    split = autobd.split(*pair(Tied), TOKENS[0], cuts=same("emb", "one"))
    assert "emb.weight (also head.weight): used in blocks 0, 2, trained in block 0" in str(split)


class Rooted(nn.Module):
    """Parameters and a buffer of the model itself."""

    def __init__(self, width):
        super().__init__()
        self.proj, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.full((6,), 0.1))
        self.one, self.two = hidden(8, width), hidden(8, width)

    def forward(self, x):
        x = self.proj(x - self.mean)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        x = x + self.one(x)
        x = x + self.scale * self.two(x)
        return self.head(x[:, 0] * self.scale)


def embedded(m, x, _):
    return torch.cat([m.cls.expand(len(x), -1, -1), m.proj(x - m.mean)], 1) + m.pos


def test_22_parameters_of_the_model_itself_are_trained_in_the_first_block_that_uses_them_and_keep_their_keys():
    teacher, student = pair(Rooted)
    start = {name: student.state_dict()[name].clone() for name in ("cls", "pos", "scale", "mean")}
    batches = [torch.randn(n, 4, 6) for n in (4, 4, 3, 1)]
    stages = [
        (embedded, ["proj", "cls", "pos"]),
        (lambda m, x, _: x + m.one(x), ["one"]),
        (lambda m, x, _: x + m.scale * m.two(x), ["two", "scale"]),
        (lambda m, x, _: m.head(x[:, 0] * (start["scale"] if m.training else m.scale)), ["head"]),
    ]
    result = distilled_like_plain_loop(teacher, student, stages, batches, same("add", "add_1", "add_2"))
    assert_blocks_are_the_models(result.split, batches)
    assert [len(p.student.returns) for p in result.split.pairs] == [1] * 4, "no parameter is passed on as an input"
    users = {n: [i for i, p in enumerate(result.split.pairs) if n in p.student.parameters] for n in start}
    assert users == {"cls": [0], "pos": [0], "scale": [2, 3], "mean": []}
    assert [(t.parameters, t.blocks, t.together) for t in result.split.ties] == [(("scale",), (2, 3), False)]
    for name in ("cls", "pos", "scale"):
        assert not torch.equal(start[name], student.state_dict()[name]), name
    assert torch.equal(start["mean"], student.mean)


def test_22_where_one_block_holds_every_use_there_is_no_tie():
    teacher, student = pair(Rooted)
    stages = [
        (lambda m, x, b: (y := embedded(m, x, b)) + m.one(y), ["proj", "cls", "pos", "one"]),
        (lambda m, x, _: m.head((x + m.scale * m.two(x))[:, 0] * m.scale), ["two", "scale", "head"]),
    ]
    batches = [torch.randn(n, 4, 6) for n in (3, 2, 1)]
    assert not distilled_like_plain_loop(teacher, student, stages, batches, same("add_1")).split.ties
