"""Block losses: callables from a student's and a teacher's tensor of equal shape to one value per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import LossError

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


def precise(tensor: Tensor) -> Tensor:
    """In single precision if it is of half: a loss of bfloat16 values has three digits."""
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


def mean_square(teacher: Tensor) -> Tensor:
    """The normaliser of a block: the mean square of its teacher boundary (1 where that is zero)."""
    value = teacher.detach().square().mean()
    return torch.where(value > 0, value, torch.ones_like(value))


def evaluate(loss: Loss, student: Tensor, teacher: Tensor, where: str, split: bool = False) -> Tensor:
    """The mean of `loss` over the rows.

    Arguments:
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
    return value.mean()
