"""A message: a few numbers and any tensors, packed into one buffer of bytes.

count | kind step batch first last progress sizes own save apart tensors | dtype dims shape strides offset | ... | data
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STEP, EPOCH, STOP, GROW, FILLER, SAVED = range(6)
_DTYPES = tuple(
    sorted(
        {v for v in vars(torch).values() if isinstance(v, torch.dtype) and not str(v).startswith("torch.q")}, key=str
    )
)
_ALIGNMENT = 64
SMALLEST = 4096  # bytes; holds every header without tensors


@dataclass(frozen=True)
class Header:
    """What a message is about.

    Attributes:
        kind: STEP, or one that carries no rows: EPOCH (it ends), STOP, SAVED (a rank has
            written its part of a checkpoint).
        step: number of the step.
        batch: rows of the whole batch; `first`, `last`: the rows that the message holds (`last` is one past).
        progress: 0 to 1 through the training.
        sizes: which of the sizes of inputs that have come so far the batch has.
        own: how much of a student block's input is the student's own boundary, 0 to 1; the rest is the teacher's.
        save: a checkpoint is made after this step.
    """

    kind: int = STEP
    step: int = 0
    batch: int = 0
    first: int = 0
    last: int = 0
    progress: float = 0.0
    sizes: int = 0
    own: float = 0.0
    save: bool = False


@dataclass(frozen=True)
class Packing:
    """Where the parts of a message go.

    Attributes:
        head, payload: bytes of the numbers in front, and of the tensors.
        outside: the tensors travel apart from the numbers.
        words: the numbers; `parts`: tensors, each with its offset in the payload.
    """

    head: int
    payload: int
    outside: bool
    words: tuple[int, ...]
    parts: tuple[tuple[Tensor, int], ...]

    @classmethod
    def of(cls, header: Header, tensors: Sequence[Tensor], outside: bool = False) -> Packing:
        """Tensors keep their strides where these cover their memory without gaps (channels last, transposed);
        others become contiguous."""
        tensors = [dense(t) for t in tensors]
        progress, own = struct.unpack("<2q", struct.pack("<2d", header.progress, header.own))
        layout, parts, offset = [], [], 0
        for tensor in tensors:
            layout += [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *tensor.stride(), offset]
            parts.append((tensor, offset))
            offset = _aligned(offset + tensor.numel() * tensor.element_size())
        numbers = [header.kind, header.step, header.batch, header.first, header.last, progress, header.sizes, own]
        numbers.append(int(header.save))
        words = [*numbers, offset if outside else -1, len(tensors), *layout]
        count = 1 + len(words)
        return cls(_aligned(8 * count), offset, outside, (count, *words), tuple(parts))

    @property
    def size(self) -> int:
        """Bytes in one piece."""
        return self.head if self.outside else self.head + self.payload

    def write(self, buffer: Tensor) -> None:
        """Fill the first `size` bytes of `buffer`; without waiting where it is pinned."""
        buffer[: 8 * len(self.words)].view(torch.int64).copy_(torch.tensor(self.words))
        if not self.outside:
            self.write_payload(buffer[self.head :])

    def write_payload(self, buffer: Tensor) -> None:
        for tensor, offset in self.parts:
            if tensor.numel():
                target = _strided(buffer, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)
                target.copy_(tensor, non_blocking=tensor.is_cuda and buffer.is_pinned())


def read_header(buffer: Tensor) -> tuple[Header, int | None]:
    """The header of a packed message, and how many bytes of tensors travel apart from it (None: none do)."""
    words = buffer[8 : 8 * 12].view(torch.int64).tolist()
    progress, own = struct.unpack("<2d", struct.pack("<2q", words[5], words[7]))
    kind, step, batch, first, last = words[:5]
    header = Header(kind, step, batch, first, last, progress, words[6], own, bool(words[8]))
    return header, None if words[9] < 0 else words[9]


def read_tensors(buffer: Tensor, payload: Tensor | None = None) -> list[Tensor]:
    """The tensors of a packed message, as views of `buffer`, or of the payload that travelled apart."""
    count = int(buffer[:8].view(torch.int64))
    words = buffer[8 : 8 * count].view(torch.int64).tolist()
    payload = buffer[_aligned(8 * count) :] if payload is None else payload
    tensors, at = [], 11
    for _ in range(words[10]):
        dims = words[at + 1]
        shape, strides = words[at + 2 : at + 2 + dims], words[at + 2 + dims : at + 2 + 2 * dims]
        tensors.append(_strided(payload, _DTYPES[words[at]], tuple(shape), tuple(strides), words[at + 2 + 2 * dims]))
        at += 3 + 2 * dims
    return tensors


def _strided(
    buffer: Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> Tensor:
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + size].view(dtype).as_strided(shape, strides)


def dense(tensor: Tensor) -> Tensor:
    """As a message has it: itself, or contiguous where it does not fill its memory."""
    return tensor if is_dense(tensor) else tensor.contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory exactly once."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
