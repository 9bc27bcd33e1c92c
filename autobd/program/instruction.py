"""The instructions that a step of one rank is made of, and the edges that messages travel on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Op(Enum):
    """What a rank can do; the values are the names of `Rank`'s methods."""

    SCATTER = "scatter"  # the rank that loads: input rows to other ranks
    LOAD = "load"
    RECEIVE = "receive"  # the teacher's boundary
    RECEIVE_STUDENT = "receive_student"
    TEACHER_FORWARD = "teacher_forward"
    RELAY = "relay"
    STUDENT_FORWARD = "student_forward"
    STUDENT_BOUNDARY = "student_boundary"
    RELAY_STUDENT = "relay_student"
    STUDENT_BACKWARD = "student_backward"
    ALL_REDUCE = "all_reduce"
    BARRIER = "barrier"
    UPDATE = "update"
    EVALUATE = "evaluate"  # a student block as it will be used
    OUTPUT = "output"  # of the whole model, to the rank that calls


SENDS = (Op.SCATTER, Op.RELAY, Op.RELAY_STUDENT)
WORK = (Op.TEACHER_FORWARD, Op.STUDENT_FORWARD, Op.STUDENT_BACKWARD)
RECEIVES = (Op.RECEIVE, Op.RECEIVE_STUDENT)  # and LOAD, on ranks that do not read the data


@dataclass(frozen=True)
class Edge:
    """Where one message a step goes.

    Attributes:
        source, target: ranks.
        kind: "inputs" (rows of the model's inputs), "teacher" or "student" (rows of a boundary).
        assignment: number of the assignment that takes the message; `block`: the one that made the boundary.
        slots: messages that may be under way before the sender waits: two, and one more for each stage that the
            message skips (it then overtakes that many steps).
    """

    source: int
    target: int
    kind: str
    assignment: int
    block: int | None = None
    slots: int = 2


@dataclass(frozen=True)
class Instruction:
    """One instruction of a rank's step.

    Attributes:
        op: what to do; `block`: on which block (None for Scatter, Load and Barrier).
        assignment: for which assignment of the plan.
        edges: indices into `Program.edges` of the messages that it sends or receives.
        microbatch, round: which part of the batch, and which of the step's training rounds.
        version: which of the block's weight versions it reads.
        candidate: number of the candidate that a student's instruction is about (see `Program.candidates`); None: the
            student's own block.
        lane: which of the rank's lanes runs it; one lane is straight-line order.
        after: indices, within the rank's instructions, of those that must be done before. The checker and the
            simulator use these edges, not the order of the list.
    """

    op: Op
    block: int | None = None
    assignment: int = 0
    edges: tuple[int, ...] = ()
    microbatch: int = 0
    round: int = 0
    version: int = 0
    lane: int = 0
    after: tuple[int, ...] = ()
    candidate: int | None = None

    @property
    def trains(self) -> int | None:
        """What a student's instruction is about: number of a block or candidate."""
        return self.block if self.candidate is None else self.candidate
