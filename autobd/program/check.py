"""Refuse a program whose ranks would not fit together: run before anything starts."""

from __future__ import annotations

from collections import Counter, deque

from ..errors import PlanError
from .instruction import RECEIVES, SENDS, Instruction, Op
from .program import Program

_GATES = (Op.ALL_REDUCE, Op.BARRIER)


def check(program: Program) -> None:
    """Every message is sent and taken once a step, replicas reduce the same blocks in the same order, nobody waits for
    ever. Errors: PlanError that names the rank and the instruction."""
    for index, edge in enumerate(program.edges):
        for rank, what in ((edge.source, "sends"), (edge.target, "takes")):
            count = sum(index in i.edges and _sends(i) == (what == "sends") for i in program.ranks[rank])
            if count != 1:
                raise PlanError(
                    f"Rank {rank} {what} message {index} {count} times a step.", given=edge, expected="exactly once"
                )
    for number, assignment in enumerate(program.plan.assignments):
        orders = {
            tuple(i.trains for i in program.ranks[r] if i.op is Op.ALL_REDUCE and i.assignment == number)
            for r in assignment.ranks
        }
        if len(orders) != 1:
            raise PlanError(f"The replicas of assignment {number} reduce in different orders.", given=orders)
    for rank, instructions in enumerate(program.ranks):
        for position, instruction in enumerate(instructions):
            if any(earlier >= position for earlier in instruction.after):
                raise PlanError(f"Rank {rank}: instruction {position} comes before what it needs.", given=instruction)
    gates = {r: sum(i.op is Op.BARRIER for i in own) for r, own in enumerate(program.ranks) if own}
    if len({count for count in gates.values() if count}) > 1:
        raise PlanError(
            "The ranks of this plan would wait for each other for ever: they come to different numbers of barriers.",
            given=", ".join(f"rank {r}: {count}" for r, count in gates.items()),
            expected='as many assignments on every rank that trains, under "tr"',
            do='join the assignments of a rank, or use "tr+dpu", which has no barrier',
        )
    _run(program, 3 + max((e.slots for e in program.edges), default=0))


def _sends(instruction: Instruction) -> bool:
    return instruction.op in SENDS


def _run(program: Program, steps: int) -> None:
    """Run `steps` steps with no computation: a sender waits while an edge's slots are full, a receiver while it is
    empty, an update until the replicas have all joined its all-reduce."""
    queued = Counter[int]()
    joined = Counter[tuple[int, ...]]()  # (step, gate) -> ranks
    todo = {
        rank: deque((step, i) for step in range(steps) for i in instructions)
        for rank, instructions in enumerate(program.ranks)
    }

    def ready(rank: int, step: int, instruction: Instruction) -> bool:
        if _sends(instruction):
            return all(queued[e] < program.edges[e].slots for e in instruction.edges)
        if instruction.op in RECEIVES or instruction.op is Op.LOAD:
            return all(queued[e] > 0 for e in instruction.edges)
        if instruction.op is Op.UPDATE:
            gates = [program.ranks[rank][i] for i in instruction.after if program.ranks[rank][i].op in _GATES]
            return all(joined[_gate(step, g)] == _members(program, g) for g in gates)
        return True

    moved = True
    while moved:
        moved = False
        for rank, left in todo.items():
            while left and ready(rank, *left[0]):
                step, instruction = left.popleft()
                moved = True
                if instruction.op in _GATES:
                    joined[_gate(step, instruction)] += 1
                for edge in instruction.edges:
                    queued[edge] += 1 if _sends(instruction) else -1
    stuck = {rank: left[0][1] for rank, left in todo.items() if left}
    if stuck:
        raise PlanError(
            "The ranks of this plan would wait for each other for ever.",
            given="; ".join(f"rank {r} at {i.op.value} of block {i.block}" for r, i in stuck.items()),
            expected="a plan in which every message comes from an assignment that does not wait for its receiver",
        )


def _gate(step: int, gate: Instruction) -> tuple[int, ...]:
    return (step, -1 if gate.op is Op.BARRIER else gate.assignment, -1 if gate.trains is None else gate.trains)


def _members(program: Program, gate: Instruction) -> int:
    if gate.op is Op.BARRIER:
        return sum(any(i.op is Op.BARRIER for i in instructions) for instructions in program.ranks)
    return len(program.plan.assignments[gate.assignment].ranks)
