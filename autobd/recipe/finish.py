"""A short training of the whole student after its blocks: `Finish`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError
from .block_recipe import LearningRate, OptimizerFactory, Precision
from .recipe import Recipe
from .schedule import Schedule
from .target_loss import TargetLoss


@dataclass(frozen=True)
class Finish:
    """End to end, against the teacher's output or the data's targets, the batch split over all ranks. Every rank then
    holds both models.

    Arguments:
        epochs: passes over the data; `steps`: stop after so many, whatever `epochs` says.
        loss: "kd" (the teacher's output: KL of a classifier's logits, else normalised MSE), "ce" (cross entropy with
            the targets alone; the teacher then does not run), or a callable `(student, teacher) -> one value per row`.
        target_loss: beside "kd" or a callable, a loss against the targets.
        temperature: of the KL loss.
        lr, optimizer, weight_decay, clip, accumulate, precision, ema: as in `Recipe`.

    Errors: InputError for another loss, and as `Recipe`.
    """

    epochs: int = 1
    loss: Literal["kd", "ce"] | Callable[[Tensor, Tensor], Tensor] = "kd"
    lr: LearningRate = field(default_factory=lambda: Schedule(1e-3, warmup=0.05))
    steps: int | None = None
    target_loss: TargetLoss | Literal["ce"] | None = None
    temperature: float = 4.0
    optimizer: OptimizerFactory = torch.optim.AdamW
    weight_decay: float | None = None
    clip: float | None = None
    accumulate: int = 1
    precision: Precision = None
    ema: float | None = None

    def __post_init__(self) -> None:
        if self.loss not in ("kd", "ce") and not callable(self.loss):
            raise InputError(
                "Finish.loss is no loss.", given=repr(self.loss), expected='"kd", "ce" or a callable (student, teacher)'
            )
        if self.loss == "ce" and self.target_loss is not None:
            raise InputError(
                "Finish has two losses against the targets.",
                given=f"loss='ce', target_loss={self.target_loss!r}",
                do="use loss='kd' with target_loss=, or loss='ce' alone",
            )
        self.recipe(Recipe())

    def recipe(self, blocks: Recipe) -> Recipe:
        """For the student as one block, after `blocks` were trained: the same parts are frozen, the same output is
        taken for logits."""
        return Recipe(
            loss=self.loss if callable(self.loss) else None,
            target_loss=TargetLoss("ce", alone=True) if self.loss == "ce" else self.target_loss,
            optimizer=self.optimizer,
            lr=self.lr,
            weight_decay=self.weight_decay,
            clip=self.clip,
            accumulate=self.accumulate,
            precision=self.precision,
            ema=self.ema,
            epochs=self.epochs,
            steps=self.steps,
            temperature=self.temperature,
            logits=blocks.logits,
            freeze=blocks.freeze,
            non_finite=blocks.non_finite if isinstance(blocks.non_finite, str) else "stop",
        )
