"""What one rank measures: block pairs at several numbers of rows, in turn as in a step. All ranks do it at once, as
they will when they train."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..blocks.verify import set_mode
from ..parts import Part, Student
from ..parts.channels import ChannelMaps
from ..parts.part import on_device
from ..ranks import Peers
from ..ranks.memory import Peak
from ..ranks.message import dense
from ..recipe.losses import mean_square, precise

_WARM, _LEAST, _MOST = 2, 2, 50  # times that a thing is done; memory is measured in the second
_SHARES = 8  # ranks that share a batch
Boundary = tuple[Tensor, ...]


@dataclass(frozen=True)
class Measured:
    """A block pair at some number of rows: seconds, the spread of the student's, and bytes, of both and of the teacher
    alone. Infinite where it did not fit."""

    teacher: float
    student: float
    update: float
    spread: float
    saved: float
    passing: float


NOT_FITTING = Measured(math.inf, math.inf, 0.0, 0.0, math.inf, math.inf)


@dataclass(frozen=True)
class MeasureBlocks:
    """A job: consecutive block pairs at each number of rows.

    As in a step, all teachers run before the students, each block once: again and again in turn, so that every one
    finds the caches as the others leave them.

    Attributes:
        parts: the block pairs; `candidates`: other students for them.
        boundary: what comes before the first block, of a whole batch.
        teacher, student: all input tensors of the two models.
        folded: rows of each tensor of the boundary that belong to one row of the batch.
        rows: to measure at; `seconds`: how long, for each.
    """

    parts: tuple[Part, ...]
    candidates: tuple[Part, ...]
    boundary: Boundary
    teacher: Boundary
    student: Boundary
    folded: tuple[int, ...]
    batch: int
    rows: tuple[int, ...]
    seconds: float

    def __call__(self, peers: Peers, told: Callable[[int], Any] = lambda blocks: None) -> list[dict[int, Measured]]:
        """By block and rows; `told` is called when so many blocks have been measured at a number of rows."""
        on, students = peers.device, []
        every = list(on_device(dict(enumerate([*self.parts, *self.candidates])), on).values())
        parts = every[: len(self.parts)]
        for part in every:
            assert part.student is not None
            set_mode([part.teacher], False)
            set_mode([part.student.module], True)
        weights = [p for part in parts if part.student for p in part.student.module.parameters()]
        like = next((p for p in weights if p.is_floating_point()), torch.zeros((), device=on))
        maps = ChannelMaps({p.block: (p.student.before, p.student.behind) for p in parts if p.student}, like)
        for i, part in enumerate(every):
            assert part.student is not None
            students.append((part.block - parts[0].block, Student(part.student, like)))
            if i < len(parts):
                students[-1][1].train_too(maps.trained_with(part.block))
        found = []
        for rows in self.rows:
            found.append(_Blocks(self, parts, rows, students, maps, on).run())
            told(len(parts))
        return [dict(zip(self.rows, of_block, strict=True)) for of_block in zip(*found, strict=True)]


class _Blocks:
    """The blocks of a job at one number of rows; `students`: each with its place in `parts`."""

    def __init__(
        self,
        job: MeasureBlocks,
        parts: list[Part],
        rows: int,
        students: list[tuple[int, Student]],
        maps: ChannelMaps,
        device: torch.device,
    ) -> None:
        self.job, self.parts, self.students, self.maps, self.device = job, parts, students, maps, device
        self.whole = rows >= job.batch
        self.boundary = tuple(t[: rows * f].to(device) for t, f in zip(job.boundary, job.folded, strict=True))
        self.given = [
            [(t[:rows] if t.ndim and t.shape[0] == job.batch else t).to(device) for t in side]
            for side in (job.teacher, job.student)
        ]
        self.clock = _clock(device)
        self.times: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))  # by step
        self.bytes, self.passing = [0.0] * len(parts), [0.0] * len(parts)

    def run(self) -> list[Measured]:
        blocks = range(len(self.parts))
        try:
            end, done = time.perf_counter() + self.job.seconds, 0
            while done < _WARM + _LEAST or (done < _WARM + _MOST and time.perf_counter() < end):
                self._step(done)
                done += 1
        except (torch.OutOfMemoryError, MemoryError):
            return [NOT_FITTING for _ in blocks]
        except RuntimeError as error:
            if self.whole and "not enough memory" not in str(error):  # what the CPU's allocator says
                raise
            return [NOT_FITTING for _ in blocks]
        except ValueError:
            if self.whole:
                raise
            return [NOT_FITTING for _ in blocks]  # a batch norm over one value, say
        return [self._measured(b) for b in blocks]

    def _step(self, number: int) -> None:
        """All teachers, then all students."""
        boundaries, note = [self.boundary], number == 1
        for b, part in enumerate(self.parts):
            peak = Peak(self.device) if note else None
            start = self.clock()
            inputs = [self.given[0][i] for i in part.inputs]
            boundaries.append(tuple(dense(t) for t in part.teach(*boundaries[-1], *inputs)))
            self._note("teacher", b, number, self.clock() - start)
            if peak is not None:
                self.passing[b] = max(peak.bytes - sum(map(_bytes, boundaries[-1])), 0.0)
                self._needed(b, self.passing[b])
        for b, student in self.students:
            peak = Peak(self.device) if note else None
            saved: dict[int, int] = {}
            with _noting(saved, student) if number == 0 else nullcontext():
                gradients = self._student(b, student, boundaries[b], boundaries[b + 1], number)
            self._needed(b, float(sum(saved.values())))
            if peak is not None:
                self._needed(b, peak.bytes - gradients)

    def _student(self, b: int, student: Student, before: Boundary, after: Boundary, number: int) -> int:
        """One student's step. Returns: bytes of its gradients."""
        block = self.parts[b].block
        student.begin()
        start = self.clock()
        with torch.no_grad():
            targets = [precise(student.behind[i](after[i])) for i in student.part.distilled]
            student.normalisers = student.normalisers or [mean_square(t) for t in targets]
        entering = [
            self.maps.enter(block, i, adapter(t))
            for i, (adapter, t) in enumerate(zip(student.before, before, strict=True))
        ]
        inputs = [self.given[1][i] for i in student.part.inputs]
        with torch.enable_grad():
            loss = student.forward(entering, inputs, targets, partial(self.maps.leave, block), f"block {block}", False)
        if loss.requires_grad:
            student.learner.scaled(loss).backward()  # type: ignore[no-untyped-call]
        student.output = None
        del loss
        middle = self.clock()
        gradients = sum(_bytes(p.grad) for p in student.learner.parameters.values() if p.grad is not None)
        student.step()
        self._note("student", b, number, middle - start)
        self._note("update", b, number, self.clock() - middle)
        return gradients

    def _note(self, what: str, b: int, number: int, seconds: float) -> None:
        if number >= _WARM:
            self.times[what, b][number] += seconds

    def _needed(self, b: int, size: float) -> None:
        if size > self.bytes[b]:  # not where it is unknown
            self.bytes[b] = size

    def _measured(self, b: int) -> Measured:
        low, middle, high = quantiles(self.times["student", b].values(), n=4)
        spread = (high - low) / middle if middle else 0.0
        teacher, update = (median(self.times[what, b].values()) for what in ("teacher", "update"))
        return Measured(teacher, middle, update, spread, self.bytes[b], self.passing[b])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


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
    """Where to measure: the even shares of up to eight ranks, the sizes that plans have; below, powers of two."""
    shares = {-(-batch // k) for k in range(1, min(ranks, _SHARES) + 1)}
    least = -(-batch // ranks)
    powers = {1 << i for i in range(batch.bit_length()) if least <= 1 << i < min(shares)}
    return tuple(sorted({*shares, *powers, least}))


def medians(found: Sequence[Measured]) -> Measured:
    """Of what several equal ranks have measured."""
    return Measured(
        *(
            median(getattr(m, name) for m in found)
            for name in ("teacher", "student", "update", "spread", "saved", "passing")
        )
    )
