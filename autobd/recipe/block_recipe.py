"""A recipe's values for one block: `BlockRecipe`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..errors import InputError, users_code
from .losses import Loss
from .target_loss import TargetLoss

OptimizerFactory = Callable[..., torch.optim.Optimizer]
LearningRate = float | Callable[[int, float], float]
Groups = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
NonFinite = Literal["stop", "skip"]
Precision = Literal["bf16", "fp16"] | None


@dataclass(frozen=True)
class BlockRecipe:
    """The fields that `Recipe` marks with *, for block number `block`; `target_loss` of the last one."""

    block: int
    loss: Loss
    optimizer: OptimizerFactory
    lr: LearningRate
    weight_decay: float | None
    groups: Groups | None
    clip: float | None
    non_finite: NonFinite
    accumulate: int
    precision: Precision
    compile: bool
    recompute: bool
    ema: float | None
    patience: int | None
    stop_at: float | None
    target_loss: TargetLoss | None = None

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer | None:
        """For parameters by name; None for a block with nothing to train. Errors: InputError."""
        if not parameters:
            return None
        lr, groups = self.lr_at(0.0), self._grouped(parameters)
        plain = len(groups) == 1 and len(groups[0]) == 1
        optimizer = self._asked("optimizer", self.optimizer, groups[0]["params"] if plain else groups, lr=lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                f"Recipe.optimizer makes no optimizer for block {self.block}.",
                given=type(optimizer).__name__,
                expected="a torch.optim.Optimizer",
                do="pass a class such as torch.optim.SGD, or functools.partial of one",
            )
        if not plain:
            self.set_rate(optimizer, 0.0)
        return optimizer

    def set_rate(self, optimizer: torch.optim.Optimizer, progress: float) -> None:
        """The learning rate at `progress` (0 to 1) through the training."""
        for group in optimizer.param_groups:
            group["lr"] = self.lr_at(progress) * group.get("lr_scale", 1.0)

    def lr_at(self, progress: float) -> float:
        if not callable(self.lr):
            return float(self.lr)
        found = self._asked("lr", self.lr, self.block, progress)
        try:
            return float(found)
        except (TypeError, ValueError):
            raise InputError(
                f"Recipe.lr gives no learning rate for block {self.block} at progress {progress:g}.",
                given=repr(found),
                expected="a number",
            ) from None

    def _asked(self, field: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the user's function returns. Errors: InputError where it fails."""
        with users_code(f"Recipe.{field} fails for block {self.block}."):
            return function(*arguments, **options)

    def _chosen(self, groups: Groups, name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        found = self._asked("groups", groups, name, parameter)
        if found is not None and (not isinstance(found, Mapping) or {"lr", "params"} & set(found)):
            raise InputError(
                f"Recipe.groups gives no options for {name}.",
                given=repr(found),
                expected='a mapping without "lr" and "params", or None',
                do='use "lr_scale", which multiplies the rate of the recipe',
            )
        return found or {}

    def _grouped(self, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Any]]:
        """Groups of parameters with equal options."""
        groups: list[dict[str, Any]] = []
        for name, parameter in parameters.items():
            options: dict[str, Any] = {}
            if self.weight_decay is not None:
                options["weight_decay"] = self.weight_decay if parameter.ndim > 1 else 0.0
            if self.groups is not None:
                options |= self._chosen(self.groups, name, parameter)
            own = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == options), None)
            if own is None:
                groups.append({"params": [parameter], **options})
            else:
                own["params"].append(parameter)
        return groups


def check_tied(recipes: Sequence[BlockRecipe]) -> None:
    """Refuse what blocks that train a weight together cannot have. Errors: InputError."""
    blocks, ways = [r.block for r in recipes], {(r.precision, r.accumulate) for r in recipes}
    if len(ways) > 1:
        raise InputError(
            f"Blocks {blocks} train a weight together and differ in precision or accumulation.",
            given=[(r.precision, r.accumulate) for r in recipes],
            expected="the same for all of them",
            do='give them the same, or ties="first"',
        )
    if recipes[0].precision == "fp16":
        raise InputError(
            f"Blocks {blocks} train a weight together, and in fp16 each scales its gradients by itself.",
            given="precision='fp16'",
            do='use "bf16", or ties="first"',
        )
