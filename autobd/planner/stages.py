"""The best chain of stages for equal devices: exact, by dynamic programming over (devices used, units done).

    f[n][j] = min over k <= n, i < j of max(f[n - k][i], T(k, n, i, j))

with `T` what a stage of units i..j costs on the k devices that end at position n (`predict.load`): a difference of
running sums. So the borders that stages of at most some seconds can come to need one running maximum for each n and k,
without a look at each i and j; halving finds these seconds to a thousandth, and only what such stages come to is looked
at in two passes: the least slowest stage; then, among chains with no slower one, the least time until the first step is
done (in one pass, a part that is faster than it need be would hide one that fills sooner).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..costs import Profile
from .stage_costs import StageCosts

Stage = tuple[tuple[int, int], int]  # first unit and one past the last, number of devices
_SAME = 1 + 1e-9
_NEAR = 1 + 1e-3


class Stages:
    """Chains of stages for devices of one kind, in the order of their numbers.

    Arguments:
        costs: of each way to train a stage, which takes the first one that fits.
        memory: bytes that each device may hold.
        replicas: whether a stage may have several devices.
    """

    def __init__(self, costs: Sequence[Profile], memory: float, replicas: bool = True) -> None:
        self.profile = costs[0]
        self.units, self.devices = len(self.profile.units), len(self.profile.devices)
        self.most = min(self.devices, self.profile.batch_size) if replicas else 1
        self.ways = [StageCosts.of(c, memory, self.most) for c in costs]
        alone = torch.stack([way.alone for way in self.ways])
        self._least_alone = alone.amin(0)  # by the fastest way, whether it fits or not
        self._ahead = self.ways[0].ahead.expand(2, -1, -1)
        self._edge = self.ways[0].edge
        self._total = [_running(of_way) + self.ways[0].reduced for of_way in (*alone, self._least_alone)]
        self._alike = [0]  # how many devices that end at a position are of one host
        for n, node in enumerate(self.profile.nodes):
            self._alike.append(self._alike[-1] + 1 if n and self.profile.nodes[n - 1] == node else 1)

    def best(self) -> list[Stage] | None:
        """The best chain; None if none fits."""
        if self.bound() == torch.inf:
            return None
        known = self._least()
        most, gap = max(float(t.amax()) for t in self._total) + 2 * float(self._edge.amax()), 0.02 * known
        while (chain := self._chain(known)) is None:  # memory was left out so far
            if known > most:
                return None
            known, gap = known + gap, 2 * gap
        found = self._chain(chain[0] * _SAME, fill=True)
        assert found is not None
        return found[1]

    def bound(self) -> float:
        """Seconds below which no chain can be: all work in even parts; each unit alone, on as many devices as help."""
        work = (self._least_alone * torch.arange(1, self.most + 1)[:, None]).amin(0).sum() / self.devices
        return max(float(work), float(self._least_alone.amin(0).max()))

    def _least(self) -> float:
        """Seconds of the slowest stage of the best chain, if all fitted: at least, and by a thousandth at most more."""
        low = high = max(self.bound(), 1e-12)
        while not self._reached(high)[:, -1].any():
            low, high = high, 1.1 * high
        while high > low * _NEAR:
            middle = (low + high) / 2
            low, high = (low, middle) if self._reached(middle)[:, -1].any() else (middle, high)
        return high

    def _reached(self, seconds: float) -> Tensor:
        """[devices, border]: whether stages of at most `seconds` come to a border with so many devices, memory left
        out, and enough devices are left for the rest."""
        low, high = self._within(seconds)
        reached = torch.zeros(self.devices + 1, self.units + 1, dtype=torch.bool)
        reached[0, 0] = True
        for n in range(1, self.devices + 1):
            before, after = self._ends(n, self._total[-1])
            source = reached[n - len(before) : n].flip(0)  # row k - 1: where a stage of k devices starts
            span = slice(low[n - len(before)], high[n] + 1)
            latest = torch.where(source[:, span], before[:, span], -torch.inf).cummax(1).values
            fast = (after[:, span][:, 1:] - latest[:, :-1] <= seconds * _SAME).any(0)
            reached[n, span.start + 1 : span.stop] = fast
            reached[n, : low[n]] = False
        return reached

    def _leading(self, seconds: float) -> Tensor:
        """[devices, border]: whether stages of at most `seconds` lead from there to the end, memory left out."""
        leading = torch.zeros(self.devices + 1, self.units + 1, dtype=torch.bool)
        leading[:, -1] = True
        for n in range(self.devices, 0, -1):
            before, after = self._ends(n, self._total[-1])
            soonest = torch.where(leading[n], after, torch.inf).flip(1).cummin(1).values.flip(1)
            leading[n - len(before) : n, :-1] |= (soonest[:, 1:] - before[:, :-1] <= seconds * _SAME).flip(0)
        return leading

    def _within(self, seconds: float) -> tuple[list[int], list[int]]:
        """For each number of devices the fewest and the most units that they can have done in a chain whose slowest
        stage takes `seconds`."""
        alone = (self._least_alone * torch.arange(1, self.most + 1)[:, None]).amin(0)
        done = torch.cat([torch.zeros(1, dtype=torch.float64), alone.cumsum(0)])
        devices = torch.arange(self.devices + 1, dtype=torch.float64)
        high = torch.searchsorted(done, devices * seconds * _SAME, right=True) - 1
        low = torch.searchsorted(done, done[-1] - (self.devices - devices) * seconds * _SAME)
        return low.tolist(), high.clamp(max=self.units).tolist()

    def _chain(self, seconds: float, fill: bool = False) -> tuple[float, list[Stage]] | None:
        """The best value and its chain, of those whose slowest stage takes at most `seconds`: the least slowest stage,
        or with `fill` the least time until the first step is done."""
        looked_at = self._reached(seconds) & self._leading(seconds)
        used, done = looked_at.nonzero(as_tuple=True)
        if not len(used):
            return None
        first = torch.searchsorted(used, torch.arange(self.devices + 2)).tolist()
        least = torch.full(used.shape, torch.inf, dtype=torch.float64)
        origin = torch.zeros_like(used)
        least[0] = 0.0
        for n in range(1, self.devices + 1):
            old, new = slice(first[max(0, n - self.most)], first[n]), slice(first[n], first[n + 1])
            if old.start == old.stop or new.start == new.stop:
                continue
            k, start, end = n - used[old] - 1, done[old], done[new]
            cost = self._cost_that_fits(n, k, start, end)
            value = torch.maximum(least[old, None], cost)
            if fill:
                ahead = torch.where(end == self.units, cost, self._cost(n, k, start, end, self._ahead))
                value = least[old, None] + ahead + (k + 1)[:, None] * seconds * 1e-9  # of equals, the fewest devices
            allowed = (start[:, None] < end) & (cost <= seconds * _SAME)
            least[new], where = torch.where(allowed, value, torch.inf).min(0)
            origin[new] = where + old.start
        ends = (done == self.units).nonzero()[:, 0]
        if not len(ends) or least[ends].min() == torch.inf:
            return None
        at = int(ends[least[ends].argmin()])
        stages: list[Stage] = []
        best = float(least[at])
        while at:
            before = int(origin[at])
            stages.insert(0, ((int(done[before]), int(done[at])), int(used[at] - used[before])))
            at = before
        return best, stages

    def _cost_that_fits(self, n: int, k: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """`_cost` in the first way that fits; infinite where none does."""
        found = torch.full((len(start), len(end)), torch.inf, dtype=torch.float64)
        for way, running in reversed(list(zip(self.ways, self._total[:-1], strict=True))):
            cost = self._cost(n, k, start, end, running)
            found = cost if way.fits is None else torch.where(way.fits[k[:, None], start[:, None], end], cost, found)
        return found

    def _cost(self, n: int, k: Tensor, start: Tensor, end: Tensor, running: Tensor) -> Tensor:
        """Seconds of the stages from each border of `start`, on `k + 1` devices, to each of `end`."""
        before, after = self._ends(n, running)
        return after[k][:, end] - before[k, start][:, None]

    def _ends(self, n: int, running: Tensor) -> tuple[Tensor, Tensor]:
        """What a border adds as the first, and as the last, of a stage on the devices that end at position n."""
        k, nodes = torch.arange(min(n, self.most)), self.profile.nodes
        own = running[(k + 1 > self._alike[n]).long(), k]
        came = self._edge[((k + 2 > self._alike[n]) & (k + 1 < n)).long(), k]
        goes = self._edge[int(n < self.devices and nodes[n - 1] != nodes[n]), : len(k)]
        return own - came, own + goes


def _running(alone: Tensor) -> Tensor:
    """Sums at borders; what does not fit counts nothing, so that differences are finite."""
    return torch.nn.functional.pad(alone.masked_fill(~alone.isfinite(), 0.0).cumsum(-1), (1, 0))
