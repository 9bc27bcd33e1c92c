"""One rank: its blocks, optimizers and normalisers, and what each instruction does with them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..blocks.verify import set_mode
from ..errors import AutobdError, LossError, RankError
from ..parts.channels import ChannelMaps
from ..parts.form import Form
from ..parts.part import Part, StudentPart, held_bytes, on_device
from ..parts.randomness import keyed, student_seed
from ..parts.student import BlockState, ShareLosses, Student
from ..planner.plan import intervals
from ..program import Op, Program
from ..ranks import Header, Lost, Peers
from ..ranks.memory import Peak
from ..recipe.losses import mean_square, precise
from .exchange import Boundary, Exchange, Inputs, as_sent
from .reduce import AllReduce, GradientSum
from .trace import Tape


class Rank(Exchange):
    """State of a rank over a run; the methods are the instructions that generated programs call.

    Arguments:
        number: which rank; `program`: what all of them do.
        parts: the block pairs that this rank runs, with students where it trains them.
        seed: as for `distill`.
        peers: the way to the other ranks.
        states: what blocks go on from that have been trained before.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        parts: Mapping[int, Part],
        seed: int,
        peers: Peers,
        states: Mapping[int, BlockState] | None = None,
    ) -> None:
        super().__init__(number, program, on_device(parts, peers.device), peers)
        self._held, self._peak = held_bytes(self.parts), Peak(peers.device)
        self.seed = seed
        students = {b: part.student for b, part in self.parts.items() if part.student is not None}
        like = _like(students)
        self.students = {b: Student(s, like) for b, s in students.items()}
        self.maps = ChannelMaps({b: (s.before, s.behind) for b, s in students.items()}, like)
        for block, student in self.students.items():
            student.train_too(self.maps.of_block(block))
            if states and block in states:
                student.go_on(states[block], self.maps.tensors(block))
        _set_modes(self.parts)
        self.sums: dict[int, GradientSum] = {}
        self._reducers: dict[int, AllReduce] = {
            n: peers.reducer(a.ranks)
            for n, a in enumerate(program.plan.assignments)
            if a.replicated and number in a.ranks
        }
        gated = [r for r, own in enumerate(program.ranks) if any(i.op is Op.BARRIER for i in own)]
        self._gate = peers.reducer(gated) if number in gated and len(gated) > 1 else None
        self._forms = {0: self.parts}
        self.at: int | None = None
        self._tape = Tape(len(program.ranks[number]), self.device)

    # ---------------------------------------------------------------- a step

    def begin(self, header: Header) -> None:
        """Start a step: its number, the batch's rows and sizes, and every block's learning rate."""
        if header.sizes != self.header.sizes:
            self.parts = self._forms[header.sizes]
            for block, student in self.students.items():
                student.take(self.parts[block])
        super().begin(header)
        for student in self.students.values():
            student.set_rate(header.progress)

    def knows(self, sizes: int) -> bool:
        """Whether the rank has blocks for the inputs' sizes of this number."""
        return sizes in self._forms

    def learn(self, sizes: int, forms: Mapping[int, Form]) -> None:
        """Take blocks for other sizes of inputs."""
        self._forms[sizes] = {block: forms[block].of(part) for block, part in self._forms[0].items()}
        _set_modes(self._forms[sizes])

    def run(self, step: Any, batch: Any) -> None:
        """Run the generated function. Errors: AutobdError as it is; others as RankError that names block and step."""
        torch.clear_autocast_cache()  # weights as they were cast before the last update
        try:
            step(self._tape.timed(self), batch)
        except (AutobdError, Lost):
            raise
        except Exception as error:
            raise RankError(
                f"{self._where(self.at)}: {type(error).__name__}: {error}", do="see the error above for where it began"
            ) from error

    def finish_step(self) -> dict[int, ShareLosses]:
        """The step's losses of the rank's own blocks. Errors: NonFiniteError naming rank, block, step, and whether the
        teacher is the cause."""
        blocks = list(self.students.items())
        if not blocks:
            return {}
        noted = [t for _, s in blocks for t in (*s.sums(), s.norm)]
        if self.device.type == "cpu":
            values = [t.item() for t in noted]
        else:  # one copy for all
            values = torch.stack([t.to(self.device, torch.float64) for t in noted]).tolist()
        found = {}
        for i, (block, student) in enumerate(blocks):
            loss, relative, norm = values[3 * i : 3 * i + 3]
            found[block] = student.share(loss, relative, norm, partial(self._where, block))
        return found

    def times(self) -> Tensor:
        """When the last steps' instructions ran and their messages were sent and came (see `trace.joined`)."""
        sent = [(e, *seen) for e, sender in self.links.senders.items() for seen in sender.sent]
        arrived = [(e, *seen) for e, end in self.links.receivers.items() for seen in end.arrived]
        return self._tape.rows(sent, arrived, self._held + self._peak.bytes)

    # ---------------------------------------------------------------- instructions

    def teacher_forward(self, block: int, inputs: Inputs | None, boundary: Boundary | None) -> Boundary | None:
        """The tensors that cross the cut behind the teacher's block."""
        self.at = block
        if _nothing(block, inputs, boundary):
            return None
        part = self.parts[block]
        with torch.no_grad():
            given = [] if inputs is None or inputs.teacher is None else [inputs.teacher[i] for i in part.inputs]
            output: Boundary = part.teacher(*(boundary or ()), *given)
            return as_sent(output)

    def student_forward(
        self, block: int, inputs: Inputs | None, boundary: Boundary | None, target: Boundary | None, part: int = 0
    ) -> Tensor | None:
        """The loss of the student block against the teacher's next boundary `target`; None without rows.

        Arguments:
            boundary: the teacher's, or with `Program.own_input` the student's own.
            part: which of the assignment's microbatches.
        """
        self.at = block
        student, a = self.students[block], self.program.plan.assignments[self.assignment[block]]
        first, last = self.rows(self.assignment[block], self.number)
        own = intervals((1,) * a.microbatches, last - first)[part]
        if part == 0:
            student.begin()
            if student.normalisers is None:
                with torch.no_grad():
                    student.normalisers = self._normalisers(block, self._targets(student, target), last - first)
        student.weight = (own[1] - own[0]) / max(self.header.batch, 1)
        if target is None or own[0] == own[1]:
            return None
        if a.microbatches > 1:
            inputs, boundary, target = self._part(own, last - first, inputs, boundary, target)
        with torch.no_grad():
            targets = self._targets(student, target)
        share = a.ranks.index(self.number) * a.microbatches + part
        seed = student_seed(self.seed, self.header.step, block, share=share)
        draw = keyed(seed, self.device, student.part.draws_python) if student.part.draws else nullcontext()
        with torch.enable_grad(), draw:
            given = [] if inputs is None or inputs.student is None else [inputs.student[i] for i in student.part.inputs]
            leave, where = partial(self.maps.leave, block), self._where(block)
            split = a.replicated or a.microbatches > 1
            loss = student.forward(self._entering(block, boundary), given, targets, leave, where, split)
        if self.program.own_input:
            student.keep()
        return loss

    def student_boundary(self, block: int) -> Boundary | None:
        """The student's own tensors behind the block, detached, for the next block to work on."""
        student = self.students[block]
        outputs = student.kept()
        if outputs is None:
            return None
        with torch.no_grad():
            return as_sent(
                [self.maps.leave(block, i, t) if i in student.part.distilled else t for i, t in enumerate(outputs)]
            )

    def student_backward(self, block: int, loss: Tensor | None, part: int = 0) -> None:
        """Gradients of the block's own weights, of the mean over the whole batch."""
        self.at = block
        student = self.students[block]
        student.output = None
        trains = bool(student.parameters) or student.part.tied
        if loss is None or not trains or not student.learns:
            return
        if not loss.requires_grad:
            raise LossError(
                f"{self._where(block)}: the loss does not depend on the student's parameters.",
                given="a loss without gradient",
                expected="a differentiable function of its first argument",
            )
        if student.weight != 1.0:
            loss = loss * student.weight
        loss.backward()  # type: ignore[no-untyped-call]

    def all_reduce(self, block: int) -> None:
        """Begin to sum the block's gradients over its replicas."""
        self.sums[block] = GradientSum(self.students[block].parameters, self._reducers[self.assignment[block]])

    def barrier(self, assignment: int) -> None:
        """Wait for all ranks that train."""
        if self._gate is not None:
            self._gate([torch.zeros(1, device=self.device)]).result(self.peers.patience)

    def update(self, block: int) -> None:
        """Clip, step and forget the gradients of this block alone."""
        self.at = block
        if block in self.sums:
            self.sums.pop(block).finish(self.peers)
        self.students[block].step()

    # ---------------------------------------------------------------- between epochs

    def trained(self) -> dict[str, Tensor]:
        """What training has changed, of the blocks whose first replica this is: tensors by their keys in the student,
        and channel maps."""
        found: dict[str, Tensor] = {}
        for block, student in self._leading():
            found |= {key: t.detach() for key, t in student.tensors.items()}
            found |= {name: t.detach() for name, t in self.maps.tensors(block).items()}
        return found

    def states(self) -> dict[int, BlockState]:
        """What the same blocks are trained on from elsewhere, beside their weights."""
        return {block: student.state(self.maps.tensors(block)) for block, student in self._leading()}

    def _leading(self) -> list[tuple[int, Student]]:
        first = [a.ranks[0] for a in self.program.plan.assignments]
        return [(b, s) for b, s in self.students.items() if first[self.assignment[b]] == self.number]

    def refresh(self, values: Mapping[str, Tensor]) -> None:
        """Bring copies of weights that an earlier block trains up to date."""
        with torch.no_grad():
            for student in self.students.values():
                for key, copy in student.stale.items():
                    copy.copy_(values[key])

    # ----------------------------------------------------------------

    def _normalisers(self, block: int, targets: list[Tensor], rows: int) -> list[Tensor]:
        """The mean square of each distilled tensor over the first batch, whoever holds its rows; `rows` are here."""
        student, number = self.students[block], self.assignment[block]
        if number not in self._reducers:
            return [mean_square(t) for t in targets]
        sums = torch.zeros(len(student.part.distilled), dtype=torch.float64, device=self.device)
        for i, t in enumerate(targets):
            sums[i] = t.double().square().mean() * (rows / max(self.header.batch, 1))
        self._reducers[number]([sums]).result(self.peers.patience)
        return [torch.where(s > 0, s, torch.ones_like(s)) for s in sums]

    def _targets(self, student: Student, target: Boundary | None) -> list[Tensor]:
        """What the student is to give, of the teacher's next boundary."""
        return [] if target is None else [precise(student.behind[i](target[i])) for i in student.part.distilled]

    def _part(
        self, own: tuple[int, int], share: int, inputs: Inputs | None, boundary: Boundary | None, target: Boundary
    ) -> tuple[Inputs | None, Boundary | None, Boundary]:
        """The rows `own` of this rank's share, which has so many."""

        def rows(tensor: Tensor) -> Tensor:
            folded = len(tensor) // share
            return tensor[own[0] * folded : own[1] * folded]

        if inputs is not None and inputs.student is not None:
            batched = self.program.batched[1]
            inputs = Inputs(None, {i: rows(t) if i in batched else t for i, t in inputs.student.items()})
        return inputs, None if boundary is None else tuple(map(rows, boundary)), tuple(map(rows, target))

    def _entering(self, block: int, boundary: Boundary | None) -> Boundary:
        """The boundary before `block` as the student's block takes it."""
        if boundary is None:
            return ()
        if not self.program.own_input:
            boundary = tuple(a(t) for a, t in zip(self.students[block].before, boundary, strict=True))
        return tuple(self.maps.enter(block, i, t) for i, t in enumerate(boundary))

    def _where(self, block: int | None) -> str:
        what = "" if block is None else f", block {block} ({self.parts[block].where})"
        return f"Rank {self.number}{what}, step {self.header.step}"


def _nothing(block: int, inputs: Inputs | None, boundary: Boundary | None) -> bool:
    """Whether a share has no rows in this batch."""
    return boundary is None if block else inputs is None or inputs.teacher is None


def _set_modes(parts: Mapping[int, Part]) -> None:
    set_mode([p.teacher for p in parts.values()], False)
    students = [p.student for p in parts.values() if p.student is not None]
    set_mode([module for s in students for module in s.modules], True)


def _like(students: Mapping[int, StudentPart]) -> Tensor:
    parameters = [p for s in students.values() for p in s.module.parameters() if p.is_floating_point()]
    return next(iter(parameters), torch.zeros(()))
