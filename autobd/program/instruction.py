"""The instructions that a step of one rank is made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What a rank can do; the values are the names of `Rank`'s methods."""

    LOAD = "load"
    TEACHER_FORWARD = "teacher_forward"
    STUDENT_FORWARD = "student_forward"
    STUDENT_BACKWARD = "student_backward"
    UPDATE = "update"


@dataclass(frozen=True)
class Instruction:
    """One instruction of a rank's step.

    Attributes:
        op: what to do; `block`: on which block (None for Load).
        microbatch, round: which part of the batch, and which of the step's training rounds.
        version: which of the block's weight versions it reads.
        lane: which of the rank's lanes runs it; one lane is straight-line order.
        after: indices, within the rank's instructions, of those that must be done before. The checker and the
            simulator use these edges, not the order of the list.
    """

    op: Op
    block: int | None = None
    microbatch: int = 0
    round: int = 0
    version: int = 0
    lane: int = 0
    after: tuple[int, ...] = ()
