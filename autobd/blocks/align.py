"""Choose which cuts of the teacher go with which cuts of the student: dynamic programming over pairs of cuts.

teacher cuts   t1   t2   t3   t4      a chain of pairs that rises on both sides, every block holding a weight;
                |     \\         \\     cost: unbalanced work, unequal depth, cuts inside a module or before an
student cuts   s1      s2       s3    in-place change
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .cuts import Cut

MOST_BLOCKS = 16
_INNER, _CHANGED_LATER, _DEPTH = 0.02, 0.02, 2.0  # against block costs of about 1 / blocks in all
_STUDENT_PASSES = 3  # forward and backward of the student against one forward of the teacher
_MOST_PAIRS = 1500


@dataclass(frozen=True)
class Alignment:
    """Pairs of cuts, in order, and the shares of the training work (teacher forward, student forward and backward)."""

    cuts: tuple[tuple[Cut, Cut], ...]
    shares: tuple[float, ...]

    @property
    def balanced(self) -> bool:
        """No block above twice or below a quarter of its even share."""
        return max(self.shares) <= 2 / len(self.shares) and min(self.shares) >= 0.25 / len(self.shares)


def matching(teacher: Cut, student: Cut) -> bool:
    """Whether a student block can be trained on this boundary as it is: equal shape, channels included, and dtype."""
    return teacher.shape == student.shape and teacher.dtype == student.dtype


def align(
    teacher: list[Cut], student: list[Cut], weights: tuple[int, int], flops: tuple[int, int], blocks: int | None
) -> Alignment | None:
    """The best chain of cut pairs.

    Arguments:
        teacher, student: the candidates of each model, in order.
        weights, flops: of each whole model.
        blocks: how many blocks; None: as many as stay balanced, at most 16.

    Returns: None if no chain has that many blocks.
    """
    pairs = [(t, s) for t in teacher for s in student if matching(t, s)]
    borders = [(t, s) for t, s in pairs if t.border and s.border]
    progress = _progress(teacher) | _progress(student)
    for chosen in (borders, pairs):
        chains = _chains(chosen, progress, weights, flops, MOST_BLOCKS if blocks is None else blocks)
        if blocks is None and len(chains) >= 4:
            return _most_balanced(chains)
        if blocks is not None and blocks in chains:
            return chains[blocks]
    return _most_balanced(chains) if blocks is None and chains else None


def _most_balanced(chains: dict[int, Alignment]) -> Alignment:
    return next(chains[k] for k in sorted(chains, reverse=True) if k == min(chains) or chains[k].balanced)


def _progress(cuts: list[Cut]) -> dict[Cut, float]:
    """How far each cut is, in FLOPs, between the first and the last cut of its shape (0 to 1).

    Depth is compared within a shape: a student whose stem is expensive still pairs stage with stage.
    """
    runs: dict[tuple[int, ...], list[Cut]] = {}
    for cut in cuts:
        runs.setdefault(cut.shape, []).append(cut)
    return {
        c: (c.depth - run[0].depth) / max(run[-1].depth - run[0].depth, 1e-12) for run in runs.values() for c in run
    }


def _chains(
    pairs: list[tuple[Cut, Cut]],
    progress: dict[Cut, float],
    weights: tuple[int, int],
    flops: tuple[int, int],
    most: int,
) -> dict[int, Alignment]:
    """The cheapest chain for each number of blocks from 2 to `most` that has one."""
    pairs = sorted(pairs, key=lambda p: abs(progress[p[0]] - progress[p[1]]))[:_MOST_PAIRS]
    pairs = sorted(pairs, key=lambda p: (p[0].position, p[1].position))
    if not pairs:
        return {}
    position, depth, weight = (
        torch.tensor([[getattr(c, name) for c in pair] for pair in pairs], dtype=torch.float64)
        for name in ("position", "depth", "weights")
    )
    work = (
        depth
        @ (cost_of := torch.tensor([flops[0], _STUDENT_PASSES * flops[1]], dtype=torch.float64))
        / max(sum(cost_of), 1)
    )
    penalty = torch.tensor(
        [
            sum(_INNER * (not c.border) + _CHANGED_LATER * c.changed_later for c in pair)
            + _DEPTH * (progress[pair[0]] - progress[pair[1]]) ** 2
            for pair in pairs
        ],
        dtype=torch.float64,
    )
    total = torch.tensor(weights, dtype=torch.float64)

    def cost(share: Tensor, inside: Tensor, rises: Tensor) -> Tensor:
        """Of a block with a `share` of the work; infinite where a side holds no weight or does not rise."""
        return torch.where((inside >= 1).all(-1) & rises.all(-1), share**2, torch.inf)

    always = torch.ones_like(position, dtype=torch.bool)
    between = cost(work[None] - work[:, None], weight[None] - weight[:, None], position[None] > position[:, None])
    best = cost(work, weight, always) + penalty
    last = cost(1 - work, total - weight, always)
    came_from: list[Tensor] = []
    chains = {}
    for blocks in range(2, most + 1):
        value, end = (best + last).min(0)
        if torch.isinf(best).all():
            break
        if torch.isfinite(value):
            indices = [int(end)]
            for origin in reversed(came_from):
                indices.insert(0, int(origin[indices[0]]))
            edges = [0.0, *work[indices].tolist(), 1.0]
            shares = tuple(b - a for a, b in pairwise(edges))
            chains[blocks] = Alignment(tuple(pairs[i] for i in indices), shares)
        best, origin = (best[:, None] + between).min(0)
        best = best + penalty
        came_from.append(origin)
    return chains
