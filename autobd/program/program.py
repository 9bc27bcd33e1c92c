"""What each rank does in one step: instructions, messages, and the Python functions generated from them."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..planner import Plan
from ..planner.plan import intervals
from .code import generate
from .instruction import Edge, Instruction, Op


def trained_in(block: int, blocks: int, candidates: Sequence[int]) -> list[int]:
    """See `Program.trained_in`."""
    return [block, *(blocks + i for i, own in enumerate(candidates) if own == block)]


_SERIAL = iter(range(1 << 62))


@dataclass(frozen=True)
class Program:
    """One step of every rank.

    Attributes:
        plan: what it was built from.
        edges: the messages of a step.
        inputs: for each assignment of the plan the indices of the teacher's and of the student's input tensors that it
            reads, and of the targets.
        ranks: the instructions of each rank, in an order that respects their `after` edges.
        own_input: student blocks are given the student's own boundary, or a mixture of both.
        own_rows: every rank loads the rows that it reads itself; what rank 0 scatters is only which they are.
        stopped: blocks (and candidates) whose students are not trained any more.
        candidates: the block of each candidate; they are numbered on from the last block.
        batched: indices of the teacher's and of the student's input tensors, and of the targets, that have a row for
            each of the batch.
    """

    plan: Plan
    edges: tuple[Edge, ...]
    inputs: tuple[tuple[tuple[int, ...], ...], ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    own_input: bool = False
    own_rows: bool = False
    batched: tuple[frozenset[int], ...] = (frozenset(), frozenset(), frozenset())
    stopped: frozenset[int] = frozenset()
    candidates: tuple[int, ...] = ()

    @property
    def blocks(self) -> int:
        """How many there are."""
        return sum(len(a.blocks) for a in self.plan.assignments)

    def trained_in(self, block: int) -> list[int]:
        """What is trained in a block: its number, and those of its candidates."""
        return trained_in(block, self.blocks, self.candidates)

    @property
    def targets(self) -> bool:
        """Whether the last block is given the data's targets."""
        return any(given[2] for given in self.inputs)

    @property
    def taught(self) -> bool:
        """Whether the teacher runs."""
        return any(i.op is Op.TEACHER_FORWARD for own in self.ranks for i in own)

    def span(self, rank: int, batch: int) -> tuple[int, int]:
        """First and one-past-last of the rows that `rank` loads of a batch, with `own_rows`. Rank 0 loads the first row
        in any case: by it the others know what rows look like."""
        loading = {i.assignment for i in self.ranks[rank] if i.op is Op.LOAD}
        own = [self.plan.assignments[n] for n in sorted(loading)]
        spans = [intervals(a.rows, batch)[a.ranks.index(rank)] for a in own] + ([(0, 1)] if rank == 0 else [])
        spans = [(a, b) for a, b in spans if a < b]
        return (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0, 0)

    def code(self, rank: int) -> str:
        """The Python source of `rank`'s step: the very function that runs."""
        return generate(self.ranks[rank], rank, self.own_input)

    def compile(self, rank: int) -> Callable[[Any, Any], None]:
        """`step(rank_state, batch)`, compiled from `code(rank)`; a traceback through it shows its lines."""
        source, name = self.code(rank), f"<autobd rank {rank} program {next(_SERIAL)}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        namespace: dict[str, Any] = {}
        exec(compile(source, name, "exec"), namespace)
        step: Callable[[Any, Any], None] = namespace["step"]
        # Frames of a traceback hold on to the code, so that its lines are there as long as anything shows them.
        weakref.finalize(step.__code__, linecache.cache.pop, name, None)
        return step

    def __str__(self) -> str:
        return "\n".join(self.code(rank) for rank in range(len(self.ranks)))
