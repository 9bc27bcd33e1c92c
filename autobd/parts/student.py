"""A student block in training: its weights, optimizer and normalisers, and what a step leaves of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NonFiniteError
from ..recipe import MSE
from ..recipe.losses import evaluate, precise
from .compiled import Compiled
from .learner import Learner
from .part import Part, StudentPart, autocast, tensors_at


@dataclass(frozen=True)
class ShareLosses:
    """What one rank knows of a block's losses in a step: the trained loss, the error relative to a student that outputs
    zeros, and the share of the batch's rows that they are the mean of."""

    loss: float
    relative: float
    weight: float


@dataclass(frozen=True)
class BlockState:
    """What the training of a block goes on from on another rank, beside its weights: what optimizers and losses keep
    elsewhere than in `state_dict` begins anew.

    Attributes:
        learner: of its optimizer and what belongs to it; `normalisers`: of its losses; `maps`: its channel maps, by
            name.
    """

    learner: dict[str, Any]
    normalisers: list[Tensor] | None
    maps: dict[str, Tensor]


class Student:
    """A student block in training.

    Arguments:
        part: the block; `like`: a tensor whose dtype and device adapters have.
    """

    def __init__(self, part: StudentPart, like: Tensor) -> None:
        self.part, self.recipe, self.like = part, part.recipe, like
        self._call = _callable(part)
        self.tensors = tensors_at(part.module, part.keys)
        self.stale = tensors_at(part.module, part.stale)
        self.before = [a.on(like) for a in part.before]
        self.behind = [a.on(like) for a in part.behind]
        self.normalisers: list[Tensor] | None = None
        self.output: tuple[Tensor, ...] | None = None
        self.learns = True  # whether the output depends on the weights in this step
        self.weight = 1.0  # the share of the batch's rows
        self._zero = torch.zeros((), device=like.device)
        self.rests = False  # it is not trained any more
        self._buffers: list[tuple[Tensor, Tensor]] = []  # as they were before the batches of a step
        self.train_too({})
        self.begin()

    def train_too(self, maps: Mapping[str, nn.Parameter]) -> None:
        """Train channel maps with the block's own parameters, and make the optimizer."""
        own = {key: self.tensors[key] for key in self.part.trained}
        self.learner = Learner(self.recipe, {**own, **maps}, self.like.device)

    def trained(self) -> dict[str, Tensor]:
        """What training has changed, as the student gets it: tensors by their keys in it, and channel maps. Those of a
        candidate have its prefix."""
        own = {**{key: t.detach() for key, t in self.tensors.items()}, **self.learner.tensors()}
        return {f"{self.part.prefix}{key}": t for key, t in own.items()}

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Take these weights, by their names as in `trained`."""
        own = {**self.tensors, **self.learner.parameters}
        with torch.no_grad():
            for key, tensor in (*own.items(), *self.learner.average.items()):
                name = f"{self.part.prefix}{key}"
                if name in values:
                    tensor.copy_(values[name])

    def state(self) -> BlockState:
        """Where the training is, to be sent to any device."""
        normalisers = None if self.normalisers is None else [t.cpu() for t in self.normalisers]
        maps = {name: t.cpu() for name, t in self.learner.tensors().items() if name not in self.tensors}
        return BlockState(self.learner.state(), normalisers, maps)

    def go_on(self, state: BlockState) -> None:
        """Go on from `state`, with weights as `trained` gave them."""
        if state.normalisers is not None:
            self.normalisers = [t.to(self.like.device) for t in state.normalisers]
        with torch.no_grad():
            for name, value in state.maps.items():
                self.learner.parameters[name].copy_(value)
        self.learner.go_on(state.learner)

    def take(self, part: Part) -> None:
        """Go on with the block in another form."""
        assert part.student is not None
        self.part, self._call = part.student, _callable(part.student)
        self.before = [a.on(self.like) for a in part.student.before]
        self.behind = [a.on(self.like) for a in part.student.behind]

    def begin(self) -> None:
        """Begin a step; until a forward it is one without rows."""
        self.output = None
        self.teacher_norm = self._zero
        self.range: tuple[Tensor, Tensor] | None = None  # of what the block was given, where that may be asked for
        if self.rests or (self.recipe.non_finite == "skip" and not self.learner.pending):
            self._buffers = [(b, b.clone()) for b in self.part.module.buffers()]
        self._losses: list[tuple[float, Tensor, Tensor]] = []  # of each microbatch: weight, loss, relative error
        self._outputs: list[tuple[Tensor, ...]] = []

    def keep(self) -> None:
        """Keep the output of a microbatch, detached, until it is asked for."""
        assert self.output is not None
        self._outputs.append(tuple(t.detach() for t in self.output))

    def kept(self) -> tuple[Tensor, ...] | None:
        """The outputs of all microbatches; None without rows."""
        parts, self._outputs = self._outputs, []
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else tuple(torch.cat(rows) for rows in zip(*parts, strict=True))

    def sums(self) -> tuple[Tensor, Tensor]:
        """The step's loss and relative error, of all rows of the share."""
        if len(self._losses) < 2:
            return self._losses[0][1:] if self._losses else (self._zero, self._zero)
        total = self.rows
        return tuple(sum(w * values[i] for w, *values in self._losses) / total for i in (0, 1))  # type: ignore[return-value]

    @property
    def rows(self) -> float:
        """The share of the batch's rows that the step has seen."""
        return sum(weight for weight, *_ in self._losses)

    def forward(
        self,
        entering: Sequence[Tensor],
        given: Sequence[Tensor],
        targets: Sequence[Tensor],
        leave: Callable[[int, Tensor], Tensor],
        where: str,
        split: bool,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Run the block and return its loss against `targets`, in single precision or more; keeps its output.

        Arguments:
            entering, given: the boundary as the student's block takes it, and its input tensors.
            leave: from an index and a tensor behind the block to what is compared.
            where, split: as for `evaluate`.
            labels: the data's targets, for a block with a loss against them.
        """
        with autocast(self.like.device, self.recipe.precision):
            output = self._call(*entering, *given)
        if self.recipe.precision is not None:
            output = tuple(t.to(a.student.dtype) for t, a in zip(output, self.behind, strict=True))
        self.output = output
        outputs = [precise(leave(i, output[i])) for i in self.part.distilled]
        self.learns = not self.part.varies or any(t.requires_grad for t in outputs)
        loss = self._judge(outputs, targets, where, split, labels)
        if loss.device.type != "cpu" or not loss.isfinite():
            self.range = _range((*entering, *given))
        return loss

    def _judge(
        self, outputs: Sequence[Tensor], targets: Sequence[Tensor], where: str, split: bool, labels: Tensor | None
    ) -> Tensor:
        """The loss of what the block learns; notes it, and the error relative to a student that outputs zeros."""
        of_targets = self.recipe.target_loss
        against = None if labels is None or of_targets is None else of_targets(outputs[0], labels, where)
        if not targets:  # the teacher was not asked
            assert against is not None
            self._losses.append((self.weight, against.detach(), against.detach()))
            return against
        assert self.normalisers is not None
        loss_of = self.recipe.loss
        normalisers = [n.to(t.dtype) for n, t in zip(self.normalisers, targets, strict=True)]
        compared = zip(outputs, targets, normalisers, strict=True)
        loss = _mean([evaluate(loss_of, s, t, where, split, n) for s, t, n in compared])
        relative = loss.detach()
        if against is not None and of_targets is not None:
            loss = against if of_targets.alone else loss + against
        with torch.no_grad():
            self.teacher_norm = self.teacher_norm + _mean([torch.linalg.vector_norm(t) for t in targets])
            if not (isinstance(loss_of, MSE) and loss_of.normalised):
                compared = zip(outputs, targets, normalisers, strict=True)
                relative = _mean([(s - t).square().mean() / n for s, t, n in compared])
        self._losses.append((self.weight, loss.detach(), relative))
        return loss

    def step(self) -> None:
        """A batch's gradients are whole: step if that is due; where they are not finite and are to be skipped, as if
        the batches of the step had not been."""
        self._after(self.learner.update)

    def finish(self) -> None:
        """Step with what is left of the batches before."""
        self._after(self.learner.finish)

    def put_back(self) -> None:
        """Give the buffers the values that they had before the batches of the step."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)

    def _after(self, step: Callable[[], None]) -> None:
        skipped = self.learner.skipped
        step()
        if self.learner.skipped == skipped:
            return
        self.put_back()
        if self.normalisers is not None and not all(bool(n.isfinite()) for n in self.normalisers):
            self.normalisers = None

    def share(self, loss: float, relative: float, norm: float, where: Callable[[], str]) -> ShareLosses:
        """The step's values as numbers. Errors: NonFiniteError that tells whether the teacher is the cause."""
        scaled = self.learner.scaler.is_enabled() and self.learner.scaler.get_scale() >= 1  # it will be made less
        if self.recipe.non_finite == "skip" or (math.isfinite(loss) and (math.isfinite(norm) or scaled)):
            return ShareLosses(loss, relative, self.rows)
        cause = (
            "the teacher's boundary"
            if not torch.isfinite(self.teacher_norm)
            else "the student"
            if not math.isfinite(loss)
            else "the student's gradient"
        )
        raise NonFiniteError(
            f"{where()}: not a finite number; it began in {cause}.",
            given=f"loss {loss}, gradient norm {norm}" + self._range_as_text(),
            expected="finite values",
            do='lower the learning rate, set Recipe(clip=...), check the batch for NaN, or Recipe(non_finite="skip")',
        )

    def _range_as_text(self) -> str:
        if self.range is None:
            return ""
        return f", input of the block from {float(self.range[0]):.4g} to {float(self.range[1]):.4g}"


def _callable(part: StudentPart) -> Callable[..., Any]:
    return Compiled(part.modules[-1], part.recipe.block) if part.recipe.compile else part


def _range(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
    """The least and the largest value of the first tensor of real numbers."""
    first = next((t.detach() for t in tensors if t.is_floating_point() and t.numel()), None)
    if first is None:
        return None
    least, most = torch.aminmax(first)
    return least, most


def _mean(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).mean()
