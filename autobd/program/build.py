"""`build(plan, split) -> Program`: from a plan to the instructions of every rank.

Rank 0 sends the inputs. For each of its assignments, in the plan's order, a rank loads or receives its rows, runs all
teacher blocks, relays at once, and then trains student after student: forward, backward, all-reduce, update.

    rank 0   load  T0 T1 relay | S0 F B U  S1 F B U | load ...
    rank 1           receive T2 T3 | S2 F B U  S3 F B U | receive ...
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..blocks import Split
from ..errors import PlanError
from ..planner import Assignment, Plan
from ..planner.plan import overlapping
from .check import check
from .instruction import Edge, Instruction, Op
from .program import Program, trained_in


def build(
    plan: Plan,
    split: Split,
    own_input: bool = False,
    own_rows: bool = False,
    targets: bool = False,
    stopped: frozenset[int] = frozenset(),
    taught: bool = True,
) -> Program:
    """The program of a plan, checked.

    Arguments:
        own_input: give each student block the student's own boundary, detached, instead of the teacher's or mixed with
            it; it is relayed beside the teacher's.
        own_rows: every rank loads its own rows; rank 0 only tells the others which.
        targets: the ranks of the last block are given the data's targets.
        stopped: blocks and candidates that are not trained any more: only what others need of them is computed.
        taught: False: the teacher does not run, as the loss is one against the data's targets alone.

    Errors: PlanError for a plan that does not train every block once, or whose ranks would wait for each other.
    """
    plan.check(len(split))
    edges, inputs = _edges(plan, split, own_input, targets, taught)
    together = [set(tie.blocks) for tie in split.ties if tie.together]
    for blocks in together:
        if not any(blocks <= set(a.blocks) for a in plan.assignments):
            raise PlanError(
                f"The plan parts blocks {sorted(blocks)}, which train a weight together.",
                given=f"blocks {[a.blocks for a in plan.assignments]}",
                expected="one assignment for them",
                do='put them in one, or split with ties="first"',
            )
    candidates = tuple(c.block for c in split.candidates)
    ranks = tuple(
        _Builder(plan, rank, edges, inputs, together, own_input, stopped, candidates, taught).run()
        for rank in range(len(plan.devices))
    )
    program = Program(plan, tuple(edges), inputs, ranks, own_input, own_rows, batched(split), stopped, candidates)
    check(program)
    return program


def again(
    program: Program,
    split: Split,
    *,
    plan: Plan | None = None,
    own_input: bool | None = None,
    stopped: frozenset[int] | None = None,
) -> Program:
    """The program anew, with what is given in place of what it had."""
    return build(
        plan or program.plan,
        split,
        program.own_input if own_input is None else own_input,
        program.own_rows,
        program.targets,
        program.stopped if stopped is None else stopped,
        program.taught,
    )


def batched(split: Split) -> tuple[frozenset[int], ...]:
    """See `Program.batched`."""
    examples = [captured.example for captured in (split.teacher, split.student)]
    own = [frozenset(i for i, t in enumerate(e.tensors) if t.ndim and t.shape[0] == e.rows) for e in examples]
    return (*own, frozenset([0]))


Inputs = tuple[tuple[tuple[int, ...], ...], ...]


def _edges(plan: Plan, split: Split, own_input: bool, targets: bool, taught: bool) -> tuple[list[Edge], Inputs]:
    """Every message of a step; and for each assignment the input tensors that it reads, the teacher's, the student's
    and the targets."""
    edges: list[Edge] = []
    inputs = []
    for number, a in enumerate(plan.assignments):
        before = plan.before(a)
        teacher = {i for b in plan.teacher_blocks(a) if taught for i in split.pairs[b].teacher.inputs}
        student = {i for b in a.blocks for i in split.pairs[b].student.inputs}
        wanted = (0,) if targets and len(split) - 1 in a.blocks else ()
        inputs.append((tuple(sorted(teacher)), tuple(sorted(student)), wanted))
        if teacher or student or wanted or before is None:
            edges += [Edge(0, r, "inputs", number, slots=2 + _depth(plan, a)) for r in a.ranks if r != 0]
        if before is not None:
            edges += hand_over(before, a, "teacher", number)
        own = plan.student_before(a) if own_input else None
        if own is not None and (own.ranks, own.rows) != (a.ranks, a.rows):
            edges += hand_over(own, a, "student", number)
    return edges, tuple(inputs)


def hand_over(source: Assignment, target: Assignment, kind: str, number: int) -> list[Edge]:
    """The messages that bring the boundary of one assignment to the next one, which is assignment `number`."""
    return [
        Edge(source.ranks[i], target.ranks[j], kind, number, source.blocks[-1])
        for i, j in overlapping(source.rows, target.rows)
    ]


def _depth(plan: Plan, assignment: Assignment) -> int:
    """How many stages come before an assignment."""
    before = plan.before(assignment)
    return 0 if before is None else 1 + _depth(plan, before)


class _Builder:
    """The instructions of one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        edges: list[Edge],
        inputs: Inputs,
        together: list[set[int]],
        own_input: bool,
        stopped: frozenset[int],
        candidates: tuple[int, ...],
        taught: bool,
    ) -> None:
        self.plan, self.rank, self.edges, self.inputs = plan, rank, edges, inputs
        self.together, self.own_input, self.stopped, self.candidates = together, own_input, stopped, candidates
        self.taught = taught
        self.blocks = sum(len(a.blocks) for a in plan.assignments)
        self.instructions: list[Instruction] = []
        self.student: dict[int, int | None] = {}  # what makes the student's own boundary after a block

    def run(self) -> tuple[Instruction, ...]:
        sent: dict[int, int] = {}
        for number in range(len(self.plan.assignments)):  # at once: no stage waits for what rank 0 trains
            scattered = self._edge_indices("inputs", number, source=self.rank)
            if scattered:
                sent[number] = self.add(Op.SCATTER, None, number, edges=scattered)
        for number, a in enumerate(self.plan.assignments):
            if self.rank in a.ranks:
                self._assignment(number, a, sent.get(number))
        return tuple(self.instructions)

    def add(
        self,
        op: Op,
        block: int | None,
        number: int,
        *after: int | None,
        edges: tuple[int, ...] = (),
        part: int = 0,
        candidate: int | None = None,
    ) -> int:
        needs = tuple(sorted({i for i in after if i is not None}))
        self.instructions.append(
            Instruction(op, block, number, edges, after=needs, microbatch=part, candidate=candidate)
        )
        return len(self.instructions) - 1

    def _edge_indices(
        self,
        kind: str,
        number: int | None = None,
        source: int | None = None,
        target: int | None = None,
        block: int | None = None,
    ) -> tuple[int, ...]:
        return tuple(
            i
            for i, e in enumerate(self.edges)
            if e.kind == kind
            and number in (None, e.assignment)
            and source in (None, e.source)
            and target in (None, e.target)
            and block in (None, e.block)
        )

    def _assignment(self, number: int, a: Assignment, sent: int | None) -> None:
        before, last = self.plan.before(a), a.blocks[-1]
        reads = any(self.inputs[number]) or before is None
        loaded = (
            self.add(Op.LOAD, None, number, sent, edges=self._edge_indices("inputs", number, target=self.rank))
            if reads
            else None
        )
        teacher: dict[int, int | None] = {}
        if before is not None:
            received = self._edge_indices("teacher", number, target=self.rank)
            teacher[before.blocks[-1]] = self.add(Op.RECEIVE, before.blocks[-1], number, edges=received)
        for block in self.plan.teacher_blocks(a) if self.taught else ():
            teacher[block] = self.add(Op.TEACHER_FORWARD, block, number, loaded, teacher.get(block - 1))
        relayed = self._edge_indices("teacher", source=self.rank, block=last)
        if relayed:
            self.add(Op.RELAY, last, number, teacher[last], edges=relayed)
        received = self._edge_indices("student", number, target=self.rank)
        if received:
            block = a.blocks[0] - 1
            self.student[block] = self.add(Op.RECEIVE_STUDENT, block, number, edges=received)
        self._students(number, a, loaded, teacher)

    def _students(self, number: int, a: Assignment, loaded: int | None, teacher: dict[int, int | None]) -> None:
        made = _Made()
        given = self.student if self.own_input else teacher
        for block in a.blocks:
            if self.own_input and block and block - 1 not in given:
                raise PlanError(
                    f"Rank {self.rank} trains block {block} before block {block - 1}, whose own boundary it takes.",
                    given=f"assignments {[a.blocks for a in self.plan.assignments]}",
                    expected="assignments of a rank in the order of their blocks",
                )
            read = loaded, teacher.get(block), given.get(block - 1)
            for trained in trained_in(block, self.blocks, self.candidates):
                self._student(number, a, block, None if trained == block else trained, read, made)
        # Replicas wait for each other once a step: the all-reduce of a block goes on while the next ones compute.
        if self.plan.barrier:
            gate = self.add(Op.BARRIER, None, number, *(i for own in made.gradients.values() for i in own))
            made.gradients = dict.fromkeys(made.gradients, (gate,))
        self._update(number, made)

    def _student(
        self,
        number: int,
        a: Assignment,
        block: int,
        candidate: int | None,
        read: tuple[int | None, ...],
        made: _Made,
    ) -> None:
        """Forward and backward of a block or of a candidate for it."""
        trained = block if candidate is None else candidate
        learns, passes_on = trained not in self.stopped, self.own_input and candidate is None
        if not learns and not passes_on:
            return
        forward = self.add(Op.STUDENT_FORWARD, block, number, *read, candidate=candidate)
        for part in range(1, a.microbatches):  # the parts before are done with, but for the student's own boundary
            done = (
                self.add(Op.STUDENT_BACKWARD, block, number, forward, part=part - 1, candidate=candidate)
                if learns
                else None
            )
            forward = self.add(Op.STUDENT_FORWARD, block, number, *read, done, part=part, candidate=candidate)
        if passes_on and block + 1 < self.blocks:
            self.student[block] = self.add(Op.STUDENT_BOUNDARY, block, number, forward)
            relayed = self._edge_indices("student", source=self.rank, block=block)
            if relayed:
                self.add(Op.RELAY_STUDENT, block, number, self.student[block], edges=relayed)
        if not learns:
            return
        made.backward[trained] = self.add(
            Op.STUDENT_BACKWARD, block, number, forward, part=a.microbatches - 1, candidate=candidate
        )
        made.of[trained] = block, candidate
        whole = [b for b in made.backward if b not in made.gradients and self._with(b) <= set(made.backward)]
        for b in whole:
            needs = tuple(made.backward[tied] for tied in self._with(b))
            if a.replicated:
                needs = (self.add(Op.ALL_REDUCE, made.of[b][0], number, *needs, candidate=made.of[b][1]),)
            made.gradients[b] = needs
        if not self.plan.barrier and not a.replicated:
            self._update(number, made)

    def _with(self, trained: int) -> set[int]:
        """The blocks that add to the gradients of the weights of `trained`."""
        return {trained}.union(*(tied for tied in self.together if trained in tied))

    def _update(self, number: int, made: _Made) -> None:
        """Of all whose gradients are whole by now."""
        for trained, needs in made.gradients.items():
            if trained not in made.updated:
                block, candidate = made.of[trained]
                self.add(Op.UPDATE, block, number, *needs, candidate=candidate)
                made.updated.add(trained)


@dataclass
class _Made:
    """By block or candidate what an assignment's instructions have made so far: where in the list the backward is, and
    what makes the gradients whole."""

    of: dict[int, tuple[int, int | None]] = field(default_factory=dict)  # block and candidate
    backward: dict[int, int] = field(default_factory=dict)
    gradients: dict[int, tuple[int, ...]] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
