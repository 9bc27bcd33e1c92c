"""The best chain of stages for unequal devices: shares by water-filling, and which devices make a stage.

Devices of one kind, host and memory are alike, so a group of them is a count for each such type. Where there are few
enough of these counts the chain is exact (dynamic programming over the counts used up: few types, or up to twelve
devices that are all different). Beyond, groups are contiguous in one order of the devices, exact for it, and the order
is improved by swaps.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, product

import torch
from torch import Tensor

from ..costs import Profile
from .predict import stage_bytes

Counts = tuple[int, ...]  # devices of each type
_PAIRS = 600_000  # of counts and parts of them: what twelve different devices have
_HALVINGS = 60
_SWAPS = 200
_SAME = 1 + 1e-9


class UnequalStages:
    """Chains of stages for `profile`.

    Arguments:
        limits: bytes that each device may hold, or one for all.
        replicas: whether a stage may have several devices.
    """

    def __init__(self, profile: Profile, limits: Sequence[float], replicas: bool = True) -> None:
        self.profile, self.replicas = profile, replicas
        self.limits = list(limits) * (len(profile.devices) if len(limits) == 1 else 1)
        kinds: dict[tuple[int, int, float], list[int]] = {}
        for rank, key in enumerate(zip(profile.kind_of, profile.nodes, self.limits, strict=True)):
            kinds.setdefault(key, []).append(rank)
        self.types = list(kinds.values())
        self.available: Counts = tuple(map(len, self.types))
        self.units, self._borders = len(profile.units), [0, *accumulate(len(u) for u in profile.units)]
        self._known: dict[Counts, Tensor] = {}

    @property
    def exact(self) -> bool:
        """Whether every chain is considered."""
        pairs = 1
        for n in self.available:
            pairs *= (n + 1) * (n + 2) // 2
        return pairs <= _PAIRS

    def best(self) -> list[tuple[tuple[int, int], list[int]]] | None:
        """Stages as ((first unit, one past the last), ranks); None if none fits."""
        if not self.exact:
            return self._by_order()
        known = self._by_counts(None)
        if known is None:
            return None
        chain = self._by_counts(known[0] * _SAME)
        assert chain is not None
        left = [iter(ranks) for ranks in self.types]
        return [(ends, [next(left[t]) for t, n in enumerate(counts) for _ in range(n)]) for ends, counts in chain[1]]

    def bound(self) -> float:
        """Seconds below which no chain can be (prices for devices: the dual of sharing all work among all)."""
        batch = self.profile.batch_size
        best = torch.stack([(s[1:] / torch.arange(1, batch + 1)[:, None, None]).amin(0) for s in self._alone])
        borders = torch.arange(self.units)
        alone = best[:, borders, borders + 1] * batch  # seconds of each unit on one device of each type
        number = torch.tensor(self.available, dtype=torch.float64)
        price = 1 / alone.mean(1)
        price = price / (number * price).sum()
        work = (price[:, None] * alone).amin(0).sum()
        return max(float(work), float((1 / (number[:, None] / alone).sum(0)).max()))

    # ---------------------------------------------------------------- chains

    def _by_counts(self, limit: float | None) -> tuple[float, list[tuple[tuple[int, int], Counts]]] | None:
        """The least slowest stage, or with a `limit` on it the fewest stages; and the chain."""
        states = list(product(*(range(n + 1) for n in self.available)))
        index = {s: i for i, s in enumerate(states)}
        least = torch.full((len(states), self.units + 1), torch.inf, dtype=torch.float64)
        least[0, 0] = 0.0
        origin: dict[int, tuple[list[Counts], Tensor, Tensor]] = {}
        for i, state in enumerate(states[1:], 1):
            groups = [g for g in self._groups(state) if sum(g) <= self.profile.batch_size]
            before = least[[index[_less(state, g)] for g in groups]]
            cost = torch.stack([self.cost(g) for g in groups])
            if limit is None:
                value = torch.maximum(before[:, :, None], cost)
            else:
                value = torch.where(cost <= limit, before[:, :, None] + 1, torch.inf)
            over, start = value.min(1)
            least[i], which = over.min(0)
            origin[i] = groups, which, start.gather(0, which[None])[0]
        i, j = int(least[:, -1].argmin()), self.units
        best = float(least[i, -1])
        if best == torch.inf:
            return None
        chain: list[tuple[tuple[int, int], Counts]] = []
        while j:
            groups, which, start = origin[i]
            group, first = groups[int(which[j])], int(start[j])
            chain.insert(0, ((first, j), group))
            i, j = index[_less(states[i], group)], first
        return best, chain

    def _groups(self, state: Counts) -> Iterator[Counts]:
        for group in product(*(range(n + 1) for n in state)):
            if sum(group) == 1 or (self.replicas and sum(group) > 1):
                yield group

    def _by_order(self) -> list[tuple[tuple[int, int], list[int]]] | None:
        """Contiguous groups in the best order found: the fastest devices first, then swaps that help."""
        whole = [float(s[-1, 0, -1]) for s in self._alone]
        order = [t for t in sorted(range(len(whole)), key=lambda t: whole[t]) for _ in self.types[t]]
        best, chain = self._chain_in(order)
        generator = torch.Generator().manual_seed(0)
        for _ in range(_SWAPS):
            a, b = torch.randint(len(order), (2,), generator=generator).tolist()
            if order[a] == order[b]:
                continue
            other = list(order)
            other[a], other[b] = other[b], other[a]
            value, found = self._chain_in(other)
            if value < best:
                best, chain, order = value, found, other
        left = [iter(ranks) for ranks in self.types]
        return None if chain is None else [(ends, [next(left[t]) for t in order[a:b]]) for ends, (a, b) in chain]

    def _chain_in(self, order: list[int]) -> tuple[float, list[tuple[tuple[int, int], tuple[int, int]]] | None]:
        number = len(order)
        least = torch.full((number + 1, self.units + 1), torch.inf, dtype=torch.float64)
        least[0, 0] = 0.0
        origin: dict[tuple[int, int], tuple[int, int]] = {}
        for n in range(1, number + 1):
            for k in range(1, min(n, self.profile.batch_size) + 1 if self.replicas else 2):
                group = tuple(order[n - k : n].count(t) for t in self._each)
                value, start = torch.maximum(least[n - k, :, None], self.cost(group)).min(0)
                for j in (value < least[n]).nonzero().flatten().tolist():
                    least[n, j], origin[n, j] = value[j], (int(start[j]), k)
        n, j = int(least[:, -1].argmin()), self.units
        best = float(least[n, -1])
        if best == torch.inf:
            return best, None
        chain: list[tuple[tuple[int, int], tuple[int, int]]] = []
        while j:
            i, k = origin[n, j]
            chain.insert(0, ((i, j), (n - k, n)))
            n, j = n - k, i
        return best, chain

    # ---------------------------------------------------------------- costs

    @property
    def _each(self) -> range:
        return range(len(self.types))

    def cost(self, group: Counts) -> Tensor:
        """Seconds of a stage from any border to any later one, on `group`, at the best shares of a row or more."""
        if group not in self._known:
            self._known[group] = self._filled(group)
        return self._known[group]

    def _filled(self, group: Counts) -> Tensor:
        used = [t for t in self._each if group[t]]
        curves = {t: self._linked[t].flatten(1).T.contiguous() for t in used}  # [stages, rows 0 to the batch]
        batch = self.profile.batch_size
        high = torch.stack([c[:, batch] for c in curves.values()]).amin(0)
        finite = torch.stack([c[:, 1] for c in curves.values()]).amax(0)
        high = torch.where(high.isfinite(), high, torch.stack([_last(c) for c in curves.values()]).amax(0))
        low, high = torch.zeros_like(high), torch.maximum(high, finite)

        def rows(seconds: Tensor) -> dict[int, Tensor]:
            return {
                t: (torch.searchsorted(c, seconds[:, None], right=True)[:, 0] - 1).clamp(1, batch)
                for t, c in curves.items()
            }

        def enough(seconds: Tensor) -> Tensor:
            return sum(n * group[t] for t, n in rows(seconds).items()) >= batch  # type: ignore[return-value]

        possible = enough(high) & high.isfinite()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            there = enough(middle)
            low, high = torch.where(there, low, middle), torch.where(there, middle, high)
        taken = rows(high)
        seconds = torch.stack([c.gather(1, taken[t][:, None])[:, 0] for t, c in curves.items()]).amax(0)
        side = self.units + 1
        return torch.where(possible, seconds, torch.inf).reshape(side, side) + self._reduce(group)

    def _reduce(self, group: Counts) -> Tensor:
        ranks = [rank for t, n in enumerate(group) for rank in self.types[t][:n]]
        ends = self._sums([self.profile.reduce_seconds(ranks, b.gradient_bytes) for b in self.profile.blocks])
        return ends[None, :] - ends[:, None]

    @cached_property
    def _linked(self) -> list[Tensor]:
        """`_seconds` with the boundaries that come and go. Over several hosts every one is taken to come from another:
        which ranks are next to each other is not known."""
        link = self.profile.between if len(set(self.profile.nodes)) > 1 else self.profile.within
        border = torch.tensor(
            [0.0, *(self.profile.blocks[b - 1].boundary for b in self._borders[1:-1]), 0.0], dtype=torch.float64
        )
        rows = torch.arange(self.profile.batch_size + 1)[:, None]
        each = border[None, :] * rows / link.bandwidth + link.latency * (border > 0) * (rows > 0)
        return [s + each[:, :, None] + each[:, None, :] for s in self._alone]

    @cached_property
    def _alone(self) -> list[Tensor]:
        return [self._seconds(t) for t in self._each]

    def _seconds(self, t: int) -> Tensor:
        """[rows 0 to the batch, from, to]: seconds on one device of type t; infinite for no stage, or where it does not
        fit. Never falling with the rows."""
        profile, rank = self.profile, self.types[t][0]
        kind, limit, batch, side = profile.kind_of[rank], self.limits[rank], profile.batch_size, self.units + 1
        found = torch.full((batch + 1, side, side), torch.inf, dtype=torch.float64)
        order = torch.ones(side, side, dtype=torch.bool).triu(1)
        for rows in range(batch + 1):
            ends = self._sums(
                [b.teacher[kind].at(rows) + b.student[kind].at(rows) + b.update[kind] for b in profile.blocks]
            )
            fits = order if limit == torch.inf else order & (self._bytes(rows) <= limit)
            found[rows] = torch.where(fits, ends[None, :] - ends[:, None], torch.inf)
        found[0] = torch.where(order, 0.0, torch.inf)
        return found.cummax(0).values

    def _bytes(self, rows: int) -> Tensor:
        profile, side = self.profile, self.units + 1
        found = torch.full((side, side), torch.inf, dtype=torch.float64)
        for i, j in itertools.combinations(range(side), 2):
            blocks = range(self._borders[i], self._borders[j])
            found[i, j] = stage_bytes(profile, blocks, blocks, rows, (i > 0, j < self.units))
        return found

    def _sums(self, values: Sequence[float]) -> Tensor:
        ends = [0.0, *accumulate(values)]
        return torch.tensor([ends[b] for b in self._borders], dtype=torch.float64)


def filled(
    profile: Profile, blocks: Sequence[int], group: Sequence[int], limits: Sequence[float]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of a group and their shares: row after row to the device that is done with one more the soonest."""

    def seconds(rank: int, rows: int) -> float:
        kind, costs = profile.kind_of[rank], profile.blocks
        ends = blocks[0] > 0, blocks[-1] + 1 < len(costs)
        if stage_bytes(profile, blocks, blocks, rows, ends) > limits[rank]:
            return torch.inf
        link = profile.between if len(set(profile.nodes)) > 1 else profile.within
        borders = [costs[blocks[0] - 1].boundary] * ends[0] + [costs[blocks[-1]].boundary] * ends[1]
        work = sum(
            costs[b].teacher[kind].at(rows) + costs[b].student[kind].at(rows) + costs[b].update[kind] for b in blocks
        )
        return work + sum(link.seconds(rows * size) for size in borders)

    rows = dict.fromkeys(group, 1)
    heap = [(seconds(rank, 2), rank) for rank in group]
    heapq.heapify(heap)
    for _ in range(profile.batch_size - len(group)):
        _, rank = heap[0]
        rows[rank] += 1
        heapq.heapreplace(heap, (seconds(rank, rows[rank] + 1), rank))
    return tuple(rows), tuple(rows.values())


def _less(state: Counts, group: Counts) -> Counts:
    return tuple(a - b for a, b in zip(state, group, strict=True))


def _last(curves: Tensor) -> Tensor:
    """The last finite value of each row."""
    return torch.where(curves.isfinite(), curves, -torch.inf).amax(1)
