"""What the blocks of a rank compute in a step: the instructions that are not about messages."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import AutobdError, LossError, RankError
from ..parts.channels import ChannelMaps
from ..parts.randomness import keyed, student_seed
from ..parts.student import Student
from ..planner.plan import intervals
from ..ranks import Lost
from ..recipe.losses import mean_square, precise
from .exchange import Boundary, Exchange, Inputs, as_sent
from .reduce import AllReduce, GradientSum


class Work(Exchange):
    """The methods that generated programs call, on the rows that a rank holds.

    Attributes:
        seed: as for `distill`; `students`: in training, by block or candidate; `maps`: their channel maps.
        sums: gradients on their way to and from replicas, likewise; `reducers`: by assignment.
        gate: waits for all ranks that train; None: there is nobody to wait for.
        at: the block that is under way.
    """

    seed: int
    students: dict[int, Student]
    maps: ChannelMaps
    sums: dict[int, GradientSum]
    reducers: dict[int, AllReduce]
    gate: AllReduce | None
    at: int | None

    def perform(self, step: Any, rank: Any, batch: Any) -> None:
        """Run a generated function on `rank`, which stands for this one. Errors: AutobdError as it is; others as
        RankError that names block and step."""
        try:
            step(rank, batch)
        except (AutobdError, Lost):
            raise
        except Exception as error:
            raise RankError(
                f"{self._where(self.at)}: {type(error).__name__}: {error}", do="see the error above for where it began"
            ) from error

    def teacher_forward(self, block: int, inputs: Inputs | None, boundary: Boundary | None) -> Boundary | None:
        """The tensors that cross the cut behind the teacher's block."""
        self.at = block
        if _nothing(block, inputs, boundary):
            return None
        part = self.parts[block]
        given = [] if inputs is None or inputs.teacher is None else [inputs.teacher[i] for i in part.inputs]
        return as_sent(part.teach(*(boundary or ()), *given))

    def student_forward(
        self,
        block: int,
        inputs: Inputs | None,
        boundary: Boundary | None,
        target: Boundary | None,
        own_boundary: Boundary | None = None,
        part: int = 0,
        candidate: int | None = None,
    ) -> Tensor | None:
        """The loss of the student block against the teacher's next boundary `target`; None without rows.

        Arguments:
            target: None: the loss is one against the data's targets alone.
            boundary: the teacher's before the block; `own_boundary`: the student's own, with `Program.own_input`.
            part: which of the assignment's microbatches.
            candidate: the one for the block that is trained; None: the student's own.
        """
        trained = self.at = block if candidate is None else candidate
        student, a = self.students[trained], self.program.plan.assignments[self.assignment[block]]
        first, last = self.rows(self.assignment[block], self.number)
        own = intervals((1,) * a.microbatches, last - first)[part]
        if part == 0:
            student.begin()
            if student.normalisers is None:
                with torch.no_grad():
                    student.normalisers = self._normalisers(
                        student, block, self._targets(student, target), last - first
                    )
        student.weight = (own[1] - own[0]) / max(self.header.batch, 1)
        if own[0] == own[1]:
            return None
        if a.microbatches > 1:
            inputs, boundary, target, own_boundary = self._part(
                own, last - first, inputs, boundary, target, own_boundary
            )
        with torch.no_grad():
            targets = self._targets(student, target)
        share = a.ranks.index(self.number) * a.microbatches + part
        seed = student_seed(self.seed, self.header.step, block, share=share)
        draw = keyed(seed, self.device, student.part.draws_python) if student.part.draws else nullcontext()
        with torch.enable_grad(), draw:
            given = [] if inputs is None or inputs.student is None else [inputs.student[i] for i in student.part.inputs]
            leave, where = partial(self.maps.leave, block), self._where(trained)
            split = a.replicated or a.microbatches > 1
            labels = inputs.targets if inputs is not None and student.recipe.target_loss is not None else None
            entering = self._entering(student, block, boundary, own_boundary)
            loss = student.forward(entering, given, targets, leave, where, split, labels)
        if self.program.own_input and candidate is None:
            student.keep()
        if student.rests:
            student.put_back()
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

    def student_backward(self, block: int, loss: Tensor | None, part: int = 0, candidate: int | None = None) -> None:
        """Gradients of the block's own weights, of the mean over the whole batch."""
        trained = self.at = block if candidate is None else candidate
        student = self.students[trained]
        student.output = None
        trains = bool(student.learner.parameters) or student.part.tied
        if loss is None or not trains or not student.learns:
            return
        if not loss.requires_grad:
            raise LossError(
                f"{self._where(trained)}: the loss does not depend on the student's parameters.",
                given="a loss without gradient",
                expected="a differentiable function of its first argument",
            )
        if student.weight != 1.0:
            loss = loss * student.weight
        student.learner.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def all_reduce(self, block: int, candidate: int | None = None) -> None:
        """Begin to sum the block's gradients over its replicas."""
        trained = block if candidate is None else candidate
        learner = self.students[trained].learner
        if learner.due:
            self.sums[trained] = GradientSum(list(learner.parameters.values()), self.reducers[self.assignment[block]])

    def barrier(self, assignment: int) -> None:
        """Wait for all ranks that train."""
        if self.gate is not None:
            self.gate([torch.zeros(1, device=self.device)]).result(self.peers.patience)

    def update(self, block: int, candidate: int | None = None) -> None:
        """Clip, step and forget the gradients of this block alone."""
        trained = self.at = block if candidate is None else candidate
        if trained in self.sums:
            self.sums.pop(trained).finish(self.peers)
        self.students[trained].step()

    # ----------------------------------------------------------------

    def _normalisers(self, student: Student, block: int, targets: list[Tensor], rows: int) -> list[Tensor]:
        """The mean square of each distilled tensor over the first batch, whoever holds its rows; `rows` are here."""
        number = self.assignment[block]
        if number not in self.reducers:
            return [mean_square(t) for t in targets]
        sums = torch.zeros(len(student.part.distilled), dtype=torch.float64, device=self.device)
        for i, t in enumerate(targets):
            sums[i] = t.double().square().mean() * (rows / max(self.header.batch, 1))
        self.reducers[number]([sums]).result(self.peers.patience)
        return [torch.where(s == 0, torch.ones_like(s), s) for s in sums]

    def _targets(self, student: Student, target: Boundary | None) -> list[Tensor]:
        """What the student is to give, of the teacher's next boundary."""
        return [] if target is None else [precise(student.behind[i](target[i])) for i in student.part.distilled]

    def _part(
        self,
        own: tuple[int, int],
        share: int,
        inputs: Inputs | None,
        *boundaries: Boundary | None,
    ) -> tuple[Inputs | None, Boundary | None, Boundary | None, Boundary | None]:
        """The rows `own` of this rank's share, which has so many."""

        def rows(tensor: Tensor) -> Tensor:
            folded = len(tensor) // share
            return tensor[own[0] * folded : own[1] * folded]

        if inputs is not None and inputs.student is not None:
            batched = self.program.batched[1]
            given = {i: rows(t) if i in batched else t for i, t in inputs.student.items()}
            inputs = Inputs(None, given, None if inputs.targets is None else rows(inputs.targets))
        before, target, mine = (None if b is None else tuple(map(rows, b)) for b in boundaries)
        return inputs, before, target, mine

    def _entering(self, student: Student, block: int, boundary: Boundary | None, own: Boundary | None) -> Boundary:
        """The boundary before `block` as its `student` takes it: the teacher's and the student's own, mixed."""
        if boundary is None:
            return ()
        share = self.header.own if own is not None else 0.0
        given = list(own or ())
        if own is None or share == 0:
            given = [a(t) for a, t in zip(student.before, boundary, strict=True)]
        elif share < 1:  # what comes from further back has been mixed where it was made
            for i in student.part.fresh:
                given[i] = torch.lerp(student.before[i](boundary[i]), given[i], share)
        return tuple(self.maps.enter(block, i, t) for i, t in enumerate(given))

    def _where(self, block: int | None) -> str:
        what = "" if block is None else f", block {self.parts[block].block} ({self.parts[block].where})"
        return f"Rank {self.number}{what}, step {self.header.step}"


def _nothing(block: int, inputs: Inputs | None, boundary: Boundary | None) -> bool:
    """Whether a share has no rows in this batch."""
    return boundary is None if block else inputs is None or inputs.teacher is None
