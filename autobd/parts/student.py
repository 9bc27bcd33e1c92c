"""A student block in training: its weights, optimizer and normalisers, and what a step leaves of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map_only

from ..errors import NonFiniteError
from ..recipe import MSE
from ..recipe.losses import evaluate, precise
from .part import Part, StudentPart, tensors_at


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
        optimizer: its `state_dict`; `normalisers`: of its losses; `maps`: its channel maps, by name.
    """

    optimizer: dict[str, Any] | None
    normalisers: list[Tensor] | None
    maps: dict[str, Tensor]


class Student:
    """A student block in training.

    Arguments:
        part: the block; `like`: a tensor whose dtype and device adapters have.
    """

    def __init__(self, part: StudentPart, like: Tensor) -> None:
        self.part, self.recipe, self.like = part, part.recipe, like
        self.tensors = tensors_at(part.module, part.keys)
        self.stale = tensors_at(part.module, part.stale)
        self.before = [a.on(like) for a in part.before]
        self.behind = [a.on(like) for a in part.behind]
        self.parameters: list[nn.Parameter] = [self.tensors[key] for key in part.trained]
        self.optimizer: torch.optim.Optimizer | None = None
        self.normalisers: list[Tensor] | None = None
        self.output: tuple[Tensor, ...] | None = None
        self.learns = True  # whether the output depends on the weights in this step
        self.weight = 1.0  # the share of the batch's rows
        self._zero = torch.zeros((), device=like.device)
        self.begin()

    def train_too(self, maps: Sequence[nn.Parameter]) -> None:
        """Train channel maps with the block's own parameters, and make the optimizer."""
        self.parameters += maps
        self.optimizer = self.recipe.make_optimizer(self.parameters)

    def state(self, maps: Mapping[str, Tensor]) -> BlockState:
        """Where the training is, to be sent to any device."""
        optimizer = None if self.optimizer is None else tree_map_only(Tensor, Tensor.cpu, self.optimizer.state_dict())
        normalisers = None if self.normalisers is None else [t.cpu() for t in self.normalisers]
        return BlockState(optimizer, normalisers, {name: m.detach().cpu() for name, m in maps.items()})

    def go_on(self, state: BlockState, maps: Mapping[str, Tensor]) -> None:
        """Go on from `state`; `maps`: the block's own channel maps."""
        if self.optimizer is not None and state.optimizer is not None:
            self.optimizer.load_state_dict(state.optimizer)
            for number, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
                for name, value in state.optimizer["state"].get(number, {}).items():
                    if isinstance(value, Tensor) and value.dtype != self.optimizer.state[p][name].dtype:
                        self.optimizer.state[p][name] = value.to(p.device)  # it was cast to the parameter's
        if state.normalisers is not None:
            self.normalisers = [t.to(self.like.device) for t in state.normalisers]
        with torch.no_grad():
            for name, own in maps.items():
                own.copy_(state.maps[name])

    def take(self, part: Part) -> None:
        """Go on with the block in another form."""
        assert part.student is not None
        self.part = part.student
        self.before = [a.on(self.like) for a in part.student.before]
        self.behind = [a.on(self.like) for a in part.student.behind]

    def set_rate(self, progress: float) -> None:
        """The learning rate at `progress` (0 to 1) through the training."""
        if self.optimizer is not None and callable(self.recipe.lr):
            for group in self.optimizer.param_groups:
                group["lr"] = self.recipe.lr_at(progress)

    def begin(self) -> None:
        """Begin a step; until a forward it is one without rows."""
        self.output = None
        self.norm = self.teacher_norm = self._zero
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
    ) -> Tensor:
        """Run the block and return its loss against `targets`, in single precision or more; keeps its output.

        Arguments:
            entering, given: the boundary as the student's block takes it, and its input tensors.
            leave: from an index and a tensor behind the block to what is compared.
            where, split: as for `evaluate`.
        """
        self.output = self.part(*entering, *given)
        outputs = [precise(leave(i, self.output[i])) for i in self.part.distilled]
        self.learns = not self.part.varies or any(t.requires_grad for t in outputs)
        return self.judge(outputs, targets, where, split)

    def judge(self, outputs: Sequence[Tensor], targets: Sequence[Tensor], where: str, split: bool) -> Tensor:
        """The loss of what the block learns; notes it, and the error relative to a student that outputs zeros.

        Arguments: as `evaluate`.
        """
        assert self.normalisers is not None
        loss_of = self.recipe.loss
        normalisers = [n.to(t.dtype) for n, t in zip(self.normalisers, targets, strict=True)]
        losses = [evaluate(loss_of, s, t, where, split) for s, t in zip(outputs, targets, strict=True)]
        normalised = isinstance(loss_of, MSE) and loss_of.normalised
        loss = _mean(_over(losses, normalisers) if normalised else losses)
        relative = noted = loss.detach()
        with torch.no_grad():
            self.teacher_norm = self.teacher_norm + _mean([torch.linalg.vector_norm(t) for t in targets])
            if not normalised:
                errors = [(s - t).square().mean() for s, t in zip(outputs, targets, strict=True)]
                relative = _mean(_over(errors, normalisers))
        self._losses.append((self.weight, noted, relative))
        return loss

    def step(self) -> None:
        """Clip the gradients, step, and forget them."""
        if self.optimizer is None:
            return
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):  # their norm is that of the values, each index once
            for p in self.parameters:
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.coalesce()
            gradients = [
                p.grad._values() if p.grad.is_sparse else p.grad for p in self.parameters if p.grad is not None
            ]
        self.norm = get_total_norm(gradients)
        if self.recipe.clip is not None:
            clip_grads_with_norm_(self.parameters, self.recipe.clip, self.norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def share(self, loss: float, relative: float, norm: float, where: Callable[[], str]) -> ShareLosses:
        """The step's values as numbers. Errors: NonFiniteError that tells whether the teacher is the cause."""
        if math.isfinite(loss) and math.isfinite(norm):
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
            given=f"loss {loss}, gradient norm {norm}",
            expected="finite values",
            do="lower the learning rate, set Recipe(clip=...), or check the batch for NaN",
        )


def _over(values: Sequence[Tensor], by: Sequence[Tensor]) -> list[Tensor]:
    return [v / n for v, n in zip(values, by, strict=True)]


def _mean(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(list(values)).mean()
