"""What the ways between ranks take: a message, and an all-reduce."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from ..ranks import Header, Peers

_MESSAGES, _TIMES = 8, 3


@dataclass(frozen=True)
class MeasureLinks:
    """A job: seconds of a message between ranks 0 and 1, and of an all-reduce over all, at two sizes in bytes."""

    sizes: tuple[int, int]

    def __call__(self, peers: Peers) -> tuple[list[float], list[float]]:
        tensors = [torch.zeros(max(1, size // 4), device=peers.device) for size in self.sizes]
        reducer = peers.reducer(range(peers.size))
        there = back = None
        if peers.rank == 0:
            there, back = peers.sender(1, 0, 2, "a test message"), peers.receiver(1, 1, "a test message")
        elif peers.rank == 1:
            back, there = peers.receiver(0, 0, "a test message"), peers.sender(0, 1, 2, "a test message")
        messages, sums = [], []
        for tensor in tensors:

            def ping(tensor: Tensor = tensor) -> None:
                """There and back."""
                for _ in range(_MESSAGES):
                    if peers.rank == 0:
                        there.send(Header(), [tensor])  # type: ignore[union-attr]
                        back.take()  # type: ignore[union-attr]
                    elif peers.rank == 1:
                        back.take()  # type: ignore[union-attr]
                        there.send(Header(), [tensor])  # type: ignore[union-attr]

            def reduce(tensor: Tensor = tensor) -> None:
                for _ in range(_MESSAGES):
                    reducer([tensor]).result(peers.patience)

            messages.append(_per_message(ping) / 2)
            sums.append(_per_message(reduce))
        return messages, sums


def _per_message(function: Callable[[], None]) -> float:
    function()  # to make room
    found = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        function()
        found.append((time.perf_counter() - start) / _MESSAGES)
    return median(found)
