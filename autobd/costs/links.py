"""What the ways between ranks take: a message, and an all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..ranks import STOP, Header, Peers

_MESSAGES, _TIMES = 8, 3


@dataclass(frozen=True)
class MeasureLinks:
    """A job: seconds of a message between rank 0 and `peer`, and of an all-reduce over `ranks`, at two sizes, bytes."""

    sizes: tuple[int, int]
    peer: int
    ranks: tuple[int, ...]

    def __call__(self, peers: Peers) -> tuple[list[float], list[float]]:
        tensors = [torch.zeros(max(1, size // 4), device=peers.device) for size in self.sizes]
        reducer = peers.reducer(self.ranks) if peers.rank in self.ranks else None
        there = back = None
        what = "a test message"
        if peers.rank == 0:
            there, back = peers.sender(self.peer, 0, 2, what), peers.receiver(self.peer, 1, what)
        elif peers.rank == self.peer:
            back, there = peers.receiver(0, 0, what), peers.sender(0, 1, 2, what)
        messages, sums = [], []
        for tensor in tensors:

            def ping(tensor: Tensor = tensor) -> None:
                """There and back."""
                for _ in range(_MESSAGES):
                    if peers.rank == 0:
                        there.send(Header(), [tensor])  # type: ignore[union-attr]
                        back.take()  # type: ignore[union-attr]
                    elif peers.rank == self.peer:
                        back.take()  # type: ignore[union-attr]
                        there.send(Header(), [tensor])  # type: ignore[union-attr]

            def reduce(tensor: Tensor = tensor) -> None:
                for _ in range(_MESSAGES if reducer is not None else 0):
                    reducer([tensor]).result(peers.patience)  # type: ignore[misc]

            messages.append(_per_message(ping) / 2)
            sums.append(_per_message(reduce))
        if there is not None and back is not None:
            there.send(Header(STOP))
            back.take()
            there.join()
            back.join()
        return messages, sums


def _per_message(function: Callable[[], None]) -> float:
    function()  # to make room
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        function()
        found.append((time.perf_counter() - start) / _MESSAGES)
    return median(found)
