"""`distill` gives bit for bit what a hand-written PyTorch loop gives: parameters, buffers and losses after 20 steps."""

import copy
import functools
import hashlib
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import Residual, assert_same, fingerprint, images, mlp, networks
from torch import nn

import autobd


def step_seed(seed, step, block):
    """The documented key of a student step's randomness, written out again."""
    digest = hashlib.blake2b(repr((seed, step, block, 0, 0)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def plain_loop(teacher_blocks, student_blocks, batches, optimizer, seed=0, clip=None):
    """Blockwise distillation of lists of modules, with nothing but PyTorch. Returns relative losses by step."""
    teacher_blocks = [copy.deepcopy(b).eval() for b in teacher_blocks]
    optimizers = [optimizer([p for p in b.parameters() if p.requires_grad]) for b in student_blocks]
    scales, history = [None] * len(student_blocks), []
    for step, x in enumerate(batches):
        row = []
        for b, (t, s) in enumerate(zip(teacher_blocks, student_blocks, strict=True)):
            with torch.no_grad():
                y = t(x.clone())
            if scales[b] is None:
                scales[b] = y.square().mean()
            torch.manual_seed(step_seed(seed, step, b))
            loss = (s.train()(x.clone()) - y).square().flatten(1).mean(1).mean() / scales[b]
            optimizers[b].zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(s.parameters(), clip)
            optimizers[b].step()
            row.append(loss.item())
            x = y
        history.append(tuple(row))
    return history


def assert_equal_state(a, b):
    assert list(a.state_dict()) == list(b.state_dict())
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("strategy", ["auto", "tr", "tr+dpu", "ahd", "ir", "dp", "ls"])
def test_twenty_steps_of_every_strategy_equal_the_plain_loop(dropout, strategy):
    teacher, student = mlp(32, seed=0), mlp(8, seed=1, dropout=dropout)
    expected = copy.deepcopy(student)
    batches = [torch.randn(7 if i % 5 else 3, 6) for i in range(20)]
    losses = plain_loop(teacher, expected, batches, functools.partial(torch.optim.AdamW, lr=1e-2))
    result = autobd.distill(
        teacher, student, batches, recipe=autobd.Recipe(block_input="teacher", lr=1e-2), cuts=[("0", "0"), ("1", "1")],
        strategy=strategy, progress=False,
    )  # fmt: skip
    assert result.student is student
    assert_equal_state(student, expected)
    assert result.history.relative == losses
    assert result.history.losses == losses


def test_convolutions_with_batch_norm_in_place_and_dropout_equal_the_plain_loop():
    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            Residual(6, True, True, 0.3),
            nn.Sequential(nn.ReLU(inplace=True), Residual(6, True, True, 0.3)),
            nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(6, 6, 1)),
        )

    teacher, student = make(0), make(1)
    expected = copy.deepcopy(student)
    batches = [images(5) for _ in range(20)]
    losses = plain_loop(teacher, expected, batches, functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 3, 0.5)
    recipe = autobd.Recipe(
        block_input="teacher", optimizer=functools.partial(torch.optim.SGD, momentum=0.9), lr=0.1, clip=0.5
    )
    cuts = [("0", "0"), ("1", "1"), ("2", "2")]
    result = autobd.distill(teacher, student, batches, recipe=recipe, cuts=cuts, seed=3, progress=False)
    assert_equal_state(student, expected)
    assert result.history.relative == losses


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), networks(), st.lists(st.integers(2, 6), min_size=2, max_size=4))
def test_the_caller_gets_both_models_back_as_they_were_only_trained(teacher, student, rows):
    teacher.train(), student.eval()
    student.stem.requires_grad_(False)
    before, student_before = fingerprint(teacher), fingerprint(student)
    batches = [images(n) for n in rows]
    kept = [b.clone() for b in batches]
    rng = torch.get_rng_state()
    result = autobd.distill(teacher, student, batches, progress=False)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(batches, kept, strict=True))
    assert_same(before, fingerprint(teacher))
    after = fingerprint(student)
    assert result.student is student
    assert {n: (i, g) for n, (i, _, g) in student_before[0].items()} == {n: (i, g) for n, (i, _, g) in after[0].items()}
    assert student_before[1:] == after[1:]
    assert torch.equal(student_before[0]["stem.weight"][1], student.stem.weight)
    assert not torch.equal(student_before[0]["head.weight"][1], student.head.weight)


def test_an_error_leaves_the_student_as_at_the_last_completed_epoch():
    teacher, student = mlp(16), mlp(4, seed=1)
    expected, batches = copy.deepcopy(student), [torch.randn(4, 6), torch.randn(4, 6)]

    class StoppedInTheSecondEpoch:
        epochs = 0

        def __iter__(self):
            self.epochs += 1
            yield batches[0]
            if self.epochs == 2:
                raise KeyboardInterrupt
            yield batches[1]

    before = fingerprint(teacher)
    plain_loop(teacher, expected, batches, functools.partial(torch.optim.AdamW, lr=1e-3))
    with pytest.raises(KeyboardInterrupt):
        autobd.distill(
            teacher, student, StoppedInTheSecondEpoch(), epochs=3, progress=False, cuts=[("0", "0"), ("1", "1")]
        )
    assert_equal_state(student, expected)
    assert_same(before, fingerprint(teacher))


def test_frozen_and_unused_parts_of_the_student_stay_bit_identical():
    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = mlp(4, seed=1)
            self.unused = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

        def forward(self, x):
            return self.blocks(x)

    student = Student()
    student.blocks[1].requires_grad_(False)
    before = copy.deepcopy(student)
    result = autobd.distill(
        mlp(16), student, torch.randn(40, 6), cuts=[("0", "blocks.0"), ("1", "blocks.1")], progress=False
    )
    assert_equal_state(student.blocks[1], before.blocks[1])
    assert_equal_state(student.unused, before.unused)
    assert not torch.equal(student.blocks[0][0].weight, before.blocks[0][0].weight)
    assert not any(p.requires_grad for p in student.blocks[1].parameters())
    assert all(len(r) == 3 and r[1] > 0 for r in result.history.relative)
    assert "unused.0.weight" in str(result)


def test_a_student_with_a_computed_weight_can_be_trained():
    with pytest.warns(FutureWarning):
        student = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.ReLU(), nn.Linear(6, 6))
    student(torch.randn(3, 6))
    before = student[0].weight_v.clone()
    autobd.distill(
        nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), student, [torch.randn(4, 6)], progress=False
    )
    assert not torch.equal(before, student[0].weight_v)
    student(torch.randn(3, 6)).sum().backward()
    assert student[0].weight_v.grad is not None


class LayerDrop(nn.Module):
    """Drops a layer by Python's and NumPy's dice."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        if self.training and random.random() < 0.5:
            return x + self.other(x) * float(np.random.rand())
        return x + self.layer(x)


def test_python_randomness_of_a_student_is_drawn_anew_each_step_and_keyed_by_the_seed():
    def student(seed=0, strategy="auto"):
        torch.manual_seed(1)
        model = nn.Sequential(*(LayerDrop() for _ in range(3)))
        random.seed(torch.randint(0, 99, ()).item()), np.random.seed(seed)
        result = autobd.distill(
            mlp(16), model, batches, cuts=[("0", "0"), ("1", "1")], seed=seed, strategy=strategy, progress=False
        )
        return result, model

    batches = [torch.ones(4, 6)] * 12
    (first, one), (second, two), (third, _) = student(), student(strategy="dp"), student(seed=1)
    assert first.history.losses == second.history.losses != third.history.losses
    assert_equal_state(one, two)
