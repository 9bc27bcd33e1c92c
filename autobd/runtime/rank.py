"""One rank: its blocks, optimizers and normalisers, and what each instruction does with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..blocks import Split
from ..blocks.verify import set_mode
from ..errors import LossError, NonFiniteError
from ..graph import Arguments
from ..recipe import MSE, Recipe
from ..recipe.losses import evaluate, mean_square
from .randomness import keyed, student_seed


@dataclass(frozen=True)
class Inputs:
    """The input tensors of one batch: the teacher's and the student's."""

    teacher: list[Tensor]
    student: list[Tensor]


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step, by block: the trained loss, and the error relative to a student that outputs zeros."""

    losses: tuple[float, ...]
    relative: tuple[float, ...]


class Rank:
    """State of a rank over a run; the methods are the instructions that generated programs call.

    Arguments:
        split: the block pairs; `student`: the copy of the student that is trained.
        recipe, seed: as for `distill`.
        rank: its number, for errors.
    """

    def __init__(self, split: Split, student: nn.Module, recipe: Recipe, seed: int, rank: int = 0) -> None:
        self.split, self.seed, self.rank, self.step = split, seed, rank, 0
        self.teacher_blocks = split.bind_teacher()
        self.student_blocks = split.bind_student(student)
        set_mode(self.teacher_blocks, False)
        set_mode(self.student_blocks, True)
        self.device = next(student.parameters()).device
        self.keys_python = bool(split.student.opaque)
        self.recipes = [recipe.for_block(b, len(split), split.logits) for b in range(len(split))]
        named = dict(student.named_parameters())
        self.parameters = [
            [named[n] for n in pair.student.parameters if named[n].requires_grad] for pair in split.pairs
        ]
        self.optimizers = [r.make_optimizer(p) for r, p in zip(self.recipes, self.parameters, strict=True)]
        self.normalisers: list[Tensor | None] = [None] * len(split)
        self.losses: list[Tensor] = [torch.zeros(())] * len(split)
        self.relative: list[Tensor] = [torch.zeros(())] * len(split)
        self.norms: list[Tensor] = [torch.zeros(())] * len(split)
        self.teacher_norms: list[Tensor] = [torch.zeros(())] * len(split)

    # ---------------------------------------------------------------- instructions

    def load(self, batch: tuple[Arguments, Arguments]) -> Inputs:
        """The batch's tensors, teacher's and student's, on this rank's device."""
        teacher, student = (a.on(self.device).tensors for a in batch)
        return Inputs(teacher, student)

    def teacher_forward(self, block: int, inputs: Inputs, boundary: Tensor | None) -> Tensor:
        with torch.no_grad():
            return self._run(
                self.teacher_blocks[block], self.split.pairs[block].teacher.inputs, inputs.teacher, boundary
            )

    def student_forward(self, block: int, inputs: Inputs, boundary: Tensor | None, target: Tensor) -> Tensor:
        """The loss of the student block on the teacher's boundary, against the teacher's next boundary `target`."""
        recipe, pair = self.recipes[block], self.split.pairs[block].student
        with torch.enable_grad(), keyed(student_seed(self.seed, self.step, block), self.device, self.keys_python):
            output = self._run(self.student_blocks[block], pair.inputs, inputs.student, boundary)
            loss = evaluate(recipe.loss, output, target, self._where(block))
        with torch.no_grad():
            normaliser = self.normalisers[block]
            if normaliser is None:
                normaliser = self.normalisers[block] = mean_square(target)
            error = loss.detach() if isinstance(recipe.loss, MSE) else (output.detach() - target).square().mean()
            self.relative[block] = error / normaliser
            self.teacher_norms[block] = torch.linalg.vector_norm(target)
        if isinstance(recipe.loss, MSE) and recipe.loss.normalised:
            loss = loss / normaliser
        self.losses[block] = loss.detach()
        return loss

    def student_backward(self, block: int, loss: Tensor) -> None:
        if self.optimizers[block] is None:
            return
        if not loss.requires_grad:
            raise LossError(
                f"{self._where(block)}: the loss does not depend on the student's parameters.",
                given="a loss without gradient",
                expected="a differentiable function of its first argument",
            )
        loss.backward()  # type: ignore[no-untyped-call]

    def update(self, block: int) -> None:
        """Clip, step and forget the gradients of this block alone."""
        optimizer = self.optimizers[block]
        if optimizer is None:
            return
        gradients = [p.grad for p in self.parameters[block] if p.grad is not None]
        norm = self.norms[block] = get_total_norm(gradients)
        clip = self.recipes[block].clip
        if clip is not None:
            clip_grads_with_norm_(self.parameters[block], clip, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    # ---------------------------------------------------------------- between steps

    def set_progress(self, progress: float) -> None:
        """Set every block's learning rate for `progress` (0 to 1) through the training."""
        for recipe, optimizer in zip(self.recipes, self.optimizers, strict=True):
            if optimizer is not None and callable(recipe.lr):
                for group in optimizer.param_groups:
                    group["lr"] = recipe.lr_at(progress)

    def finish_step(self) -> StepLosses:
        """The step's losses. Errors: NonFiniteError naming rank, block, step, and whether the teacher is the cause."""
        values = torch.stack(
            [t.to(self.device, torch.float64) for t in (*self.losses, *self.relative, *self.norms)]
        ).tolist()
        blocks = len(self.split)
        for block in range(blocks):
            loss, norm = values[block], values[2 * blocks + block]
            if not all(abs(v) < float("inf") for v in (loss, norm)):
                cause = (
                    "the teacher's boundary"
                    if not torch.isfinite(self.teacher_norms[block])
                    else "the student"
                    if not abs(loss) < float("inf")
                    else "the student's gradient"
                )
                raise NonFiniteError(
                    f"{self._where(block)}: not a finite number; it began in {cause}.",
                    given=f"loss {loss}, gradient norm {norm}",
                    expected="finite values",
                    do="lower the learning rate, set Recipe(clip=...), or check the batch for NaN",
                )
        self.step += 1
        return StepLosses(tuple(values[:blocks]), tuple(values[blocks : 2 * blocks]))

    def _run(self, module: Any, takes: tuple[int, ...], inputs: list[Tensor], boundary: Tensor | None) -> Tensor:
        own = [inputs[i] for i in takes]
        output: Tensor = module(*own) if boundary is None else module(boundary, *own)
        return output

    def _where(self, block: int) -> str:
        first, last = self.split.pairs[block].student.modules
        return f"Rank {self.rank}, block {block} ({first} .. {last}), step {self.step}"
