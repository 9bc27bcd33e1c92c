"""Blockwise distillation written out in plain PyTorch, and models called as they are: what `distill` must equal."""

import copy
import hashlib
import random

import numpy as np
import torch
from networks import assert_same, fingerprint
from torch import nn

import autobd
from autobd.graph import Arguments


def hidden(features, width):
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, features))


def pair(make, wide=32, narrow=4):
    """A teacher and a student from `make(width)`, each from its own seed."""
    models = []
    for seed, width in enumerate((wide, narrow)):
        torch.manual_seed(seed)
        models.append(make(width))
    return models


def seed_all(seed):
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed % 2**32)


def step_seed(step, block, seed=0):
    """The documented key of a student step's randomness, written out again."""
    digest = hashlib.blake2b(repr((seed, step, block, 0, 0)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def same(*names):
    """Cuts behind modules or nodes of these names in both models."""
    return [(name, name) for name in names]


def called(model, batch):
    """What the model's owner gets for a batch: a tensor, a tuple of positional arguments or a dict of keywords."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def row_losses(student, teacher):
    return (student - teacher).square().flatten(1).mean(1)


def chained(*names):
    """The stages of a model whose modules `names` are called one after another: see `plain_loop`."""
    return [(lambda m, x, batch, name=n: m.get_submodule(name)(x), (n,)) for n in names]


def plain_loop(teacher, student, stages, batches, lr=1e-3):
    """Blockwise distillation with nothing but PyTorch; trains `student` in place, returns the losses by step.

    A stage is a function `(model, x, batch) -> next x` (the first x is the batch itself; x is a tensor, or a tuple if
    several cross), the paths of the student's modules and parameters that it trains, and which of the tensors it learns
    if not all.
    """
    teacher, student = copy.deepcopy(teacher).eval(), student.train()
    optimizers = [_optimizer(student, paths, lr) for _, paths, *_ in stages]
    scales, history = [None] * len(stages), []
    for step, batch in enumerate(batches):
        row, x = [], batch
        for i, ((run, _, *learned), optimizer) in enumerate(zip(stages, optimizers, strict=True)):
            with torch.no_grad():
                target = run(teacher, x, batch)
            targets = _chosen(target, *learned)
            scales[i] = scales[i] or [t.square().mean() for t in targets]
            seed_all(step_seed(step, i))
            outputs = _chosen(run(student, x, batch), *learned)
            losses = [row_losses(s, t).mean() / n for s, t, n in zip(outputs, targets, scales[i], strict=True)]
            loss = torch.stack(losses).mean()
            if optimizer is not None and loss.requires_grad:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            row.append(loss.item())
            x = target
        history.append(tuple(row))
    return history


def _chosen(x, learned=None):
    tensors = x if isinstance(x, tuple) else (x,)
    chosen = [t for i, t in enumerate(tensors) if learned is None or i in learned]
    return [t.float() if t.dtype in (torch.bfloat16, torch.float16) else t for t in chosen]  # losses in full precision


def _optimizer(model, paths, lr):
    parts = [_get(model, path) for path in paths]
    own = [p for part in parts for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())]
    own = [p for p in own if p.requires_grad]
    return torch.optim.AdamW(own, lr=lr) if own else None


def _get(model, path):
    parent, _, name = path.rpartition(".")
    return getattr(model.get_submodule(parent), name)


def assert_equal_state(a, b):
    assert list(a.state_dict()) == list(b.state_dict())
    for key, value in a.state_dict().items():
        assert torch.equal(value, b.state_dict()[key]), key


def distilled_like_plain_loop(teacher, student, stages, batches, cuts, **options):
    """`distill` on these cuts gives what `plain_loop` gives, bit for bit, and spoils neither model."""
    expected, keys, before = copy.deepcopy(student), list(student.state_dict()), fingerprint(teacher)
    losses = plain_loop(teacher, expected, stages, batches)
    options = {"recipe": autobd.Recipe(block_input="teacher", logits=False), "progress": False, **options}
    result = autobd.distill(teacher, student, batches, cuts=cuts, **options)
    assert len(result.split) == len(stages)
    assert result.verification.exact, str(result.verification)
    assert result.history.losses == losses
    assert result.student is student
    assert list(student.state_dict()) == keys
    assert_equal_state(student, expected)
    assert_same(before, fingerprint(teacher))
    return result


def assert_blocks_are_the_models(split, batches, output=lambda y: y):
    """Block after block gives what both models give when they are called, for every batch and in the modes they are
    used in: the output (which `output` picks), what a call leaves in buffers, and the student's gradients.
    """
    uses = [("teacher", split.teacher, False), ("student", split.student, False)]
    if split.student.same_in_train:
        uses.append(("student", split.student, True))
    for batch in batches:
        for whose, captured, training in uses:
            whole, parts = (copy.deepcopy(captured.model).train(training) for _ in range(2))
            blocks, x = [getattr(pair, whose) for pair in split.pairs], ()
            tensors = Arguments.of(batch, parts).map(torch.clone).tensors
            with torch.set_grad_enabled(whose == "student"):
                seed_all(7)
                expected = output(called(whole, batch))
                seed_all(7)
                for block in blocks:
                    bound = block.bind(captured, parts)
                    bound.training = training
                    x = bound(*x, *(tensors[i] for i in block.inputs))
            assert torch.equal(x[0], expected)
            assert_equal_state(parts, whole)
            if whose == "student":
                (expected.square().sum() + x[0].square().sum()).backward()
                for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
                    assert (a.grad is None) == (b.grad is None)
                    assert a.grad is None or torch.equal(a.grad, b.grad)


def teacher_boundaries(split, batch):
    """What the teacher's blocks give, one after another, called without the rest of the package."""
    model, x, found = split.teacher.model.eval(), (), []
    tensors = Arguments.of(batch, model).tensors
    with torch.no_grad():
        for p, block in zip(split.pairs, split.bind_teacher(), strict=True):
            block.training = False
            x = block(*x, *(tensors[i] for i in p.teacher.inputs))
            found.append(x[0])
    return found
