"""How a block's weights change: from gradients to a step of its optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils._pytree import tree_map_only

from ..recipe import BlockRecipe


class Learner:
    """The optimizer of one block, with the gradients of batches that make one step, the scale of gradients in half
    precision, and the average of the weights.

    Arguments:
        recipe: the block's; `parameters`: what it trains, by name.

    Attributes:
        norm: of the gradients of the last step, before they were clipped.
    """

    def __init__(self, recipe: BlockRecipe, parameters: Mapping[str, nn.Parameter], device: torch.device) -> None:
        self.recipe, self.parameters, self.device = recipe, dict(parameters), device
        self.optimizer = recipe.make_optimizer(self.parameters)
        self.scaler = torch.amp.GradScaler(device.type, enabled=recipe.precision == "fp16")
        self.average = {name: p.detach().clone() for name, p in parameters.items()} if recipe.ema is not None else {}
        self.pending = 0  # batches whose gradients wait for a step
        self.skipped = 0
        self.norm = torch.zeros((), device=device)

    @property
    def due(self) -> bool:
        """Whether the batch that is under way completes a step of the optimizer."""
        return self.pending + 1 >= self.recipe.accumulate

    def scaled(self, loss: Tensor) -> Tensor:
        """What to differentiate for the mean over the batches of a step."""
        loss = loss / self.recipe.accumulate if self.recipe.accumulate > 1 else loss
        return self.scaler.scale(loss)

    def update(self) -> None:
        """A batch's gradients are whole: step if it is due."""
        self.pending += 1
        if self.pending >= self.recipe.accumulate:
            self._step(1.0)

    def finish(self) -> None:
        """Make a step of what is left of the batches before."""
        if self.pending:
            self._step(self.recipe.accumulate / self.pending)

    def set_rate(self, progress: float) -> None:
        """The learning rate at `progress` (0 to 1) through the training."""
        if self.optimizer is not None and callable(self.recipe.lr):
            self.recipe.set_rate(self.optimizer, progress)

    def tensors(self) -> dict[str, Tensor]:
        """The weights as the student gets them, by name."""
        return {name: self.average.get(name, p.detach()) for name, p in self.parameters.items()}

    # ---------------------------------------------------------------- to go on elsewhere

    def state(self) -> dict[str, Any]:
        """On the CPU: what training goes on from, beside the tensors that the student gets."""
        found = {
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "weights": {name: self.parameters[name].detach() for name in self.average},
        }
        return tree_map_only(Tensor, Tensor.cpu, found)

    def go_on(self, state: Mapping[str, Any]) -> None:
        """From what `state` gave, once the parameters have the values of `tensors`."""
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        with torch.no_grad():
            for name, value in state["weights"].items():
                self.average[name].copy_(self.parameters[name])
                self.parameters[name].copy_(value)
        if self.optimizer is None or state["optimizer"] is None:
            return
        self.optimizer.load_state_dict(state["optimizer"])
        for number, p in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            for name, value in state["optimizer"]["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dtype != self.optimizer.state[p][name].dtype:
                    self.optimizer.state[p][name] = value.to(p.device)  # it was cast to the parameter's

    # ----------------------------------------------------------------

    def _step(self, factor: float) -> None:
        """Step with `factor` times the gradients, and forget them."""
        self.pending = 0
        if self.optimizer is None:
            return
        parameters = list(self.parameters.values())
        if any(p.grad is not None for p in parameters):
            self.scaler.unscale_(self.optimizer)
        self.norm = get_total_norm(_gradients(parameters, factor))
        if self.recipe.non_finite == "skip" and not math.isfinite(self.norm.item()):
            self.skipped += 1
        elif any(p.grad is not None for p in parameters) or not self.scaler.is_enabled():
            if self.recipe.clip is not None:
                clip_grads_with_norm_(parameters, self.recipe.clip, self.norm)
            self.scaler.step(self.optimizer)
            self._average()
        if self.scaler.is_enabled() and any(p.grad is not None for p in parameters):
            self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _average(self) -> None:
        if self.average:
            now = [self.parameters[name].detach() for name in self.average]
            torch._foreach_lerp_(list(self.average.values()), now, 1 - (self.recipe.ema or 0.0))


def _gradients(parameters: list[nn.Parameter], factor: float) -> list[Tensor]:
    """The values of the gradients, multiplied by `factor`; of a sparse one each index once."""
    found = []
    for p in parameters:
        if p.grad is None:
            continue
        if factor != 1.0:
            p.grad = p.grad * factor
        if p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        found.append(p.grad._values() if p.grad.is_sparse else p.grad)
    return found
