"""`evaluation(plan, split, of) -> Program`: one whole model, forward, over the ranks that train its blocks.

rank 0   load  S0 S1 relay          (and takes the outputs, beside its program)
rank 1           receive S2 S3 output
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

from ..blocks import Split
from ..planner import Assignment, Plan
from .build import Inputs, batched, hand_over
from .check import check
from .instruction import Edge, Instruction, Op
from .program import Program

Model = Literal["teacher", "student"]


def evaluation(plan: Plan, split: Split, of: Model) -> Program:
    """The program that runs the teacher, or the student on its own boundaries, in the stages of `plan`."""
    stages = sorted(plan.assignments, key=lambda a: a.blocks)
    if any(not _same(a, b) and set(a.ranks) & set(b.ranks) for a, b in pairwise(stages)):
        stages = [replace(a, ranks=a.ranks[:1], rows=(plan.batch_size,)) for a in stages]  # nobody sends to itself
    edges: list[Edge] = []
    inputs = []
    for number, a in enumerate(stages):
        read = {i for b in a.blocks for i in getattr(split.pairs[b], of).inputs}
        inputs.append((tuple(sorted(read)), (), ()) if of == "teacher" else ((), tuple(sorted(read)), ()))
        if read or number == 0:
            edges += [Edge(0, r, "inputs", number, slots=2 + number) for r in a.ranks if r != 0]
        if number and not _same(stages[number - 1], a):
            edges += hand_over(stages[number - 1], a, of, number)
    forward = replace(plan, strategy=f"{of} forward", assignments=tuple(stages), prediction=None)
    ranks = tuple(_instructions(forward, rank, edges, tuple(inputs), of) for rank in range(len(plan.devices)))
    program = Program(forward, tuple(edges), tuple(inputs), ranks, of == "student", False, batched(split))
    check(program)
    return program


def _same(a: Assignment, b: Assignment) -> bool:
    return (a.ranks, a.rows) == (b.ranks, b.rows)


def _instructions(plan: Plan, rank: int, edges: list[Edge], inputs: Inputs, of: Model) -> tuple[Instruction, ...]:
    teacher = of == "teacher"
    found: list[Instruction] = []

    def add(op: Op, block: int | None, number: int, sent: tuple[int, ...] = ()) -> None:
        found.append(Instruction(op, block, number, sent, after=(len(found) - 1,) if found else ()))

    def indices(kind: str, number: int, end: str) -> tuple[int, ...]:
        return tuple(
            i for i, e in enumerate(edges) if e.kind == kind and e.assignment == number and getattr(e, end) == rank
        )

    for number in range(len(plan.assignments)):
        if sent := indices("inputs", number, "source"):
            add(Op.SCATTER, None, number, sent)
    for number, a in enumerate(plan.assignments):
        if rank not in a.ranks:
            continue
        if any(inputs[number]) or number == 0:
            add(Op.LOAD, None, number, indices("inputs", number, "target"))
        if received := indices(of, number, "target"):
            add(Op.RECEIVE if teacher else Op.RECEIVE_STUDENT, a.blocks[0] - 1, number, received)
        for block in a.blocks:
            add(Op.TEACHER_FORWARD if teacher else Op.EVALUATE, block, number)
        if relayed := indices(of, number + 1, "source"):
            add(Op.RELAY if teacher else Op.RELAY_STUDENT, a.blocks[-1], number, relayed)
        if number == len(plan.assignments) - 1:
            add(Op.OUTPUT, a.blocks[-1], number)
    return tuple(found)
