"""What one rank measures: a block pair at several numbers of rows, and the ways to other ranks. All ranks do it at
once, as they will when they train."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..blocks.verify import set_mode
from ..parts import Part, Student
from ..parts.channels import ChannelMaps
from ..ranks import Header, Peers
from ..ranks.message import dense
from ..recipe.losses import mean_square, precise

_WARM, _LEAST, _MOST = 2, 3, 50  # times that a thing is done
_MESSAGES = 8


@dataclass(frozen=True)
class Measured:
    """A block pair at some number of rows: seconds, the spread of the student's, and bytes. Infinite where it did not
    fit."""

    teacher: float
    student: float
    update: float
    spread: float
    saved: float


@dataclass(frozen=True)
class MeasureBlock:
    """A job: the block pair at each number of rows.

    Attributes:
        part: the block pair; `boundary`: what comes before it, of a whole batch; `teacher`, `student`: the inputs that
            its two sides read.
        folded: rows of each tensor of the boundary that belong to one row of the batch.
        rows: to measure at; `seconds`: how long, for each.
    """

    part: Part
    boundary: tuple[Tensor, ...]
    teacher: tuple[Tensor, ...]
    student: tuple[Tensor, ...]
    folded: tuple[int, ...]
    batch: int
    rows: tuple[int, ...]
    seconds: float

    def __call__(self, peers: Peers) -> dict[int, Measured]:
        part = self.part
        on = peers.device
        part.teacher.to(on)
        assert part.student is not None
        part.student.module.to(on)
        set_mode([part.teacher], False)
        set_mode([part.student.module], True)
        like = next((p for p in part.student.module.parameters() if p.is_floating_point()), torch.zeros((), device=on))
        student = Student(part.student, like)
        maps = ChannelMaps({part.block: (part.student.before, part.student.behind)}, like)
        student.train_too(maps.of_block(part.block))
        return {rows: self._at(rows, student, maps, on) for rows in self.rows}

    def _at(self, rows: int, student: Student, maps: ChannelMaps, device: torch.device) -> Measured:
        part, block = self.part, self.part.block
        assert part.student is not None
        boundary = [t[: rows * f].to(device) for t, f in zip(self.boundary, self.folded, strict=True)]
        given = [[self._rows(t, rows).to(device) for t in side] for side in (self.teacher, self.student)]
        entering = [maps.enter(block, i, a(t)) for i, (a, t) in enumerate(zip(student.before, boundary, strict=True))]
        times: dict[str, list[float]] = {"teacher": [], "student": [], "update": []}
        saved: dict[int, int] = {}
        clock = _clock(device)
        try:
            end, done = time.perf_counter() + self.seconds, 0
            while done < _WARM + _LEAST or (done < _WARM + _MOST and time.perf_counter() < end):
                start = clock()
                with torch.no_grad():
                    made = part.teacher(*boundary, *given[0])
                    made = [dense(t) for t in made]
                    after_teacher = clock()
                    targets = [precise(student.behind[i](made[i])) for i in part.student.distilled]
                    student.normalisers = student.normalisers or [mean_square(t) for t in targets]
                with torch.enable_grad(), _noting(saved, student) if done == 0 else nullcontext():
                    loss = student.forward(
                        entering, given[1], targets, partial(maps.leave, block), f"block {block}", False
                    )
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                student.output = None
                del loss
                after_student = clock()
                student.step()
                after_update = clock()
                if done >= _WARM:
                    times["teacher"].append(after_teacher - start)
                    times["student"].append(after_student - after_teacher)
                    times["update"].append(after_update - after_student)
                done += 1
        except (torch.OutOfMemoryError, MemoryError):
            return Measured(math.inf, math.inf, 0.0, 0.0, math.inf)
        except RuntimeError as error:
            if "not enough memory" not in str(error):  # what the CPU's allocator says
                raise
            return Measured(math.inf, math.inf, 0.0, 0.0, math.inf)
        low, middle, high = quantiles(times["student"], n=4)
        return Measured(
            median(times["teacher"]),
            middle,
            median(times["update"]),
            (high - low) / middle if middle else 0.0,
            float(sum(saved.values())),
        )

    def _rows(self, tensor: Tensor, rows: int) -> Tensor:
        return tensor[:rows] if tensor.ndim and tensor.shape[0] == self.batch else tensor


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
    for _ in range(_LEAST):
        start = time.perf_counter()
        function()
        found.append((time.perf_counter() - start) / _MESSAGES)
    return median(found)


def _clock(device: torch.device) -> Callable[[], float]:
    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised if device.type == "cuda" else time.perf_counter


class _noting(saved_tensors_hooks):
    """Note the bytes of every storage that is kept for the backward, but those of the block's own weights."""

    def __init__(self, found: dict[int, int], student: Student) -> None:
        own = {t.untyped_storage().data_ptr() for t in student.part.module.state_dict().values()}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)


def numbers_of_rows(batch: int, ranks: int) -> tuple[int, ...]:
    """Where to measure: the whole batch, and powers of two down to the smallest even share."""
    least = -(-batch // ranks)
    powers = [1 << i for i in range(batch.bit_length()) if (1 << i) * 2 > least]
    return tuple(sorted({*powers, batch}))


def medians(found: Sequence[Measured]) -> Measured:
    """Of what several equal ranks have measured."""
    return Measured(
        *(median(getattr(m, name) for m in found) for name in ("teacher", "student", "update", "spread", "saved"))
    )
