"""A loss of the last block against the data's own targets: `TargetLoss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn import functional

from ..errors import InputError, LossError


@dataclass(frozen=True)
class TargetLoss:
    """Added to the last block's loss.

    Arguments:
        loss: "ce" (cross entropy of class scores), or a callable `(output, targets) -> one value per row`.
        weight: what it is multiplied by.
        alone: in place of the loss against the teacher.

    Errors: InputError for another loss, or a weight that is no number of at least 0.
    """

    loss: Literal["ce"] | Callable[[Tensor, Tensor], Tensor] = "ce"
    weight: float = 1.0
    alone: bool = False

    def __post_init__(self) -> None:
        if self.loss != "ce" and not callable(self.loss):
            raise InputError(
                "TargetLoss.loss is no loss.", given=repr(self.loss), expected='"ce" or a callable (output, targets)'
            )
        if not isinstance(self.weight, (int, float)) or not 0 <= self.weight < float("inf"):
            raise InputError(
                "TargetLoss.weight is no weight.", given=repr(self.weight), expected="a number of at least 0"
            )

    def __call__(self, output: Tensor, targets: Tensor, where: str) -> Tensor:
        """The weighted mean over the rows. Errors: LossError for targets that do not fit, or no value per row."""
        function = cross_entropy if self.loss == "ce" else self.loss
        try:
            values = function(output, targets)
        except (RuntimeError, ValueError, IndexError) as error:
            raise LossError(
                f"{where}: the loss against the targets has failed: {type(error).__name__}: {error}",
                given=f"output {list(output.shape)}, targets {targets.dtype} {list(targets.shape)}",
                expected="class numbers below the number of scores, or what your loss takes",
            ) from error
        if values.shape != output.shape[:1]:
            raise LossError(
                f"{where}: the loss against the targets does not give one value per row.",
                given=list(values.shape),
                expected=f"shape [{len(output)}]",
                do="reduce over every dimension but the first (reduction='none')",
            )
        return self.weight * values.mean()


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """Of class scores [rows, classes, ...], by row."""
    values = functional.cross_entropy(output, targets, reduction="none")
    return values.flatten(1).mean(1) if values.ndim > 1 else values
