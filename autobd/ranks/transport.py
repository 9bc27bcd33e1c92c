"""Both ends of an edge: messages of any size between two ranks, received ahead, with a limit on those under way.

A receive can only be posted at an agreed size. Both ends start at the same capacity; a longer message is announced by
two short ones, the number that may have been posted before the announcement was read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import RankError
from .lane import Lane
from .message import FILLER, GROW, SMALLEST, STEP, STOP, Header, Packing, read_header, read_tensors
from .waiting import Lost, Patience

_POSTED = 2
_REMEMBERED = 64  # messages
_Arrived = tuple[Tensor, tuple[Tensor, Any] | None]  # the message, and tensors that come apart from it


@dataclass(frozen=True)
class Place:
    """What an edge is called in errors: "rank 2 waits for rank 1 (boundary after block 3)"."""

    own: int
    peer: int
    carries: str

    def stalled(self, what: str, patience: Patience, step: int) -> RankError:
        return RankError(
            f"Rank {self.own} has waited {patience.timeout:g} s for rank {self.peer} {what} ({self.carries}), "
            f"step {step}.",
            expected="an answer in time",
            do="look at what that rank does (a stalled loader?), or pass a longer timeout=",
        )


class Sender:
    """The sending end; `send` returns when the message is packed, and waits while `slots` messages are under way.

    Attributes:
        sent: the last steps and when their messages were on their way (`time.perf_counter`).

    Arguments:
        group: torch.distributed process group (gloo); `tag`: the edge's number, equal at both ends.
        lane: the edge's stream, on a GPU.
    """

    def __init__(
        self, group: Any, place: Place, tag: int, slots: int, patience: Patience, lane: Lane | None = None
    ) -> None:
        self._group, self._place, self._tag, self._patience, self._lane = group, place, tag, patience, lane
        self._capacity, self._step = SMALLEST, 0
        self.sent: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._free: queue.Queue[Tensor | BaseException] = queue.Queue()
        for _ in range(slots):
            self._free.put(_buffer(SMALLEST, lane))
        self._sent: queue.Queue[tuple[Callable[[], None], Tensor] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._wait, daemon=True, name=f"send to {place.peer}")
        self._thread.start()

    def send(self, header: Header, tensors: Sequence[Tensor] = ()) -> None:
        """Errors: Lost, RankError if no slot becomes free in time."""
        self._step = header.step
        apart = self._lane is not None and self._lane.group is not None and any(t.is_cuda for t in tensors)
        packing = Packing.of(header, tensors, apart)
        if packing.size > self._capacity:
            self._capacity = packing.size + packing.size // 8
            for kind in (GROW, FILLER):
                self._put(Packing.of(Header(kind, header.step, batch=self._capacity), []))
        began = self._put(packing)
        if header.kind == STEP:
            self.sent.append((header.step, began))
        if apart and self._lane is not None:
            self._lane.send(packing)
        if header.kind == STOP:  # one for the receive that is still posted
            self._put(Packing.of(Header(FILLER, header.step), []))
            self._sent.put(None)

    def join(self) -> None:
        """Wait until everything has arrived, after a STOP."""
        self._thread.join(self._patience.timeout)

    def close(self) -> None:
        """Let the thread end, when what was sent has arrived or the connection is broken."""
        self._sent.put(None)

    def _put(self, packing: Packing) -> float:
        """Begin to send; returns the time."""
        try:
            buffer = self._patience.get(self._free)
        except TimeoutError:
            raise self._place.stalled("to take a message", self._patience, self._step) from None
        if isinstance(buffer, BaseException):
            self._free.put(buffer)
            raise Lost(f"the connection to rank {self._place.peer}: {buffer}") from buffer
        if buffer.numel() < packing.size:
            buffer = _buffer(self._capacity, self._lane)
        part = buffer[: packing.size]
        if self._lane is not None and any(t.is_cuda for t, _ in packing.parts) and not packing.outside:
            began = time.perf_counter()
            self._sent.put((partial(self._when_full, self._lane.stage(packing, buffer), part), buffer))
            return began
        packing.write(buffer)
        began = time.perf_counter()
        try:
            self._sent.put((self._begin(part).wait, buffer))
        except RuntimeError as error:
            raise Lost(f"the connection to rank {self._place.peer}: {error}") from error
        return began

    def _when_full(self, event: Any, part: Tensor) -> None:
        event.synchronize()
        self._begin(part).wait()

    def _begin(self, part: Tensor) -> Any:
        return self._group.send([part], self._place.peer, self._tag)

    def _wait(self) -> None:
        while (item := self._sent.get()) is not None:
            wait, buffer = item
            try:
                wait()
            except RuntimeError as error:
                self._free.put(error)
                return
            self._free.put(buffer)


class Receiver:
    """The receiving end: two receives are posted ahead; a message is valid until the next one is taken.

    Attributes:
        arrived: the last steps and when their messages were here.

    Arguments:
        keep: copy every message when it arrives, so that the sender never waits (for results).
        lane: the edge's stream, on a GPU; tensors are taken there.
    """

    def __init__(
        self, group: Any, place: Place, tag: int, patience: Patience, keep: bool = False, lane: Lane | None = None
    ) -> None:
        self._group, self._place, self._tag, self._keep, self._patience = group, place, tag, keep, patience
        self._lane = lane
        self._free: queue.Queue[Tensor | None] = queue.Queue()
        for _ in range(_POSTED + 1):
            self._free.put(_buffer(SMALLEST, lane))
        self._arrived: queue.Queue[_Arrived | BaseException] = queue.Queue()
        self._held: Tensor | None = None
        self._next: tuple[Header, list[Tensor]] | None = None
        self._step = 0
        self.arrived: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._thread = threading.Thread(target=self._receive, daemon=True, name=f"receive from {place.peer}")
        self._thread.start()

    def peek(self) -> Header:
        """The header of the next message. Errors: as `take`."""
        if self._next is None:
            self._next = self._get()
        return self._next[0]

    def take(self) -> tuple[Header, list[Tensor]]:
        """The next message. Errors: Lost, RankError if none arrives in time."""
        header, tensors = self._next or self._get()
        self._next, self._step = None, header.step + (header.kind == STEP)
        return header, tensors

    def ready(self) -> bool:
        """Whether a message (or an error) can be taken without waiting."""
        return self._next is not None or not self._arrived.empty()

    def join(self) -> None:
        """Wait until the sender's STOP has been read."""
        self._thread.join(self._patience.timeout)

    def close(self) -> None:
        """Let the thread end, when what it waits for has come or the connection is broken."""
        self._free.put(None)

    def _get(self) -> tuple[Header, list[Tensor]]:
        if self._held is not None:
            self._free.put(self._held)
            self._held = None
        try:
            arrived = self._patience.get(self._arrived)
        except TimeoutError:
            raise self._place.stalled("to send", self._patience, self._step) from None
        if isinstance(arrived, BaseException):
            self._arrived.put(arrived)
            raise Lost(f"the connection to rank {self._place.peer}: {arrived}") from arrived
        buffer, apart = arrived
        if not self._keep:
            self._held = buffer
        header, _ = read_header(buffer)
        if self._lane is None:
            return header, read_tensors(buffer)
        if apart is not None:
            return header, read_tensors(buffer, self._lane.arrived(*apart))
        return header, self._lane.bring(read_tensors(buffer))

    def _receive(self) -> None:
        capacity = SMALLEST
        posted: deque[tuple[Any, Tensor]] = deque()
        stopping = False
        try:
            while True:
                while len(posted) < (1 if stopping else _POSTED):
                    try:
                        buffer = self._free.get(block=not posted)
                    except queue.Empty:
                        break
                    if buffer is None:
                        return
                    if buffer.numel() < capacity:
                        buffer = _buffer(capacity, self._lane)
                    posted.append((self._group.recv([buffer], self._place.peer, self._tag), buffer))
                work, buffer = posted.popleft()
                work.wait()
                if stopping:
                    return
                header, outside = read_header(buffer)
                if header.kind in (GROW, FILLER):
                    capacity = max(capacity, header.batch)
                    self._free.put(buffer)
                    continue
                if header.kind == STEP:
                    self.arrived.append((header.step, time.perf_counter()))
                stopping = header.kind == STOP
                if self._keep:
                    self._arrived.put((buffer.clone(), None))
                    self._free.put(buffer)
                    continue
                apart = None if outside is None or self._lane is None else self._lane.receive(outside)
                self._arrived.put((buffer, apart))
                if stopping:
                    self._free.put(_buffer(SMALLEST, self._lane))
        except RuntimeError as error:
            self._arrived.put(error)


def _buffer(size: int, lane: Lane | None) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=lane is not None)
