"""Block losses: callables from a student's and a teacher's tensor of equal shape to one value per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InputError, LossError

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MSE:
    """Mean squared error of each row.

    Arguments:
        normalised: divide by a constant of the block, the mean square of the teacher's boundary on the first batch, so
            that 1 is what a student that outputs zeros would get and losses of all blocks compare. A constant, not the
            batch's own mean square: the losses of parts of a batch then add up exactly.
    """

    normalised: bool = True

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (student - teacher).square().flatten(1).mean(1)


@dataclass(frozen=True)
class KL:
    """Kullback-Leibler divergence of softened class probabilities (Hinton et al. 2015), times temperature squared."""

    temperature: float = 4.0

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        t = self.temperature
        log_student, log_teacher = (functional.log_softmax(x / t, -1) for x in (student, teacher))
        divergence = functional.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(-1)
        return t * t * (divergence.flatten(1).mean(1) if divergence.ndim > 1 else divergence)


@dataclass(frozen=True)
class CosineDistance:
    """One minus the cosine of the angle between a row's two tensors, each as one long vector: blind to scale."""

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return 1 - functional.cosine_similarity(student.flatten(1), teacher.flatten(1), -1)


@dataclass(frozen=True)
class RelativeL1:
    """Mean absolute error of each row over the row's own mean absolute value: less drawn to outliers than MSE."""

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        size = teacher.abs().flatten(1).mean(1)
        return (student - teacher).abs().flatten(1).mean(1) / size.clamp(min=torch.finfo(size.dtype).tiny)


@dataclass(frozen=True, init=False)
class Weighted:
    """A sum of losses: `Weighted((1.0, MSE()), (0.1, CosineDistance()))`.

    Errors: InputError for terms that are no pairs of a number and a loss.
    """

    terms: tuple[tuple[float, Loss], ...]

    def __init__(self, *terms: tuple[float, Loss]) -> None:
        for term in terms:
            pair = isinstance(term, tuple) and len(term) == 2
            if not pair or not isinstance(term[0], (int, float)) or not callable(term[1]):
                raise InputError("A term is no weighted loss.", given=repr(term), expected="(weight, loss)")
        if not terms:
            raise InputError("A sum of no losses.", expected="at least one (weight, loss)")
        object.__setattr__(self, "terms", terms)

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return torch.stack([weight * loss(student, teacher) for weight, loss in self.terms]).sum(0)


def precise(tensor: Tensor) -> Tensor:
    """In single precision if it is of half: a loss of bfloat16 values has three digits."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


def mean_square(teacher: Tensor) -> Tensor:
    """The normaliser of a block: the mean square of its teacher boundary (1 where that is zero)."""
    value = teacher.detach().square().mean()
    return torch.where(value == 0, torch.ones_like(value), value)


def evaluate(
    loss: Loss, student: Tensor, teacher: Tensor, where: str, split: bool = False, normaliser: Tensor | None = None
) -> Tensor:
    """The mean of `loss` over the rows.

    Arguments:
        normaliser: what a normalised loss is divided by; None: 1.
        where: the block, for errors.
        split: the rows are a share of the batch, so that one value in all would not add up.

    Errors: LossError if the tensors' shapes differ (they would broadcast), or if the loss gives neither one value nor
    one per row.
    """
    if student.shape != teacher.shape:
        raise LossError(
            f"{where}: the student's boundary has another shape than the teacher's.",
            given=f"student {list(student.shape)}, teacher {list(teacher.shape)}",
            expected="equal shapes, not broadcastable ones",
        )
    if isinstance(loss, Weighted):
        parts = [w * evaluate(term, student, teacher, where, split, normaliser) for w, term in loss.terms]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
    value = loss(student, teacher)
    if not isinstance(value, Tensor) or value.ndim > 1 or (value.ndim == 1 and len(value) != len(student)):
        raise LossError(
            f"{where}: the loss gives neither one value nor one per row.",
            given=list(value.shape) if isinstance(value, Tensor) else type(value).__name__,
            expected=f"shape [] or [{len(student)}]",
            do="reduce over every dimension but the first",
        )
    if split and value.ndim == 0:
        raise LossError(
            f"{where}: the loss gives one value for all rows, but the batch is split (replicas, microbatches).",
            given="shape []",
            expected=f"shape [{len(student)}]: values of shares of the batch then add up",
            do="return one value per row, or use strategy='tr+dpu' and devices that hold the whole batch",
        )
    mean = value.mean()
    return mean / normaliser if normaliser is not None and isinstance(loss, MSE) and loss.normalised else mean
