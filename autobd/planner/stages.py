"""The best chain of stages for equal devices: exact, by dynamic programming over (units done, devices used).

    f[n][j] = min over i < j, k <= n of max(f[n - k][i], T(i, j, k, n))

with `T` what a stage of units i..j costs on the k devices that end at position n (`predict.load`): a difference of
running sums, so that one outer difference gives it for all i and j. In two passes: the least slowest stage; then, among
chains with no slower one, the least time until the first step is done (in one pass, a part that is faster than it need
be would hide one that fills sooner). Only what can still be part of a chain as good as a known one is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..costs import BlockCosts, Link, Profile, at_rows
from .predict import RECEIVING, SENDING

Stage = tuple[tuple[int, int], int]  # first unit and one past the last, number of devices
_SAME = 1 + 1e-9


@dataclass(frozen=True)
class _Sums:
    """Running sums over units on k devices, and bytes at their borders (one more of both than there are units).

    Attributes:
        ahead, total: seconds until the boundary is made, and of everything, without links.
        border: bytes of a rank's rows before each unit; 0 before the first and behind the last.
        gradients, reductions: bytes to be reduced, and how many all-reduces that are.
        fits: whether a stage from one border to another fits into memory; None: all do.
    """

    ahead: Tensor
    total: Tensor
    border: Tensor
    gradients: Tensor
    reductions: Tensor
    fits: Tensor | None


class Stages:
    """Chains of stages for `profile`, whose devices are of one kind, in the order of their numbers.

    Arguments:
        memory: bytes that each device may hold.
        replicas: whether a stage may have several devices.
    """

    def __init__(self, profile: Profile, memory: float, replicas: bool = True) -> None:
        self.profile, self.memory = profile, memory
        self.units, self.devices = len(profile.units), len(profile.devices)
        self.most = min(self.devices, profile.batch_size) if replicas else 1
        self._borders = [0, *accumulate(len(u) for u in profile.units)]
        self._sums = self._of_all()
        self._cache: dict[tuple[int, bool, bool, bool, bool], tuple[Tensor, Tensor]] = {}
        self._order = torch.ones(self.units + 1, self.units + 1, dtype=torch.bool).triu(1)

    def best(self) -> list[Stage] | None:
        """The best chain; None if none fits."""
        every, known = range(1, self.most + 1), torch.inf
        for counts in (every[:1], every[-1:], every[:4], every):  # a good chain is soon known, and bounds the rest
            chain = self._chain(known * _SAME, None, counts)
            known = chain[0] if chain else known
        if known == torch.inf:
            return None
        found = self._chain(known * _SAME, known * _SAME, every)
        assert found is not None
        return found[1]

    def bound(self) -> float:
        """Seconds below which no chain can be: all work in even parts; each unit alone, on as many devices as help."""
        alone = torch.stack([s.total.diff() for s in self._sums.values()])
        work = (alone * torch.arange(1, self.most + 1, dtype=torch.float64)[:, None]).amin(0).sum() / self.devices
        return max(float(work), float(alone.amin(0).max()))

    def _chain(self, known: float, limit: float | None, counts: range) -> tuple[float, list[Stage]] | None:
        """The best value and its chain, of those whose slowest stage takes at most `known` seconds.

        Arguments:
            limit: None: the least slowest stage; else the least fill with no stage above it.
            counts: how many devices a stage may have.
        """
        low, high = self._reach(known)
        least = torch.full((self.devices + 1, self.units + 1), torch.inf, dtype=torch.float64)
        start, count = torch.zeros_like(least, dtype=torch.long), torch.zeros_like(least, dtype=torch.long)
        least[0, 0] = 0.0
        for n in range(1, self.devices + 1):
            columns = slice(low[n], high[n] + 1)
            values, starts, used = [], [], []
            for k in counts:
                if k > n:
                    break
                rows = slice(low[n - k], min(high[n - k] + 1, high[n]))
                if rows.start >= rows.stop or columns.start >= columns.stop:
                    continue
                cost, before = self._cost(k, n, rows, columns), least[n - k, rows, None]
                if limit is None:
                    value = torch.maximum(before, cost)
                else:
                    fill = self._cost(k, n, rows, columns, fill=True) + k * limit * 1e-9
                    value = torch.where(cost <= limit, before + fill, torch.inf)
                found, where = value.min(0)
                values.append(found)
                starts.append(where + rows.start)
                used.append(k)
            if used:
                least[n, columns], which = torch.stack(values).min(0)
                start[n, columns] = torch.stack(starts).gather(0, which[None])[0]
                count[n, columns] = torch.tensor(used)[which]
        n, j = int(least[:, -1].argmin()), self.units
        best = float(least[n, -1])
        if best == torch.inf or (limit is None and best > known):
            return None
        stages: list[Stage] = []
        while j:
            i, k = int(start[n, j]), int(count[n, j])
            stages.insert(0, ((i, j), k))
            n, j = n - k, i
        return best, stages

    def _cost(self, k: int, n: int, rows: slice, columns: slice, fill: bool = False) -> Tensor:
        """Seconds of stages from border `rows` to border `columns` on the k devices that end at n, with their links;
        with `fill` until the boundary is on its way, or for the last stage until all is done."""
        before, after = self._ends(k, n, fill)
        cost = after[None, columns] - before[rows, None]
        if fill and columns.stop == self.units + 1:
            cost[:, -1] = self._cost(k, n, rows, slice(self.units, self.units + 1))[:, 0]
        fits = self._sums[k].fits
        if fits is not None:
            cost = torch.where(fits[rows, columns], cost, torch.inf)
        if rows.stop > columns.start:
            cost = torch.where(self._order[rows, columns], cost, torch.inf)
        return cost

    def _ends(self, k: int, n: int, fill: bool) -> tuple[Tensor, Tensor]:
        """What every border adds as the first and as the last of a stage."""
        profile, nodes = self.profile, self.profile.nodes
        own = nodes[n - k : n]
        key = (
            k,
            fill,
            n > k and len({nodes[n - k - 1], *own}) > 1,
            n < self.devices and nodes[n - 1] != nodes[n],
            len(set(own)) > 1,
        )
        if key not in self._cache:
            sums = self._sums[k]
            came, goes = (profile.between if across else profile.within for across in key[2:4])
            link = profile.reduce_between if key[4] else profile.reduce_within
            running = sums.ahead
            if not fill:
                each = link.latency * sums.reductions + sums.gradients / k / link.bandwidth
                running = sums.total + 2 * (k - 1) * each
            self._cache[key] = running - _seconds(came, sums.border), running + _seconds(goes, sums.border)
        return self._cache[key]

    def _reach(self, known: float) -> tuple[list[int], list[int]]:
        """For each number of devices the fewest and the most units that they can have done in a chain as good as one
        whose slowest stage takes `known` seconds."""
        if known == torch.inf:
            return [0] * (self.devices + 1), [0] + [self.units] * self.devices
        alone = torch.stack([s.total.diff() * k for k, s in self._sums.items()]).amin(0)
        done = torch.cat([torch.zeros(1, dtype=torch.float64), alone.cumsum(0)])
        devices = torch.arange(self.devices + 1, dtype=torch.float64)
        high = torch.searchsorted(done, devices * known * _SAME, right=True) - 1
        low = torch.searchsorted(done, done[-1] - (self.devices - devices) * known * _SAME)
        return low.tolist(), high.clamp(max=self.units).tolist()

    def _of_all(self) -> dict[int, _Sums]:
        """By number of devices."""
        profile, kind = self.profile, self.profile.kind_of[0]
        rows = [-(-profile.batch_size // k) for k in range(1, self.most + 1)]
        borders = torch.tensor(self._borders)

        def sums(values: Tensor) -> Tensor:
            """Running sums over blocks, at the borders of units; blocks are the last axis."""
            return torch.nn.functional.pad(values.cumsum(-1), (1, 0))[..., borders]

        def each(value: Callable[[BlockCosts], float]) -> Tensor:
            return torch.tensor([value(b) for b in profile.blocks], dtype=torch.float64)

        ahead = at_rows([b.teacher[kind] for b in profile.blocks], rows).T
        behind = at_rows([b.student[kind] for b in profile.blocks], rows).T + each(lambda b: b.update[kind])
        saved = at_rows([b.saved for b in profile.blocks], rows).T
        never = ~(ahead + behind + saved).isfinite()  # blocks that do not fit with these shares, whatever the memory
        ahead, behind, saved = (t.masked_fill(never, v) for t, v in ((ahead, 0.0), (behind, 0.0), (saved, torch.inf)))
        row = torch.tensor(rows, dtype=torch.float64)[:, None]
        boundary = each(lambda b: b.boundary)
        border = torch.nn.functional.pad(boundary, (1, 0))[borders] * row
        border[:, -1] = 0.0
        before, after = sums(ahead), sums(ahead + behind)
        gradients = each(lambda b: b.gradient_bytes)
        fits: Sequence[Tensor | None] = [None] * len(rows)
        if self.memory < torch.inf or never.any():
            weights = each(lambda b: b.teacher_bytes + b.student_bytes + b.gradient_bytes + b.state_bytes)
            held = sums(weights + boundary * row)
            of_unit = torch.stack([saved[:, list(u)].amax(1) for u in profile.units], 1)
            fits = [self._fits(*of_k) for of_k in zip(held, of_unit, border, rows, strict=True)]
        every = zip(before, after, border, fits, strict=True)
        return {
            k: _Sums(ahead, total, at, sums(gradients), sums((gradients > 0).double()), fit)
            for k, (ahead, total, at, fit) in enumerate(every, start=1)
        }

    def _fits(self, held: Tensor, saved: Tensor, border: Tensor, rows: int) -> Tensor:
        """Whether a stage from one border to another fits into memory."""
        most = torch.nn.functional.pad(saved, (1, 0)).expand(self.units + 1, -1).triu(1).cummax(1).values
        edges = RECEIVING * border[:, None] + SENDING * border[None, :]
        both = held[None, :] - held[:, None] + most + edges
        both += self.profile.input_bytes * rows
        return both.isfinite() & (both <= self.memory)


def _seconds(link: Link, size: Tensor) -> Tensor:
    return size / link.bandwidth + link.latency * (size > 0)
