"""Which rank trains which blocks on which rows: `Plan`, and the strategies on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..blocks import Split
from ..cluster import Cluster
from ..errors import InputError, nearest
from ..tables import table

Source = Literal["relay", "prefix"]
STRATEGIES = ("auto", "dp", "ls", "tr", "tr+dpu", "ir", "ahd")


@dataclass(frozen=True)
class Assignment:
    """Consecutive `blocks` on a device group.

    Attributes:
        ranks: its replicas; `rows`: each replica's share of a batch of `Plan.batch_size`.
        source: where the teacher's boundary comes from: "relay" (each teacher block runs once, boundaries are passed
            on) or "prefix" (the teacher is run again from the start: DP and LS).
    """

    blocks: tuple[int, ...]
    ranks: tuple[int, ...]
    rows: tuple[int, ...]
    source: Source


@dataclass(frozen=True)
class Plan:
    """A schedule: `strategy` by the paper's name, and who does what, in order."""

    strategy: str
    batch_size: int
    devices: tuple[str, ...]
    assignments: tuple[Assignment, ...]

    def __str__(self) -> str:
        rows = [
            [
                f"{a.blocks[0]}..{a.blocks[-1]}" if len(a.blocks) > 1 else a.blocks[0],
                ", ".join(f"{r} ({self.devices[r]})" for r in a.ranks),
                ", ".join(map(str, a.rows)),
                a.source,
            ]
            for a in self.assignments
        ]
        return f"strategy {self.strategy}, batch size {self.batch_size}\n" + table(
            ["blocks", "ranks", "rows", "teacher"], rows
        )


def plan(split: Split, cluster: Cluster, strategy: str = "auto") -> Plan:
    """The plan for `split` on the one rank of `cluster`.

    Arguments:
        strategy: "tr", "tr+dpu", "ir", "ahd" and "auto" are one schedule on one rank (each teacher block once, then all
            students); "dp" and "ls" train block after block and repeat the teacher's prefix (Pipe-BD, sec. III).

    Errors: InputError for an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise InputError(
            "No such strategy.",
            given=repr(strategy),
            expected=f"one of {', '.join(STRATEGIES)}",
            do=f"perhaps you meant {nearest(str(strategy), STRATEGIES, 1)}",
        )
    rows = (split.student.example.rows,)
    blocks = tuple(range(len(split)))
    if strategy in ("dp", "ls"):
        assignments = tuple(Assignment((b,), (0,), rows, "prefix") for b in blocks)
    else:
        assignments = (Assignment(blocks, (0,), rows, "relay"),)
    return Plan("tr+dpu" if strategy == "auto" else strategy, rows[0], cluster.devices, assignments)
