"""`build(plan, split) -> Program`: what each rank does in one step, and the Python function generated from it."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..blocks import Split
from ..planner import Plan
from .instruction import Instruction, Op

_SERIAL = iter(range(1 << 62))


@dataclass(frozen=True)
class Program:
    """The instructions of each rank, in an order that respects their `after` edges."""

    ranks: tuple[tuple[Instruction, ...], ...]

    def code(self, rank: int) -> str:
        """The Python source of `rank`'s step: the very function that runs."""
        return generate(self.ranks[rank], rank)

    def compile(self, rank: int) -> Callable[[Any, Any], None]:
        """`step(rank_state, batch)`, compiled from `code(rank)`; a traceback through it shows its lines."""
        source, name = self.code(rank), f"<autobd rank {rank} program {next(_SERIAL)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {}
        exec(compile(source, name, "exec"), namespace)
        return namespace["step"]

    def __str__(self) -> str:
        return "\n".join(self.code(rank) for rank in range(len(self.ranks)))


def build(plan: Plan, split: Split) -> Program:
    """The program of a plan: for each assignment the teacher's blocks first, then every student block's forward,
    backward and own update (decoupled: no barrier between them, but where blocks train a weight together)."""
    instructions: list[Instruction] = []

    def add(op: Op, block: int | None, *after: int) -> int:
        instructions.append(Instruction(op, block, after=after))
        return len(instructions) - 1

    together = [set(tie.blocks) for tie in split.ties if tie.together]
    backward: dict[int, int] = {}
    updated: dict[int, int] = {}
    for assignment in plan.assignments:
        loaded = add(Op.LOAD, None)
        teacher: dict[int, int] = {}
        last = assignment.blocks[-1]
        for block in range(last + 1):
            teacher[block] = add(Op.TEACHER_FORWARD, block, loaded if block == 0 else teacher[block - 1])
        for block in assignment.blocks:
            needs = {loaded, teacher[block], *([teacher[block - 1]] if block else [])}
            forward = add(Op.STUDENT_FORWARD, block, *sorted(needs))
            backward[block] = add(Op.STUDENT_BACKWARD, block, forward)
            for ready in sorted(set(backward) - set(updated)):  # what trains a weight together updates after all of it
                waits_for = {ready}.union(*(tied for tied in together if ready in tied))
                if waits_for <= set(backward):
                    updated[ready] = add(Op.UPDATE, ready, *sorted(backward[b] for b in waits_for))
    assert sorted(updated) == list(range(len(split))), "a plan trains every block once"
    return Program((tuple(instructions),))


def generate(instructions: tuple[Instruction, ...], rank: int) -> str:
    """Readable Python for one rank. A boundary is dropped after the last instruction that reads it.

    x3  the teacher's boundary after block 3        loss3  the loss of student block 3
    """
    reads = [_reads(i) for i in instructions]
    lines = [f"def step(rank, batch):  # rank {rank}"]
    for position, (instruction, names) in enumerate(zip(instructions, reads, strict=True)):
        result = _writes(instruction)
        arguments = ", ".join([*([str(instruction.block)] if instruction.block is not None else []), *names])
        call = f"rank.{instruction.op.value}({arguments})"
        lines.append(f"    {result} = {call}" if result else f"    {call}")
        later = {
            n
            for other, n2 in zip(instructions[position + 1 :], reads[position + 1 :], strict=True)
            for n in (*n2, *([_writes(other)] if _writes(other) else []))
        }
        dead = [
            n
            for n in dict.fromkeys([*names, *([result] if result else [])])
            if n not in later and n not in ("None", "batch")
        ]
        if dead and position < len(instructions) - 1:
            lines.append(f"    del {', '.join(dead)}")
    return "\n".join(lines) + "\n"


def _boundary(block: int) -> str:
    return f"x{block}" if block >= 0 else "None"


def _reads(instruction: Instruction) -> list[str]:
    block = instruction.block if instruction.block is not None else -1
    match instruction.op:
        case Op.LOAD:
            return ["batch"]
        case Op.TEACHER_FORWARD:
            return ["inputs", _boundary(block - 1)]
        case Op.STUDENT_FORWARD:
            return ["inputs", _boundary(block - 1), _boundary(block)]
        case Op.STUDENT_BACKWARD:
            return [f"loss{block}"]
        case Op.UPDATE:
            return []


def _writes(instruction: Instruction) -> str | None:
    match instruction.op:
        case Op.LOAD:
            return "inputs"
        case Op.TEACHER_FORWARD:
            return f"x{instruction.block}"
        case Op.STUDENT_FORWARD:
            return f"loss{instruction.block}"
        case _:
            return None
