"""Choose which cuts of the teacher go with which cuts of the student: dynamic programming over pairs of cuts.

teacher cuts   t1   t2   t3   t4      a chain of pairs that rises on both sides, every block holding a weight;
                |     \\         \\     cost: unbalanced work, unequal depth, adapters, cuts inside a module or before
student cuts   s1      s2       s3    an in-place change
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from .adapters import Adapter, pair_tensors, positions
from .cuts import Cut, Value

MOST_BLOCKS = 16
_STUDENT_PASSES = 3  # forward and backward of the student against one forward of the teacher
_MOST_PAIRS = 1500
_LEAST_BLOCKS = 4  # below which unbalanced blocks are better than fewer

# Penalties of a pair of cuts, against block costs of about 1 / blocks in all.
_INNER, _CHANGED_LATER, _TIED, _DEPTH = 0.02, 0.02, 0.02, 2.0
_CHANNELS, _WIDER_STUDENT, _LAYOUT, _UNREACHABLE, _SEVERAL = 0.005, 0.01, 0.01, 0.05, 0.02


@dataclass(frozen=True)
class CutPair:
    """A teacher's and a student's cut that go together, with an adapter for each tensor (in the student's order)."""

    teacher: Cut
    student: Cut
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True)
class Alignment:
    """Pairs of cuts, in order, and the shares of the training work (teacher forward, student forward and backward).

    `considered` lists what other numbers of blocks would have given: blocks, and the largest block's share; `resample`
    tells whether other spatial sizes could be paired.
    """

    pairs: tuple[CutPair, ...]
    shares: tuple[float, ...]
    considered: tuple[tuple[int, float], ...] = ()
    resample: bool = False

    @property
    def balanced(self) -> bool:
        """No block above twice or below a quarter of its even share."""
        return max(self.shares) <= 2 / len(self.shares) and min(self.shares) >= 0.25 / len(self.shares)


def matching(teacher: list[Cut], student: list[Cut], resample: bool = False) -> list[CutPair]:
    """Every teacher's and student's cut that go together."""
    found = []
    for t in teacher:
        for s in student:
            adapters = pair_tensors(t, s, resample)
            if adapters is not None:
                ordered = replace(t, tensors=tuple(a.teacher for a in adapters))
                found.append(CutPair(ordered, s, adapters))
    return found


def align(
    pairs: list[CutPair], weights: tuple[int, int], flops: tuple[int, int], blocks: int | None
) -> Alignment | None:
    """The best chain of cut pairs.

    Arguments:
        pairs: the cuts that go together (see `matching`).
        weights, flops: of each whole model.
        blocks: how many blocks; None: as many as stay balanced, at most 16.

    Returns: None if no chain has that many blocks.
    """
    progress = _progress([p.teacher for p in pairs]) | _progress([p.student for p in pairs])
    borders = [p for p in pairs if p.teacher.border and p.student.border]
    for chosen in (borders, pairs):
        chains = _chains(chosen, progress, weights, flops, MOST_BLOCKS if blocks is None else blocks)
        if blocks is None and (len(chains) >= _LEAST_BLOCKS or chosen is pairs):
            return _most_balanced(chains)
        if blocks is not None and blocks in chains:
            return chains[blocks]
    return None


def most_blocks(pairs: list[CutPair], weights: tuple[int, int], flops: tuple[int, int]) -> int:
    """The largest number of blocks that any chain of the pairs gives."""
    progress = _progress([p.teacher for p in pairs]) | _progress([p.student for p in pairs])
    return max(_chains(pairs, progress, weights, flops, len(pairs) + 1), default=1)


def _most_balanced(chains: dict[int, Alignment]) -> Alignment | None:
    """The most blocks that are balanced; if fewer than four are, four or more with the smallest largest block."""
    if not chains:
        return None
    best = max((k for k in chains if chains[k].balanced), default=0)
    if best < _LEAST_BLOCKS:
        enough = [k for k in chains if k >= _LEAST_BLOCKS] or [max(chains)]
        best = min(enough, key=lambda k: (round(max(chains[k].shares), 2), k))
    return replace(chains[best], considered=tuple((k, max(c.shares)) for k, c in chains.items()))


def _progress(cuts: list[Cut]) -> dict[int, float]:
    """How far each cut is, in FLOPs, through the part of its model with as many positions (0 to 1), by `id`.

    Depth is compared within a resolution: a student whose stem is expensive still pairs stage with stage.
    """
    runs: dict[tuple[int, int], list[Cut]] = defaultdict(list)
    ordered = sorted(cuts, key=lambda c: c.position)
    for cut in ordered:
        runs[positions(cut.tensors[0]), len(cut.tensors)].append(cut)
    found = {}
    for run in runs.values():
        start = max((c.depth for c in ordered if c.position < run[0].position), default=0.0)
        found.update({id(c): (c.depth - start) / max(run[-1].depth - start, 1e-12) for c in run})
    return found


def _chains(
    pairs: list[CutPair],
    progress: dict[int, float],
    weights: tuple[int, int],
    flops: tuple[int, int],
    most: int,
) -> dict[int, Alignment]:
    """The cheapest chain for each number of blocks from 2 to `most` that has one."""
    apart = {id(p): abs(progress[id(p.teacher)] - progress[id(p.student)]) for p in pairs}
    pairs = sorted(pairs, key=lambda p: apart[id(p)])[:_MOST_PAIRS]
    pairs = sorted(pairs, key=lambda p: (p.teacher.position, p.student.position))
    if not pairs:
        return {}
    position, depth, weight = (
        torch.tensor([[getattr(p.teacher, name), getattr(p.student, name)] for p in pairs], dtype=torch.float64)
        for name in ("position", "depth", "weights")
    )
    cost_of = torch.tensor([flops[0], _STUDENT_PASSES * flops[1]], dtype=torch.float64)
    work = depth @ cost_of / max(float(cost_of.sum()), 1)
    penalty = torch.tensor([_penalty(p) + _DEPTH * apart[id(p)] ** 2 for p in pairs], dtype=torch.float64)
    total = torch.tensor(weights, dtype=torch.float64)

    def cost(share: Tensor, inside: Tensor, rises: Tensor) -> Tensor:
        """Of a block with a `share` of the work; infinite where a side holds no weight or does not rise."""
        return torch.where((inside >= 1).all(-1) & rises.all(-1), share**2, torch.inf)

    always = torch.ones_like(position, dtype=torch.bool)
    between = cost(work[None] - work[:, None], weight[None] - weight[:, None], position[None] > position[:, None])
    between[crossed(pairs)] = torch.inf
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


def _penalty(pair: CutPair) -> float:
    """What speaks against a pair of cuts, unequal depth aside."""
    cost = sum(
        _INNER * (not c.border) + _CHANGED_LATER * c.changed_later + _TIED * c.tied
        for c in (pair.teacher, pair.student)
    )
    for adapter in pair.adapters:
        cost += _CHANNELS * (adapter.kind != "equal") + _LAYOUT * adapter.changes_layout
        cost += _WIDER_STUDENT * (adapter.student.width > adapter.teacher.width)
        cost += _UNREACHABLE * (adapter.student.lowest > adapter.teacher.lowest)
    return cost + _SEVERAL * (len(pair.adapters) - 1)


def crossed(pairs: list[CutPair]) -> tuple[list[int], list[int]]:
    """Index pairs (row, column) of cut pairs that cannot follow each other: a block between would have nothing to
    learn, or a student's tensor passes through but its teacher's partner is another one."""
    partners = [{a.student.value: a.teacher.value for a in p.adapters} for p in pairs]
    learned = [[frozenset(t.value for t in c.distilled) for c in (p.student, p.teacher)] for p in pairs]
    by_value: dict[Value, list[int]] = defaultdict(list)
    for i, sides in enumerate(learned):
        for value in sides[0] | sides[1]:
            by_value[value].append(i)
    crossed = []
    for j, (partner, sides) in enumerate(zip(partners, learned, strict=True)):
        for i in {i for side in sides for value in side for i in by_value[value]}:
            earlier, later = ((p.teacher.position, p.student.position) for p in (pairs[i], pairs[j]))
            if not (earlier[0] < later[0] and earlier[1] < later[1]):
                continue
            idle = any(mine <= before for mine, before in zip(sides, learned[i], strict=True))
            if idle or any(partner.get(value, other) != other for value, other in partners[i].items()):
                crossed.append((i, j))
    return [i for i, _ in crossed], [j for _, j in crossed]
