"""Learning rates over a training: `Schedule`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError


@dataclass(frozen=True)
class Schedule:
    """A learning rate that rises in a straight line and then falls: `Recipe(lr=Schedule(1e-3, warmup=0.05))`.

    Arguments:
        lr: the highest rate.
        warmup: the part of the training, from 0 to 1, in which the rate rises from zero.
        decay: how it falls from there to the end: along half a "cosine" wave, "linear", or not at all ("constant").
        final: where it ends, as a part of `lr`.

    Errors: InputError for a warm-up that is longer than the training, or values that are no rates.
    """

    lr: float
    warmup: float = 0.0
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    final: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup <= 1:
            raise InputError(
                "The warm-up is longer than the training." if self.warmup > 1 else "The warm-up is negative.",
                given=f"warmup={self.warmup!r}",
                expected="a part of the training, from 0 to 1",
                do="divide the steps of the warm-up by those of the training",
            )
        if self.decay not in ("cosine", "linear", "constant"):
            raise InputError("No such decay.", given=repr(self.decay), expected='"cosine", "linear" or "constant"')
        if not (math.isfinite(self.lr) and self.lr >= 0 and 0 <= self.final <= 1):
            raise InputError(
                "The schedule has no learning rates.",
                given=f"lr={self.lr!r}, final={self.final!r}",
                expected="lr of at least 0, final from 0 to 1",
            )

    def __call__(self, block: int, progress: float) -> float:
        """The rate at `progress` (0 to 1) through the training; the same for all blocks."""
        if progress < self.warmup:
            return self.lr * progress / self.warmup
        if self.decay == "constant" or self.warmup == 1:
            return self.lr
        done = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        left = (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return self.lr * (self.final + (1 - self.final) * left)
