"""When every rank does what: of a real run, or simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from ..tables import table
from .instruction import WORK, Instruction
from .program import Program


@dataclass(frozen=True)
class Event:
    """One instruction as it ran, or should.

    Attributes:
        rank, step: where, and in which step.
        index: of the instruction in `Program.ranks[rank]`; `instruction`: itself.
        start, end: seconds since the trace began; on a GPU, of its work there.
    """

    rank: int
    step: int
    index: int
    instruction: Instruction
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Message:
    """A message on its way: `edge` is its index in `Program.edges`; `sent` and `arrived` are seconds as in `Event`."""

    edge: int
    step: int
    sent: float
    arrived: float


@dataclass(frozen=True)
class Trace:
    """Steps on one clock: the last ones of a run (64 at most), or the first ones of a simulation.

    Attributes:
        program: what ran; `events`: in the order of their starts; `messages`: by edge and step.
        memory: bytes that each rank has held at most, for its blocks, messages and activations; not a number where the
            system does not tell; empty for a simulation.
    """

    program: Program
    events: tuple[Event, ...]
    messages: tuple[Message, ...]
    memory: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def finished(self) -> dict[int, float]:
        """When the last rank was done with each step that is here whole."""
        ends: dict[int, list[float]] = defaultdict(list)
        for event in self.events:
            ends[event.step].append(event.end)
        whole = sum(map(len, self.program.ranks))
        return {step: max(found) for step, found in sorted(ends.items()) if len(found) == whole}

    @property
    def seconds_per_step(self) -> float:
        """Mean time from one step's end to the next one's."""
        ends = list(self.finished.values())
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else float("nan")

    @property
    def work(self) -> dict[tuple[int, int], float]:
        """Median seconds of a step that each rank works on each block, by (rank, block): teacher and student, without
        updates and messages."""
        spent: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in self.events:
            if event.instruction.op in WORK and event.step in self.finished:
                spent[event.rank, event.instruction.block or 0][event.step] += event.seconds
        return {key: median(steps.values()) for key, steps in spent.items()}

    def __str__(self) -> str:
        if not self.finished:
            return "no whole step"
        ops = list(dict.fromkeys(i.op for own in self.program.ranks for i in own))
        spent: dict[tuple[int, Any], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for event in self.events:
            if event.step in self.finished:
                spent[event.rank, event.instruction.op][event.step] += 1000 * event.seconds
        middle = {key: median(steps.values()) for key, steps in spent.items()}
        ranks = [r for r, own in enumerate(self.program.ranks) if own]
        rows = [[r, *(f"{middle[r, op]:.2f}" if (r, op) in middle else "" for op in ops)] for r in ranks]
        title = (
            f"{len(self.finished)} steps, {1000 * self.seconds_per_step:.2f} ms a step; median ms a step of each rank:"
        )
        return f"{title}\n{table(['rank', *(op.value.replace('_', ' ') for op in ops)], rows)}"
