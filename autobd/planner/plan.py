"""Which rank trains which blocks on which rows: `Plan`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Literal

from ..errors import InputError, PlanError
from ..tables import quantity, table

Source = Literal["relay", "prefix", "store"]
SOURCES = ("relay", "prefix", "store")


@dataclass(frozen=True)
class Assignment:
    """Consecutive `blocks` on a device group.

    Attributes:
        ranks: its replicas; `rows`: each replica's share of a batch of `Plan.batch_size`.
        source: where the teacher's boundary before the first block comes from: "relay" (the assignment that trains the
            block before passes it on), "prefix" (the teacher is run again from the start: DP and LS) or "store" (the
            assignment holds all blocks, so that nothing comes from elsewhere: IR).
        microbatches: a replica's students take its share in so many parts, which hold less memory at a time.
        recompute: activations of the students are computed again in the backward.
    """

    blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    source: Source
    microbatches: int = 1
    recompute: bool = False

    @property
    def replicated(self) -> bool:
        return len(self.ranks) > 1


@dataclass(frozen=True)
class Prediction:
    """What a plan should cost.

    Attributes:
        step: seconds of a step once the pipeline is full; `fill`: from the start until the first one is done.
        busy: seconds of a step that each rank works.
        memory: bytes that each rank holds at most.
    """

    step: float
    fill: float
    busy: tuple[float, ...]
    memory: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """A schedule.

    Attributes:
        strategy: by the paper's name; `assignments`: who does what, in the order in which a rank does it.
        prediction: what it should cost; `bound`: seconds of a step below which no plan can be; `others`: what other
            strategies should take, the fastest first. All of them unknown for a plan written by hand.
    """

    strategy: str
    batch_size: int
    devices: tuple[str, ...]
    assignments: tuple[Assignment, ...]
    prediction: Prediction | None = field(default=None, compare=False)
    bound: float = field(default=0.0, compare=False)
    others: tuple[tuple[str, float], ...] = field(default=(), compare=False)

    @property
    def barrier(self) -> bool:
        """Whether all ranks wait for each other before they update (Pipe-BD's TR without DPU)."""
        return self.strategy == "tr" and len(self.devices) > 1

    @property
    def idle(self) -> tuple[int, ...]:
        """Ranks that have nothing to do."""
        busy = {r for a in self.assignments for r in a.ranks}
        return tuple(r for r in range(len(self.devices)) if r not in busy)

    def blocks_of(self, rank: int) -> str:
        """What a rank trains, as text."""
        return "blocks " + ", ".join(str(b) for a in self.assignments if rank in a.ranks for b in a.blocks)

    @property
    def shares(self) -> set[int]:
        """The numbers of rows that its ranks train at a time."""
        return {-(-rows // a.microbatches) for a in self.assignments for rows in a.rows}

    def to_json(self) -> str:
        """The schedule, to be kept or edited, without what it should cost."""
        assignments = [asdict(a) for a in self.assignments]
        fields = {"strategy": self.strategy, "batch_size": self.batch_size, "devices": self.devices}
        return json.dumps({**fields, "assignments": assignments}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Errors: InputError for anything but a plan; whether it can be run is checked when it is used."""
        try:
            found = json.loads(text)
            assignments = tuple(
                Assignment(
                    tuple(a["blocks"]),
                    tuple(a["ranks"]),
                    tuple(a["rows"]),
                    a["source"],
                    int(a.get("microbatches", 1)),
                    bool(a.get("recompute", False)),
                )
                for a in found["assignments"]
            )
            return cls(str(found["strategy"]), int(found["batch_size"]), tuple(map(str, found["devices"])), assignments)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                "This is no plan.", given=f"{type(error).__name__}: {error}", expected="the text of Plan.to_json()"
            ) from None

    def before(self, assignment: Assignment) -> Assignment | None:
        """The assignment that passes a boundary on to this one; None if it starts from the data."""
        if assignment.source != "relay" or assignment.blocks[0] == 0:
            return None
        return next(a for a in self.assignments if a.blocks[-1] == assignment.blocks[0] - 1)

    def after(self, assignment: Assignment) -> Assignment | None:
        """The assignment that this one passes its boundary on to."""
        return next((a for a in self.assignments if self.before(a) is assignment), None)

    def teacher_blocks(self, assignment: Assignment) -> range:
        """The teacher blocks that an assignment runs: its own, and those before where it has no other source."""
        return range(assignment.blocks[0] if self.before(assignment) else 0, assignment.blocks[-1] + 1)

    def student_before(self, assignment: Assignment) -> Assignment | None:
        """The assignment that passes the student's own boundary on to this one; None before the first block.

        Errors: PlanError if both have some ranks in common but not all, with the same shares.
        """
        first = assignment.blocks[0]
        if first == 0:
            return None
        before = next(a for a in self.assignments if a.blocks[-1] == first - 1)
        same = (before.ranks, before.rows) == (assignment.ranks, assignment.rows)
        if not same and set(before.ranks) & set(assignment.ranks):
            raise PlanError(
                f"The student's own boundary after block {first - 1} cannot be handed over.",
                given=f"ranks {before.ranks} with rows {before.rows}, then {assignment.ranks} with {assignment.rows}",
                expected="the same ranks with the same shares, or other ranks",
                do='use another strategy, or Recipe(block_input="teacher")',
            )
        return before

    def check(self, blocks: int) -> None:
        """Refuse a plan that does not train each of `blocks` blocks exactly once. Errors: PlanError."""
        if not all(a.blocks for a in self.assignments):
            raise PlanError("The plan has an assignment without blocks.", given=[a.blocks for a in self.assignments])
        trained = Counter(b for a in self.assignments for b in a.blocks)
        for block in range(blocks):
            if trained[block] != 1:
                raise PlanError(
                    f"The plan trains block {block} {trained[block]} times.",
                    given=f"blocks {[a.blocks for a in self.assignments]}",
                    expected=f"each of blocks 0 to {blocks - 1} once",
                )
        if set(trained) - set(range(blocks)):
            raise PlanError(
                "The plan names blocks that do not exist.", given=sorted(trained), expected=f"{blocks} blocks"
            )
        for number, a in enumerate(self.assignments):
            self._check_assignment(number, a)

    def _check_assignment(self, number: int, a: Assignment) -> None:
        where = f"Assignment {number} of the plan"
        if a.blocks != tuple(range(a.blocks[0], a.blocks[-1] + 1)):
            raise PlanError(f"{where} has blocks with gaps.", given=a.blocks, expected="consecutive blocks")
        if not a.ranks or len(set(a.ranks)) != len(a.ranks) or not set(a.ranks) <= set(range(len(self.devices))):
            raise PlanError(
                f"{where} has impossible ranks.",
                given=a.ranks,
                expected=f"different numbers from 0 to {len(self.devices) - 1}",
            )
        if len(a.rows) != len(a.ranks) or min(a.rows) < 1 or sum(a.rows) != self.batch_size:
            raise PlanError(
                f"{where}: the shares are not the batch.",
                given=f"rows {a.rows} for ranks {a.ranks}",
                expected=f"one positive share for each rank, {self.batch_size} rows in all",
            )
        if not 1 <= a.microbatches <= min(a.rows):
            raise PlanError(
                f"{where} cannot take its shares in so many parts.",
                given=f"{a.microbatches} microbatches of rows {a.rows}",
                expected="at least one row in each",
            )
        if a.source not in SOURCES or (a.source == "store" and a.blocks[0] != 0):
            raise PlanError(
                f"{where} has an impossible source.",
                given=f"{a.source!r} for blocks from {a.blocks[0]}",
                expected='"relay", "prefix", or "store" for blocks from 0',
            )
        if a.source == "relay" and a.blocks[0] != 0:
            sources = [other for other in self.assignments if other.blocks[-1] == a.blocks[0] - 1]
            if not sources or set(sources[0].ranks) & set(a.ranks):
                raise PlanError(
                    f"{where}: nobody else passes the boundary before block {a.blocks[0]} on.",
                    given=f"ranks {a.ranks}, blocks {a.blocks}",
                    expected=f"an assignment on other ranks that ends at block {a.blocks[0] - 1}",
                    do="join the two assignments, or give this one other ranks",
                )

    def __str__(self) -> str:
        rows = [
            [
                f"{a.blocks[0]}..{a.blocks[-1]}" if len(a.blocks) > 1 else a.blocks[0],
                ", ".join(f"{r} ({self.devices[r]})" for r in a.ranks),
                ", ".join(map(str, a.rows)),
                a.source + _economy(a),
            ]
            for a in self.assignments
        ]
        text = f"strategy {self.strategy}, batch size {self.batch_size}\n" + table(
            ["blocks", "ranks", "rows", "teacher"], rows
        )
        lines = [text]
        if self.prediction is not None:
            step, gap = self.prediction.step, self.prediction.step / self.bound - 1 if self.bound else 0.0
            lines.append(f"predicted {quantity(step, 's')} a step, {gap:.1%} above what any plan needs at least")
            lines += [f"  {name}: {quantity(seconds, 's')}" for name, seconds in self.others]
        idle = ", ".join(map(str, self.idle))
        return "\n".join([*lines, f"note: nothing to do for rank {idle}"] if idle else lines)


def _economy(a: Assignment) -> str:
    """How an assignment saves memory, as text."""
    parts = f", {a.microbatches} microbatches" if a.microbatches > 1 else ""
    return parts + (", activations computed again" if a.recompute else "")


def intervals(rows: Sequence[int], batch: int) -> list[tuple[int, int]]:
    """First and one-past-last row of each share when a batch has `batch` rows: proportional, rounded up, so that the
    first share is the last to be empty; exact for a batch of `sum(rows)`."""
    total, bounds = sum(rows), [0]
    for share in rows:
        bounds.append(bounds[-1] + share)
    return list(pairwise(-(-bound * batch // total) for bound in bounds))


def overlapping(source: Sequence[int], target: Sequence[int]) -> list[tuple[int, int]]:
    """Index pairs of shares of two groups that have rows in common at some batch size: what is handed over between a
    stage and the next one. k to k' replicas take k + k' - gcd(k, k') of them where shares are even."""
    total = sum(source) * sum(target)
    ends = [intervals(rows, total) for rows in (source, target)]
    return [(i, j) for i, (a, b) in enumerate(ends[0]) for j, (c, d) in enumerate(ends[1]) if max(a, c) < min(b, d)]
