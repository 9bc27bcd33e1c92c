"""One rank: its blocks, optimizers and normalisers, and what each instruction does with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..blocks.verify import set_mode
from ..errors import AutobdError, LossError, NonFiniteError, RankError
from ..graph import Arguments
from ..planner.plan import intervals
from ..program import Op, Program
from ..ranks import Header, Lost, Peers
from ..ranks.message import is_dense
from ..recipe import MSE
from ..recipe.losses import evaluate, mean_square
from .channels import ChannelMaps
from .form import Form
from .links import Links
from .part import Part, StudentPart, tensors_at
from .randomness import keyed, student_seed
from .reduce import AllReduce, GradientSum

Boundary = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """The rows of the input tensors that an assignment reads, by index: the teacher's and the student's. Both None if
    the batch has too few rows for this share."""

    teacher: Mapping[int, Tensor] | None
    student: Mapping[int, Tensor] | None


@dataclass(frozen=True)
class ShareLosses:
    """What one rank knows of a block's losses in a step: the trained loss, the error relative to a student that outputs
    zeros, and the share of the batch's rows that they are the mean of."""

    loss: float
    relative: float
    weight: float


class _Student:
    """A student block in training."""

    def __init__(self, part: StudentPart, like: Tensor) -> None:
        self.part, self.recipe, self.like = part, part.recipe, like
        self.tensors = tensors_at(part.module, part.keys)
        self.stale = tensors_at(part.module, part.stale)
        self.before = [a.on(like) for a in part.before]
        self.behind = [a.on(like) for a in part.behind]
        self.parameters: list[nn.Parameter] = [self.tensors[key] for key in part.trained]
        self.optimizer: torch.optim.Optimizer | None = None
        self.normalisers: list[Tensor] | None = None
        self.output: Boundary | None = None
        self.learns = True  # whether the output depends on the weights in this step
        zero = torch.zeros((), device=like.device)
        self.loss, self.relative, self.norm, self.teacher_norm = zero, zero, zero, zero
        self.weight = 1.0

    def take(self, part: Part) -> None:
        """Go on with the block in another form."""
        assert part.student is not None
        self.part = part.student
        self.before = [a.on(self.like) for a in part.student.before]
        self.behind = [a.on(self.like) for a in part.student.behind]


class Rank:
    """State of a rank over a run; the methods are the instructions that generated programs call.

    Arguments:
        number: which rank; `program`: what all of them do.
        parts: the block pairs that this rank runs, with students where it trains them.
        seed: as for `distill`.
        peers: the way to the other ranks.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        parts: Mapping[int, Part],
        seed: int,
        peers: Peers,
    ) -> None:
        self.number, self.program, self.seed, self.peers = number, program, seed, peers
        self.device = peers.device
        self.parts = _on(parts, self.device)
        students = {b: part.student for b, part in self.parts.items() if part.student is not None}
        like = _like(students)
        self.students = {b: _Student(s, like) for b, s in students.items()}
        self.maps = ChannelMaps({b: (s.before, s.behind) for b, s in students.items()}, like)
        for block, student in self.students.items():
            student.parameters += self.maps.of_block(block)
            student.optimizer = student.recipe.make_optimizer(student.parameters)
        set_mode([p.teacher for p in self.parts.values()], False)
        set_mode([s.module for s in students.values()], True)
        self.links = Links(program, number, peers)
        self.sums: dict[int, GradientSum] = {}
        self._assignment = {b: n for n, a in enumerate(program.plan.assignments) for b in a.blocks}
        self._reducers: dict[int, AllReduce] = {
            n: peers.join(a.ranks) for n, a in enumerate(program.plan.assignments) if a.replicated and number in a.ranks
        }
        gated = [r for r, own in enumerate(program.ranks) if any(i.op is Op.BARRIER for i in own)]
        self._gate = peers.join(gated) if number in gated and len(gated) > 1 else None
        self._forms = {0: self.parts}
        self.header = Header()
        self.at: int | None = None

    # ---------------------------------------------------------------- a step

    def begin(self, header: Header) -> None:
        """Start a step: its number, the batch's rows and sizes, and every block's learning rate."""
        if header.sizes != self.header.sizes:
            self.parts = self._forms[header.sizes]
            for block, student in self.students.items():
                student.take(self.parts[block])
        self.header = header
        for student in self.students.values():
            if student.optimizer is not None and callable(student.recipe.lr):
                for group in student.optimizer.param_groups:
                    group["lr"] = student.recipe.lr_at(header.progress)

    def knows(self, sizes: int) -> bool:
        """Whether the rank has blocks for the inputs' sizes of this number."""
        return sizes in self._forms

    def learn(self, sizes: int, forms: Mapping[int, Form]) -> None:
        """Take blocks for other sizes of inputs."""
        parts = {block: forms[block].of(part) for block, part in self._forms[0].items()}
        set_mode([p.teacher for p in parts.values()], False)
        set_mode([p.student.module for p in parts.values() if p.student is not None], True)
        self._forms[sizes] = parts

    def run(self, step: Any, batch: Any) -> None:
        """Run the generated function. Errors: AutobdError as it is; others as RankError that names block and step."""
        torch.clear_autocast_cache()  # weights as they were cast before the last update
        try:
            step(self, batch)
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
        values = torch.stack(
            [t.to(self.device, torch.float64) for _, s in blocks for t in (s.loss, s.relative, s.norm)]
        ).tolist()
        found = {}
        for i, (block, student) in enumerate(blocks):
            loss, relative, norm = values[3 * i : 3 * i + 3]
            if not all(abs(v) < float("inf") for v in (loss, norm)):
                raise self._not_finite(block, student, loss, norm)
            found[block] = ShareLosses(loss, relative, student.weight)
        return found

    # ---------------------------------------------------------------- instructions

    def scatter(self, assignment: int, edges: tuple[int, ...], batch: tuple[Arguments, Arguments]) -> None:
        """Send each rank of the assignment its rows of the inputs."""
        for edge in edges:
            first, last = self._rows(assignment, self.program.edges[edge].target)
            header = replace(self.header, first=first, last=last)
            given = self._taken(assignment, batch, first, last) if first < last else []
            unique = list({id(t): t for t in given}.values())  # both models mostly read the same tensors
            places = {id(t): i for i, t in enumerate(unique)}
            table = torch.tensor([places[id(t)] for t in given], dtype=torch.int64)
            self.links.send(edge, header, [table, *unique] if given else [])

    def load(self, assignment: int, edges: tuple[int, ...], batch: Any) -> Inputs:
        """This rank's rows of the inputs, on its device: of the batch, or as another rank sends them."""
        teacher, student = self.program.inputs[assignment]
        if edges:
            header, tensors = self.links.take(edges[0])
            self.begin(header)
            if header.first == header.last:
                return Inputs(None, None)
            given = [tensors[1 + i].to(self.device) for i in tensors[0].tolist()] if tensors else []
        else:
            first, last = self._rows(assignment, self.number)
            if first == last:
                return Inputs(None, None)
            given = [t.to(self.device) for t in self._taken(assignment, batch, first, last)]
        mine = dict(zip(teacher, given[: len(teacher)], strict=True))
        return Inputs(mine, dict(zip(student, given[len(teacher) :], strict=True)))

    def receive(self, block: int, edges: tuple[int, ...]) -> Boundary | None:
        """The teacher's boundary after `block`, of this rank's rows; None if there are none."""
        messages = [self.links.take(edge) for edge in edges]
        self.begin(messages[0][0])
        parts = sorted((m for m in messages if m[0].first < m[0].last), key=lambda m: m[0].first)
        if not parts:
            return None
        tensors = [[t.to(self.device) for t in tensors] for _, tensors in parts]
        return tuple(tensors[0] if len(tensors) == 1 else (torch.cat(rows) for rows in zip(*tensors, strict=True)))

    receive_student = receive

    def relay(self, block: int, edges: tuple[int, ...], boundary: Boundary | None) -> None:
        """Send each rank behind its rows of the boundary."""
        own, _ = self._rows(self._assignment[block], self.number)
        for index in edges:
            edge = self.program.edges[index]
            first, last = self._rows(edge.assignment, edge.target)
            mine = self._rows(self._assignment[block], self.number)
            first, last = max(first, mine[0]), min(last, mine[1])
            header = replace(self.header, first=first, last=max(first, last))
            rows: list[Tensor] = []
            if boundary is not None and first < last:
                folded = self.parts[block].folded
                whole = (first, last) == mine
                rows = [
                    t if whole else t[(first - own) * f : (last - own) * f]
                    for t, f in zip(boundary, folded, strict=True)
                ]
            self.links.send(index, header, rows)

    relay_student = relay

    def teacher_forward(self, block: int, inputs: Inputs | None, boundary: Boundary | None) -> Boundary | None:
        """The tensors that cross the cut behind the teacher's block."""
        self.at = block
        if _nothing(block, inputs, boundary):
            return None
        part = self.parts[block]
        with torch.no_grad():
            given = [] if inputs is None or inputs.teacher is None else [inputs.teacher[i] for i in part.inputs]
            output: Boundary = part.teacher(*(boundary or ()), *given)
            return _as_sent(output)

    def student_forward(
        self, block: int, inputs: Inputs | None, boundary: Boundary | None, target: Boundary | None
    ) -> Tensor | None:
        """The loss of the student block against the teacher's next boundary `target`; None without rows.

        Arguments:
            boundary: the teacher's, or with `Program.own_input` the student's own.
        """
        self.at = block
        student, replicas = self.students[block], self.program.plan.assignments[self._assignment[block]].ranks
        part, recipe = student.part, student.recipe
        first, last = self._rows(self._assignment[block], self.number)
        student.weight = (last - first) / max(self.header.batch, 1)
        with torch.no_grad():
            targets = [] if target is None else [student.behind[i](target[i]) for i in part.distilled]
            if student.normalisers is None:
                student.normalisers = self._normalisers(block, targets)
        if target is None:
            student.output = None
            student.loss = student.relative = student.teacher_norm = torch.zeros((), device=self.device)
            return None
        seed = student_seed(self.seed, self.header.step, block, share=replicas.index(self.number))
        normalisers = [n.to(t.dtype) for n, t in zip(student.normalisers, targets, strict=True)]
        draw = keyed(seed, self.device, part.draws_python) if part.draws else nullcontext()
        with torch.enable_grad(), draw:
            given = [] if inputs is None or inputs.student is None else [inputs.student[i] for i in part.inputs]
            student.output = part.module(*self._entering(block, boundary), *given)
            outputs = [self.maps.leave(block, i, student.output[i]) for i in part.distilled]
            student.learns = not part.varies or any(t.requires_grad for t in outputs)
            where, split = self._where(block), len(replicas) > 1
            losses = [evaluate(recipe.loss, s, t, where, split) for s, t in zip(outputs, targets, strict=True)]
            normalised = isinstance(recipe.loss, MSE) and recipe.loss.normalised
            loss = _mean(_over(losses, normalisers) if normalised else losses)
        student.loss = loss.detach()
        with torch.no_grad():
            student.teacher_norm = _mean([torch.linalg.vector_norm(t) for t in targets])
            if normalised:
                student.relative = student.loss
            else:
                errors = [(s - t).square().mean() for s, t in zip(outputs, targets, strict=True)]
                student.relative = _mean(_over(errors, normalisers))
        return loss

    def student_boundary(self, block: int) -> Boundary | None:
        """The student's own tensors behind the block, detached, for the next block to work on."""
        student = self.students[block]
        if student.output is None:
            return None
        with torch.no_grad():
            return _as_sent(
                [
                    self.maps.leave(block, i, t.detach()) if i in student.part.distilled else t.detach()
                    for i, t in enumerate(student.output)
                ]
            )

    def student_backward(self, block: int, loss: Tensor | None) -> None:
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
        self.sums[block] = GradientSum(self.students[block].parameters, self._reducers[self._assignment[block]])

    def barrier(self, assignment: int) -> None:
        """Wait for all ranks that train."""
        if self._gate is not None:
            self._gate([torch.zeros(1, device=self.device)]).result(self.peers.patience)

    def update(self, block: int) -> None:
        """Clip, step and forget the gradients of this block alone."""
        self.at = block
        student = self.students[block]
        if block in self.sums:
            self.sums.pop(block).finish(self.peers)
        if student.optimizer is None:
            return
        gradients = [p.grad for p in student.parameters if p.grad is not None]
        student.norm = get_total_norm(gradients)
        if student.recipe.clip is not None:
            clip_grads_with_norm_(student.parameters, student.recipe.clip, student.norm)
        student.optimizer.step()
        student.optimizer.zero_grad(set_to_none=True)

    # ---------------------------------------------------------------- between epochs

    def trained(self) -> dict[str, Tensor]:
        """What training has changed, of the blocks whose first replica this is: tensors by their keys in the student,
        and channel maps."""
        found: dict[str, Tensor] = {}
        for block, student in self.students.items():
            if self.program.plan.assignments[self._assignment[block]].ranks[0] == self.number:
                found |= {key: t.detach() for key, t in student.tensors.items()}
                found |= {name: t.detach() for name, t in self.maps.tensors(block).items()}
        return found

    def refresh(self, values: Mapping[str, Tensor]) -> None:
        """Bring copies of weights that an earlier block trains up to date."""
        with torch.no_grad():
            for student in self.students.values():
                for key, copy in student.stale.items():
                    copy.copy_(values[key])

    @property
    def stale(self) -> list[str]:
        """Keys of the weights that this rank has copies of."""
        return sorted({key for student in self.students.values() for key in student.stale})

    # ----------------------------------------------------------------

    def _rows(self, assignment: int, rank: int) -> tuple[int, int]:
        """First and one-past-last row of the batch that `rank` has in an assignment."""
        a = self.program.plan.assignments[assignment]
        return intervals(a.rows, self.header.batch)[a.ranks.index(rank)]

    def _taken(self, assignment: int, batch: tuple[Arguments, Arguments], first: int, last: int) -> list[Tensor]:
        """The rows of the inputs that an assignment reads, the teacher's before the student's."""
        sliced: dict[int, Tensor] = {}
        taken = []
        whole = first == 0 and last == self.header.batch
        for arguments, indices, batched in zip(
            batch, self.program.inputs[assignment], self.program.batched, strict=True
        ):
            tensors = arguments.tensors
            for i in indices:
                t = tensors[i]
                if id(t) not in sliced:
                    own = t[first:last] if i in batched and not whole else t
                    sliced[id(t)] = own.clone() if t.is_inference() else own
                taken.append(sliced[id(t)])
        return taken

    def _normalisers(self, block: int, targets: list[Tensor]) -> list[Tensor]:
        """The mean square of each distilled tensor over the first batch, whoever holds its rows."""
        student, number = self.students[block], self._assignment[block]
        if number not in self._reducers:
            return [mean_square(t) for t in targets]
        sums = torch.zeros(len(student.part.distilled), dtype=torch.float64, device=self.device)
        for i, t in enumerate(targets):
            sums[i] = t.double().square().mean() * student.weight
        self._reducers[number]([sums]).result(self.peers.patience)
        return [torch.where(s > 0, s, torch.ones_like(s)) for s in sums]

    def _entering(self, block: int, boundary: Boundary | None) -> Boundary:
        """The boundary before `block` as the student's block takes it."""
        if boundary is None:
            return ()
        if not self.program.own_input:
            boundary = tuple(a(t) for a, t in zip(self.students[block].before, boundary, strict=True))
        return tuple(self.maps.enter(block, i, t) for i, t in enumerate(boundary))

    def _not_finite(self, block: int, student: _Student, loss: float, norm: float) -> NonFiniteError:
        cause = (
            "the teacher's boundary"
            if not torch.isfinite(student.teacher_norm)
            else "the student"
            if not abs(loss) < float("inf")
            else "the student's gradient"
        )
        return NonFiniteError(
            f"{self._where(block)}: not a finite number; it began in {cause}.",
            given=f"loss {loss}, gradient norm {norm}",
            expected="finite values",
            do="lower the learning rate, set Recipe(clip=...), or check the batch for NaN",
        )

    def _where(self, block: int | None) -> str:
        what = "" if block is None else f", block {block} ({self.parts[block].where})"
        return f"Rank {self.number}{what}, step {self.header.step}"


def _over(values: Sequence[Tensor], by: Sequence[Tensor]) -> list[Tensor]:
    return [v / n for v, n in zip(values, by, strict=True)]


def _mean(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).mean()


def _as_sent(boundary: Sequence[Tensor]) -> Boundary:
    """As a message has it: where blocks run must not change what the next one computes with."""
    return tuple(t if is_dense(t) else t.contiguous() for t in boundary)


def _nothing(block: int, inputs: Inputs | None, boundary: Boundary | None) -> bool:
    """Whether a share has no rows in this batch."""
    return boundary is None if block else inputs is None or inputs.teacher is None


def _like(students: Mapping[int, StudentPart]) -> Tensor:
    parameters = [p for s in students.values() for p in s.module.parameters() if p.is_floating_point()]
    return next(iter(parameters), torch.zeros(()))


def _on(parts: Mapping[int, Part], device: torch.device) -> dict[int, Part]:
    """The parts on a device: themselves if they are there, else copies."""
    moved = dict(parts)
    modules = [p.teacher for p in parts.values()] + [p.student.module for p in parts.values() if p.student is not None]
    if any(t.device != device for m in modules for t in (*m.parameters(), *m.buffers())):
        moved = copy.deepcopy(moved)  # at once, so that what blocks share stays shared
        for part in moved.values():
            part.teacher.to(device)
            if part.student is not None:
                part.student.module.to(device)
    return moved
