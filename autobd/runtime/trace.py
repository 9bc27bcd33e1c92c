"""Note what really runs, and when: the last steps of every rank, by instruction, and the messages between ranks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..program import Event, Message, Program, Trace

_KEPT = 64  # steps
_RAN, _SENT, _ARRIVED, _HELD = range(4)  # kinds of rows


class Tape:
    """The times of one rank's last steps, by a clock that all ranks share.

    Arguments:
        instructions: how many a step has; `device`: where they run.
    """

    def __init__(self, instructions: int, device: torch.device) -> None:
        self._times: deque[tuple[int, int, Any, Any]] = deque(maxlen=max(1, _KEPT * instructions))
        self._cuda = device if device.type == "cuda" else None
        self._offset = time.time() - time.perf_counter()
        self._stamp: Callable[[], Any] = time.perf_counter if self._cuda is None else self._event
        self._origin: Any = self._stamp()
        self._origin_time = time.perf_counter()
        self._timed: _Timed | None = None

    def timed(self, rank: Any) -> Any:
        """`rank` for one step: its instructions are timed as the generated function calls them."""
        if self._timed is None:
            self._timed = _Timed(rank, self._times, self._stamp)
        self._timed.index = 0
        return self._timed

    def rows(
        self, sent: Iterable[tuple[int, int, float]], arrived: Iterable[tuple[int, int, float]], memory: float
    ) -> Tensor:
        """All times as numbers, rows of (kind, step, index, start, end), for `joined`.

        Arguments:
            sent, arrived: (edge, step, time) of this rank's messages; `memory`: bytes that it has held at most.
        """
        shift = self._offset
        rows = [(_RAN, step, i, self._seconds(a), self._seconds(b)) for step, i, a, b in self._times]
        rows += [(_SENT, step, edge, t + shift, t + shift) for edge, step, t in sent]
        rows += [(_ARRIVED, step, edge, t + shift, t + shift) for edge, step, t in arrived]
        rows.append((_HELD, 0, 0, memory, memory))
        return torch.tensor(rows, dtype=torch.float64)

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._cuda))
        return event

    def _seconds(self, stamp: Any) -> float:
        if self._cuda is None:
            return float(stamp) + self._offset
        stamp.synchronize()
        return float(self._origin.elapsed_time(stamp)) / 1000 + self._origin_time + self._offset


class _Timed:
    """A rank whose instructions are timed, in the order in which they are called."""

    def __init__(self, rank: Any, times: deque[tuple[int, int, Any, Any]], stamp: Callable[[], Any]) -> None:
        self._rank, self._times, self._stamp, self.index = rank, times, stamp, 0

    def __getattr__(self, op: str) -> Any:
        method, rank, note, stamp = getattr(self._rank, op), self._rank, self._times.append, self._stamp

        def timed(*arguments: Any, **named: Any) -> Any:
            index, start = self.index, stamp()
            result = method(*arguments, **named)
            note((rank.header.step, index, start, stamp()))
            self.index = index + 1
            return result

        setattr(self, op, timed)  # found at once from now on
        return timed


def joined(program: Program, rows: Mapping[int, Tensor]) -> Trace:
    """The trace of a run from the rows that every rank has noted (see `Tape.rows`)."""
    found = {rank: own.tolist() for rank, own in rows.items()}
    begin = min((row[3] for own in found.values() for row in own if row[0] != _HELD), default=0.0)
    events = [
        Event(rank, int(step), int(i), program.ranks[rank][int(i)], a - begin, b - begin)
        for rank, own in found.items()
        for kind, step, i, a, b in own
        if kind == _RAN
    ]
    times = {
        kind: {(int(edge), int(step)): t - begin for own in found.values() for k, step, edge, t, _ in own if k == kind}
        for kind in (_SENT, _ARRIVED)
    }
    messages = [
        Message(edge, step, times[_SENT][edge, step], arrived)
        for (edge, step), arrived in sorted(times[_ARRIVED].items())
        if (edge, step) in times[_SENT]
    ]
    memory = {rank: row[3] for rank, own in found.items() for row in own if row[0] == _HELD}
    return Trace(program, tuple(sorted(events, key=lambda e: (e.start, e.rank, e.index))), tuple(messages), memory)
