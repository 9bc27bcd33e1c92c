"""Bring together, on the caller's rank, what all ranks report: losses step by step, weights at epoch ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from ..parts import ShareLosses
from ..program import Trace
from ..ranks import EPOCH, SAVED, STOP, Header
from ..ranks.pickling import loads
from ..runtime import Rank, joined
from .history import History
from .jobs import named, reported


class Collector:
    """Losses of whole steps, in order, from the shares that ranks report, possibly some steps late.

    Arguments:
        rank: the caller's; `history`: what grows.
    """

    def __init__(self, rank: Rank, history: History) -> None:
        self._rank, self._history = rank, history
        self._trained = rank.program.blocks + len(rank.program.candidates)
        self._steps: dict[int, list[dict[int, ShareLosses]]] = defaultdict(list)
        self._times: dict[int, Tensor] = {}  # by rank, at the last epoch's end
        self.saved: list[tuple[int, int, str]] = []  # rank, step of a checkpoint, and what went wrong

    def add(self, step: int, losses: dict[int, ShareLosses]) -> None:
        """One rank's losses of a step; a step is complete when all ranks have reported it."""
        self._steps[step].append(losses)
        done = self._history.steps
        while len(self._steps[done]) == 1 + len(self._rank.links.results):
            shares = self._steps.pop(done)
            blocks = [[s[block] for s in shares if block in s] for block in range(self._trained)]
            trained = [sum(s.loss * s.weight for s in own) for own in blocks]
            relative = [sum(s.relative * s.weight for s in own) for own in blocks]
            for block in self._rank.program.stopped:  # as they were at last
                trained[block], relative[block] = self._history.losses[-1][block], self._history.relative[-1][block]
            self._history.add(tuple(trained), tuple(relative))
            done += 1

    def look(self) -> None:
        """Take the reports that are there."""
        for rank, receiver in self._rank.links.results.items():
            while receiver.ready() and receiver.peek().kind not in (EPOCH, STOP):
                self._report(rank, *receiver.take())

    def rest(self) -> None:
        """At the run's end: take all that is on its way."""
        for rank, receiver in self._rank.links.results.items():
            while receiver.peek().kind != STOP:
                self._report(rank, *receiver.take())

    def weights(self) -> dict[str, Tensor]:
        """At an epoch's end: what training has changed, by key, from all ranks."""
        found = dict(self._rank.trained())
        self._times = {self._rank.number: self._rank.times()}
        for rank, receiver in self._rank.links.results.items():
            while receiver.peek().kind != EPOCH:
                self._report(rank, *receiver.take())
            self._times[rank], *trained = receiver.take()[1]
            found |= named(trained)
        return found

    def _report(self, rank: int, header: Header, tensors: Sequence[Tensor]) -> None:
        if header.kind == SAVED:
            self.saved.append((rank, header.step, loads(bytes(tensors[0].numpy()))))
            return
        for step, losses in reported(tensors).items():
            self.add(step, losses)

    def trace(self) -> Trace:
        """At an epoch's end: when all ranks did what."""
        return joined(self._rank.program, self._times)
