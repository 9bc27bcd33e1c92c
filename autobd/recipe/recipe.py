"""What a block is trained with: loss, optimizer, learning rate, clipping, and for how long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..errors import InputError
from .losses import KL, MSE, Loss

OptimizerFactory = Callable[..., torch.optim.Optimizer]
LearningRate = float | Callable[[int, float], float]


@dataclass(frozen=True)
class Recipe:
    """How the student is trained. A field marked * is one value for all blocks or `{block: value}`; a block that the
    mapping leaves out gets the default.

    Arguments:
        loss*: callable `(student, teacher) -> one value per row` (or one in all). Default: normalised MSE, and on the
            last block of a classifier KL of the logits.
        optimizer*: callable `(parameters, lr=...)`, such as `torch.optim.AdamW` (default) or
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        lr*: learning rate, or a schedule `(block, progress) -> rate` with progress from 0 to 1 over the training.
        clip*: largest gradient norm of a block; None: no clipping.
        epochs: passes over the data.
        steps: stop after so many steps, whatever `epochs` says.
        logits: whether the distilled output is a classifier's logits; None: known classifiers only.
        temperature: of the KL loss.
        block_input: what a student block is given, "teacher" (the teacher's boundary, as in the papers) or "student"
            (the student's own, detached: it sees and corrects the errors of the blocks before).
    """

    loss: Loss | Mapping[int, Loss] | None = None
    optimizer: OptimizerFactory | Mapping[int, OptimizerFactory] = torch.optim.AdamW
    lr: LearningRate | Mapping[int, LearningRate] = 1e-3
    clip: float | Mapping[int, float] | None = None
    epochs: int = 1
    steps: int | None = None
    logits: bool | None = None
    temperature: float = 4.0
    block_input: Literal["teacher", "student"] = "teacher"

    def __post_init__(self) -> None:
        if self.block_input not in ("teacher", "student"):
            raise InputError(
                "Recipe.block_input names no boundary.", given=repr(self.block_input), expected='"teacher" or "student"'
            )
        for name, value, least in (("epochs", self.epochs, 1), ("steps", self.steps, 1)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise InputError(
                    f"Recipe.{name} is no count.", given=repr(value), expected=f"a whole number of at least {least}"
                )
        for name in ("lr", "clip"):
            given = getattr(self, name)
            for value in given.values() if isinstance(given, Mapping) else [given]:
                if isinstance(value, (int, float)) and (value < 0 or value != value):
                    raise InputError(f"Recipe.{name} is negative or not a number.", given=value, expected="at least 0")
        if not self.temperature > 0:
            raise InputError("Recipe.temperature is not positive.", given=self.temperature, expected="a number above 0")

    def for_block(self, block: int, blocks: int, logits: bool | None) -> BlockRecipe:
        """The values for one of `blocks` blocks. Errors: InputError if a mapping names a block that does not exist."""
        chosen: dict[str, Any] = {}
        for name in ("loss", "optimizer", "lr", "clip"):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                unknown = [k for k in value if not isinstance(k, int) or not 0 <= k < blocks]
                if unknown:
                    raise InputError(
                        f"Recipe.{name} names a block that does not exist.",
                        given=unknown,
                        expected=f"block numbers from 0 to {blocks - 1}",
                    )
                value = value.get(block, Recipe.__dataclass_fields__[name].default)
            chosen[name] = value
        is_logits = self.logits if self.logits is not None else logits
        if chosen["loss"] is None:
            chosen["loss"] = KL(self.temperature) if is_logits and block == blocks - 1 else MSE()
        return BlockRecipe(block, **chosen)


@dataclass(frozen=True)
class BlockRecipe:
    """A recipe's values for one block."""

    block: int
    loss: Loss
    optimizer: OptimizerFactory
    lr: LearningRate
    clip: float | None

    def make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        """None for a block with nothing to train."""
        return self.optimizer(parameters, lr=self.lr_at(0.0)) if parameters else None

    def lr_at(self, progress: float) -> float:
        """The learning rate at `progress` (0 to 1) through the training."""
        return float(self.lr(self.block, progress)) if callable(self.lr) else float(self.lr)
