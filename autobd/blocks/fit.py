"""Choose the channel maps of a split's adapters from the teacher's activations on one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import NonFiniteError
from ..graph import Arguments
from ..graph.state import module_tensors, untouched
from .adapters import Adapter, needs_nonnegative

if TYPE_CHECKING:
    from .split import BlockPair, Split

_MOST_SAMPLES = 16384


def fit(split: Split, arguments: Arguments, writes: Sequence[str] | None) -> Split:
    """`split` with every channel map chosen.

    After a ReLU the teacher's channels that explain most of the others are selected, elsewhere principal components
    (which would make targets negative that a ReLU cannot reach). A student wider than its teacher gets the teacher's
    channels repeated.

    Arguments:
        arguments: a batch for the teacher.
        writes: tensors of the teacher that its forward changes and that are put back; None: any.

    Errors: NonFiniteError for a teacher that gives NaN or infinite values.
    """
    if all(a.kind == "equal" for pair in split.pairs for a in pair.adapters):
        return split
    model, tensors = split.teacher.model, arguments.tensors
    boundary: tuple[Tensor, ...] = ()
    pairs: list[BlockPair] = []
    own = dict(module_tensors(model).values())
    changed = [tensor for path, tensor in own.items() if writes is None or path in writes]
    with untouched(model, tensors=changed), torch.no_grad():
        model.eval()
        for pair, block in zip(split.pairs, split.bind_teacher(), strict=True):
            block.training = False
            boundary = block(*boundary, *(tensors[i] for i in pair.teacher.inputs))
            fitted = tuple(_fitted(a, t, len(pairs)) for a, t in zip(pair.adapters, boundary, strict=True))
            pairs.append(replace(pair, adapters=fitted))
    return replace(split, pairs=tuple(pairs))


def _fitted(adapter: Adapter, tensor: Tensor, block: int) -> Adapter:
    if adapter.kind == "equal":
        return adapter
    wide, narrow = adapter.teacher.width, adapter.student.width
    if narrow >= wide:
        return replace(adapter, columns=torch.arange(narrow) % wide)
    samples = tensor.movedim(adapter.teacher.channels + 1, -1).reshape(-1, wide)
    step = max(1, len(samples) // _MOST_SAMPLES)
    samples = samples[::step].double()
    if not samples.isfinite().all():
        raise NonFiniteError(
            f"Block {block}: the teacher's tensor '{adapter.teacher.node.name}' is not finite on the first batch.",
            given=f"{int((~samples.isfinite()).sum())} of {samples.numel()} values are NaN or infinite",
            expected="finite values, from which the adapter behind the block is chosen",
            do="check the batch and the teacher's weights for NaN",
        )
    moments = (samples.T @ samples / len(samples)).cpu()
    if needs_nonnegative(adapter) or bool((samples >= 0).all()):
        return replace(adapter, columns=select_columns(moments, narrow))
    return replace(adapter, matrix=principal_components(moments, narrow))


def select_columns(moments: Tensor, count: int) -> Tensor:
    """Greedy column subset selection: `count` channels, each the one that, with those before it, explains most of the
    second `moments` [channels, channels] (Farahat et al. 2011, "An efficient greedy method for feature selection").
    Returns their indices, rising."""
    rest = moments.float().contiguous()
    chosen: list[int] = []
    free = torch.ones(len(rest), dtype=torch.bool)
    least = float(rest.diagonal().max()) * 1e-6
    for _ in range(count):
        own = rest.diagonal()
        explains = torch.linalg.vector_norm(rest, dim=0).square() / own.clamp(min=least or 1.0)
        usable = free & (own > least)
        best = int(torch.where(usable, explains, torch.where(free, -1.0, -2.0)).argmax())
        chosen.append(best)
        free[best] = False
        if usable[best]:
            explained = rest[best].clone()
            rest.addr_(explained, explained, alpha=-1 / float(explained[best]))
    return torch.tensor(sorted(chosen))


def principal_components(moments: Tensor, count: int) -> Tensor:
    """An orthonormal basis [count, channels] of the directions with the largest second moment, mixed so that every
    component has an equal share of it."""
    values, vectors = torch.linalg.eigh(moments)
    return _mixing(count) @ vectors[:, values.argsort(descending=True)[:count]].T


def _mixing(count: int) -> Tensor:
    """A fixed orthogonal matrix with entries of about equal size (a discrete cosine transform)."""
    index = torch.arange(count, dtype=torch.float64)
    basis = torch.cos(torch.pi / count * (index[None] + 0.5) * index[:, None]) * (2 / count) ** 0.5
    basis[0] /= 2**0.5
    return basis
