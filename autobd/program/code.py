"""The Python of one rank's step, generated from its instructions."""

from __future__ import annotations

from collections.abc import Sequence

from .instruction import Instruction, Op


def generate(instructions: Sequence[Instruction], rank: int, own_input: bool = False) -> str:
    """Readable Python for one rank. A value is dropped after the last instruction that reads it.

    inputs0  rows of the inputs, of assignment 0      x3  the teacher's boundary after block 3
    loss3    the loss of student block 3              s3  the student's own boundary after block 3
    loss3_7  the loss of candidate 7 for block 3
    """
    loaded = {i.assignment for i in instructions if i.op is Op.LOAD}
    writes = [_writes(i) for i in instructions]
    known = {"batch", *writes}
    wanted = [_reads(i, own_input, i.assignment in loaded) for i in instructions]
    reads = [[name if name in known else "None" for name in names] for names in wanted]
    lines = [f"def step(rank, batch):  # rank {rank}"]
    for position, (instruction, names, result) in enumerate(zip(instructions, reads, writes, strict=True)):
        given = [str(instruction.assignment)] if instruction.block is None else [str(instruction.block)]
        if instruction.edges:
            given.append(repr(instruction.edges))
        elif instruction.op is Op.LOAD:
            given.append("()")
        if instruction.microbatch:
            names = [*names, f"part={instruction.microbatch}"]
        if instruction.candidate is not None:
            names = [*names, f"candidate={instruction.candidate}"]
        call = f"rank.{instruction.op.value}({', '.join([*given, *names])})"
        lines.append(f"    {result} = {call}" if result else f"    {call}")
        own = dict.fromkeys([*reads[position], *([result] if result else [])])
        after = range(position + 1, len(instructions))
        dead = [n for n in own if n not in ("None", "batch") and not _read_next(n, after, reads, writes)]
        if dead and position < len(instructions) - 1:
            lines.append(f"    del {', '.join(dead)}")
    if len(lines) == 1:
        lines.append("    pass")
    return "\n".join(lines) + "\n"


def _read_next(name: str, positions: range, reads: list[list[str]], writes: list[str | None]) -> bool:
    """Whether the value that `name` has is read at one of the positions, before another takes its place."""
    for position in positions:
        if name in reads[position]:
            return True
        if writes[position] == name:
            return False
    return False


def _reads(instruction: Instruction, own_input: bool, loaded: bool) -> list[str]:
    block = instruction.block if instruction.block is not None else -1
    inputs = f"inputs{instruction.assignment}" if loaded else "None"
    match instruction.op:
        case Op.SCATTER | Op.LOAD:
            return ["batch"]
        case Op.TEACHER_FORWARD:
            return [inputs, _boundary("x", block - 1)]
        case Op.STUDENT_FORWARD:
            own = [_boundary("s", block - 1)] if own_input else []
            return [inputs, _boundary("x", block - 1), _boundary("x", block), *own]
        case Op.EVALUATE:
            return [inputs, _boundary("s", block - 1)]
        case Op.OUTPUT:
            return [_boundary("s" if own_input else "x", block)]
        case Op.RELAY:
            return [_boundary("x", block)]
        case Op.RELAY_STUDENT:
            return [_boundary("s", block)]
        case Op.STUDENT_BACKWARD:
            return [_loss(instruction)]
        case _:
            return []


def _writes(instruction: Instruction) -> str | None:
    match instruction.op:
        case Op.LOAD:
            return f"inputs{instruction.assignment}"
        case Op.TEACHER_FORWARD | Op.RECEIVE:
            return f"x{instruction.block}"
        case Op.STUDENT_BOUNDARY | Op.RECEIVE_STUDENT | Op.EVALUATE:
            return f"s{instruction.block}"
        case Op.STUDENT_FORWARD:
            return _loss(instruction)
        case _:
            return None


def _loss(instruction: Instruction) -> str:
    of_candidate = "" if instruction.candidate is None else f"_{instruction.candidate}"
    return f"loss{instruction.block}{of_candidate}"


def _boundary(letter: str, block: int) -> str:
    return f"{letter}{block}" if block >= 0 else "None"
