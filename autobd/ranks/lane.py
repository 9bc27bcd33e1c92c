"""CUDA: a stream beside the computing one, on which messages are copied or sent while the students compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .message import Packing

_KEPT = 2  # payloads on their way


class Lane:
    """One edge's stream.

    Tensors travel from GPU to GPU over NCCL, their header ahead of them over gloo; where NCCL cannot (two ranks on one
    GPU, a rank on the CPU), through pinned buffers on the host.

    Arguments:
        device: this rank's GPU.
        group: an NCCL process group of the two ranks of the edge; `peer`: the other one's number in it. None: pinned
            copies.
    """

    def __init__(self, device: torch.device, group: Any = None, peer: int = 0) -> None:
        self.device, self.group, self.peer = device, group, peer
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sent: deque[tuple[Any, Tensor]] = deque()

    def stage(self, packing: Packing, buffer: Tensor) -> torch.cuda.Event:
        """Fill a pinned buffer; it is full when the event is reached."""
        with torch.cuda.stream(self._behind()):
            packing.write(buffer)
            event: torch.cuda.Event = self.stream.record_event()
        self._hold([t for t, _ in packing.parts])
        return event

    def send(self, packing: Packing) -> None:
        """Send the tensors of a message whose header has gone ahead."""
        with torch.cuda.stream(self._behind()):
            flat = torch.empty(packing.payload, dtype=torch.uint8, device=self.device)
            packing.write_payload(flat)
            self._sent.append((self.group.send([flat], self.peer, 0), flat))
            while len(self._sent) > _KEPT:  # its memory may be used again when the stream is past it
                self._sent.popleft()[0].wait()
        self._hold([t for t, _ in packing.parts])

    def receive(self, size: int) -> tuple[Tensor, Any]:
        """Begin to receive `size` bytes; called on the receiving thread when the header is there."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            flat = torch.empty(size, dtype=torch.uint8, device=self.device)
            return flat, self.group.recv([flat], self.peer, 0)

    def arrived(self, flat: Tensor, work: Any) -> Tensor:
        """Let the computing stream wait for what `receive` has begun."""
        with torch.cuda.stream(self.stream):
            work.wait()
        self._ahead([flat])
        return flat

    def bring(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of a pinned buffer on the GPU; the buffer may be used again at once."""
        with torch.cuda.stream(self.stream):
            moved = [t.to(self.device, non_blocking=True) for t in tensors]
        self.stream.synchronize()  # for these copies alone, not for the students' work
        self._ahead(moved)
        return moved

    def _behind(self) -> torch.cuda.Stream:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return self.stream

    def _ahead(self, tensors: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        for tensor in tensors:
            tensor.record_stream(current)  # it was allocated on the other stream

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self.stream)
