"""Choose which cuts of the teacher go with which cuts of the student: dynamic programming over pairs of cuts.

    teacher cuts   t1   t2   t3   t4      a chain of pairs that rises on both sides, every block holding a weight;
                    |     \\         \\     cost: unbalanced blocks, unequal depth, cuts inside a module or before an
    student cuts   s1      s2       s3    in-place change
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cuts import Cut

MOST_BLOCKS = 16
_INNER, _CHANGED_LATER = 0.02, 0.02  # against block costs of about 2 / blocks in all
_MOST_PAIRS = 1500


@dataclass(frozen=True)
class Alignment:
    """Pairs of cuts, in order, and the largest share of either model's FLOPs that one block holds."""

    cuts: tuple[tuple[Cut, Cut], ...]
    largest: float


def matching(teacher: Cut, student: Cut) -> bool:
    """Whether a student block can be trained on this boundary as it is: equal shape, channels included, and dtype."""
    return teacher.shape == student.shape and teacher.dtype == student.dtype


def align(teacher: list[Cut], student: list[Cut], weights: tuple[int, int], blocks: int | None) -> Alignment | None:
    """The best chain of cut pairs.

    Arguments:
        teacher, student: the candidates of each model, in order.
        weights: how many weights each whole model uses.
        blocks: how many blocks; None: as many as stay balanced (no block above twice its share), at most 16.

    Returns: None if no chain has that many blocks.
    """
    pairs = [(t, s) for t in teacher for s in student if matching(t, s)]
    borders = [(t, s) for t, s in pairs if t.border and s.border]
    for chosen in (borders, pairs):
        chains = _chains(chosen, weights, MOST_BLOCKS if blocks is None else blocks)
        if blocks is None and len(chains) >= 4:
            return _most_balanced(chains)
        if blocks is not None and blocks in chains:
            return chains[blocks]
    return _most_balanced(chains) if blocks is None and chains else None


def _most_balanced(chains: dict[int, Alignment]) -> Alignment:
    return next(chains[k] for k in sorted(chains, reverse=True) if k == min(chains) or chains[k].largest <= 2 / k)


def _chains(pairs: list[tuple[Cut, Cut]], weights: tuple[int, int], most: int) -> dict[int, Alignment]:
    """The cheapest chain for each number of blocks from 2 to `most` that has one."""
    pairs = sorted(pairs, key=lambda p: abs(p[0].depth - p[1].depth))[:_MOST_PAIRS]
    pairs = sorted(pairs, key=lambda p: (p[0].position, p[1].position))
    if not pairs:
        return {}
    position, depth, weight = (
        torch.tensor([[getattr(c, name) for c in pair] for pair in pairs], dtype=torch.float64)
        for name in ("position", "depth", "weights"))
    penalty = torch.tensor([sum(_INNER * (not c.border) + _CHANGED_LATER * c.changed_later for c in pair)
                            + (pair[0].depth - pair[1].depth) ** 2 for pair in pairs], dtype=torch.float64)
    total = torch.tensor(weights, dtype=torch.float64)

    def cost(shares: Tensor, inside: Tensor, rises: Tensor) -> Tensor:
        """Of a block with FLOP `shares` (..., 2); infinite where a side holds no weight or does not rise."""
        value = (shares ** 2).sum(-1) + (shares[..., 0] - shares[..., 1]) ** 2
        return torch.where((inside >= 1).all(-1) & rises.all(-1), value, torch.inf)

    always = torch.ones_like(position, dtype=torch.bool)
    between = cost(depth[None] - depth[:, None], weight[None] - weight[:, None], position[None] > position[:, None])
    best = cost(depth, weight, always) + penalty
    last = cost(1 - depth, total - weight, always)
    came_from: list[Tensor] = []
    chains = {}
    for blocks in range(2, most + 1):
        value, end = (best + last).min(0)
        if torch.isinf(best).all():
            break
        if torch.isfinite(value):
            chains[blocks] = _chain(pairs, came_from, int(end))
        best, origin = (best[:, None] + between).min(0)
        best = best + penalty
        came_from.append(origin)
    return chains


def _chain(pairs: list[tuple[Cut, Cut]], came_from: list[Tensor], end: int) -> Alignment:
    indices = [end]
    for origin in reversed(came_from):
        indices.append(int(origin[indices[-1]]))
    cuts = tuple(pairs[i] for i in reversed(indices))
    depths = [(0.0, 0.0), *((t.depth, s.depth) for t, s in cuts), (1.0, 1.0)]
    shares = [b[side] - a[side] for a, b in zip(depths, depths[1:], strict=False) for side in (0, 1)]
    return Alignment(cuts, max(shares))
