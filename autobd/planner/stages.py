"""The best chain of stages for equal devices: exact, by dynamic programming over (devices used, units done).

    f[n][j] = min over k <= n, i < j of max(f[n - k][i], T(k, n, i, j))

with `T` what a stage of units i..j costs on the k devices that end at position n (`predict.load`): a difference of
running sums. So the borders that stages of at most some seconds can come to need one running maximum for each n and k,
without a look at each i and j; halving finds these seconds to a thousandth, and only what such stages come to is looked
at in two passes: the least slowest stage; then, among chains with no slower one, the least time until the first step is
done (in one pass, a part that is faster than it need be would hide one that fills sooner).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from ..costs import BlockCosts, Profile, at_rows
from .predict import RECEIVING, SENDING

Stage = tuple[tuple[int, int], int]  # first unit and one past the last, number of devices
_SAME = 1 + 1e-9
_NEAR = 1 + 1e-3


class Stages:
    """Chains of stages for `profile`, whose devices are of one kind, in the order of their numbers.

    Arguments:
        memory: bytes that each device may hold.
        replicas: whether a stage may have several devices.
    """

    # Tensors by [devices of a stage - 1, border of units] or, with links, by [between hosts, the same].

    def __init__(self, profile: Profile, memory: float, replicas: bool = True) -> None:
        self.profile, self.memory = profile, memory
        self.units, self.devices = len(profile.units), len(profile.devices)
        self.most = min(self.devices, profile.batch_size) if replicas else 1
        self._borders = [0, *accumulate(len(u) for u in profile.units)]
        self._alone, self._ahead, self._total, self._edge, self._fits = self._of_all()
        alike = [0]  # how many devices that end at a position are of one host
        for n, node in enumerate(profile.nodes):
            alike.append(alike[-1] + 1 if n and profile.nodes[n - 1] == node else 1)
        self._alike = alike

    def best(self) -> list[Stage] | None:
        """The best chain; None if none fits."""
        known = self._least()
        most, gap = float(self._total.amax() + 2 * self._edge.amax()), 0.02 * known
        while (chain := self._chain(known)) is None:  # memory was left out so far
            if known > most:
                return None
            known, gap = known + gap, 2 * gap
        found = self._chain(chain[0] * _SAME, fill=True)
        assert found is not None
        return found[1]

    def bound(self) -> float:
        """Seconds below which no chain can be: all work in even parts; each unit alone, on as many devices as help."""
        work = (self._alone * torch.arange(1, self.most + 1)[:, None]).amin(0).sum() / self.devices
        return max(float(work), float(self._alone.amin(0).max()))

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
            before, after = self._ends(n, self._total)
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
            before, after = self._ends(n, self._total)
            soonest = torch.where(leading[n], after, torch.inf).flip(1).cummin(1).values.flip(1)
            leading[n - len(before) : n, :-1] |= (soonest[:, 1:] - before[:, :-1] <= seconds * _SAME).flip(0)
        return leading

    def _within(self, seconds: float) -> tuple[list[int], list[int]]:
        """For each number of devices the fewest and the most units that they can have done in a chain whose slowest
        stage takes `seconds`."""
        alone = (self._alone * torch.arange(1, self.most + 1)[:, None]).amin(0)
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
            cost = self._cost(n, k, start, end, self._total)
            value = torch.maximum(least[old, None], cost)
            if fill:
                ahead = torch.where(end == self.units, cost, self._cost(n, k, start, end, self._ahead))
                value = least[old, None] + ahead + (k + 1)[:, None] * seconds * 1e-9  # of equals, the fewest devices
            allowed = (start[:, None] < end) & (cost <= seconds * _SAME)
            if self._fits is not None:
                allowed &= self._fits[k[:, None], start[:, None], end]
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

    def _of_all(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Seconds of each unit alone; running sums of seconds until the boundary is made, and of everything; seconds
        for the boundary at each border; whether a stage from one border to another fits into memory (None: all do)."""
        profile, kind = self.profile, self.profile.kind_of[0]
        devices = torch.arange(1, self.most + 1)
        rows = [-(-profile.batch_size // k) for k in devices.tolist()]
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
        boundary, gradients = each(lambda b: b.boundary), each(lambda b: b.gradient_bytes)
        border = torch.nn.functional.pad(boundary, (1, 0))[borders] * row
        border[:, -1] = 0.0
        total = sums(ahead + behind)
        reduced = [
            sums(link.latency * (gradients > 0) + gradients / devices[:, None] / link.bandwidth)
            for link in (profile.reduce_within, profile.reduce_between)
        ]
        edges = [border / link.bandwidth + link.latency * (border > 0) for link in (profile.within, profile.between)]
        fits = None
        weights = each(lambda b: b.teacher_bytes + b.student_bytes + b.gradient_bytes + b.state_bytes)
        held = sums(weights + boundary * row)
        highest = held[:, -1] + saved.amax(1) + (RECEIVING + SENDING) * border.amax(1) + profile.input_bytes * row[:, 0]
        if never.any() or not (highest <= self.memory).all():
            of_unit = torch.stack([saved[:, list(u)].amax(1) for u in profile.units], 1)
            fits = torch.stack([self._fit(*of_k) for of_k in zip(held, of_unit, border, rows, strict=True)])
        return (
            total.diff(),
            sums(ahead).expand(2, -1, -1),
            torch.stack([total + 2 * (devices[:, None] - 1) * each_of for each_of in reduced]),
            torch.stack(edges),
            fits,
        )

    def _fit(self, held: Tensor, saved: Tensor, border: Tensor, rows: int) -> Tensor:
        """Whether a stage from one border to another fits into memory."""
        most = torch.nn.functional.pad(saved, (1, 0)).expand(self.units + 1, -1).triu(1).cummax(1).values
        edges = RECEIVING * border[:, None] + SENDING * border[None, :]
        both = held[None, :] - held[:, None] + most + edges
        both += self.profile.input_bytes * rows
        return both.isfinite() & (both <= self.memory)
