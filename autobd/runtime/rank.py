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
from .channels import ChannelMaps
from .randomness import keyed, student_seed
from .ties import stale_copies, trained_parameters


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


Boundary = tuple[Tensor, ...]


class Rank:
    """State of a rank over a run; the methods are the instructions that generated programs call.

    Arguments:
        split: the block pairs, with fitted adapters; `student`: the copy of the student that is trained.
        recipe, seed: as for `distill`.
        rank: its number, for errors.
    """

    def __init__(self, split: Split, student: nn.Module, recipe: Recipe, seed: int, rank: int = 0) -> None:
        self.split, self.seed, self.rank, self.step = split, seed, rank, 0
        self.device = next(student.parameters()).device
        self.named = dict(student.named_parameters())
        self.stale = stale_copies(split, self.named)
        self.teacher_blocks = split.bind_teacher()
        self.student_blocks = split.bind_student(student, self.stale)
        set_mode(self.teacher_blocks, False)
        set_mode(self.student_blocks, True)
        like = next(p for p in student.parameters() if p.is_floating_point())
        self.adapters = [[a.on(like) for a in pair.adapters] for pair in split.pairs]
        self.maps = ChannelMaps(split, like)
        opaque = split.student.opaque
        self.keys_python = bool(opaque)
        self.varies = [  # may leave out its weights in a step, as a layer that drops itself does
            any(n.op == "call_module" and n.target in opaque for n in p.student.graph.nodes) for p in split.pairs
        ]
        self.learns = [True] * len(split)  # whether the block's output depends on its weights in this step
        self.recipes = [recipe.for_block(b, len(split), split.logits) for b in range(len(split))]
        self.parameters = [
            [*own, *self.maps.of_block(b)] for b, own in enumerate(trained_parameters(split, self.named))
        ]
        self.trains = [
            bool(own) or any(t.together and b in t.blocks for t in split.ties) for b, own in enumerate(self.parameters)
        ]
        self.optimizers = [r.make_optimizer(p) for r, p in zip(self.recipes, self.parameters, strict=True)]
        self.normalisers: list[list[Tensor] | None] = [None] * len(split)
        self.losses: list[Tensor] = [torch.zeros(())] * len(split)
        self.relative: list[Tensor] = [torch.zeros(())] * len(split)
        self.norms: list[Tensor] = [torch.zeros(())] * len(split)
        self.teacher_norms: list[Tensor] = [torch.zeros(())] * len(split)

    # ---------------------------------------------------------------- instructions

    def load(self, batch: tuple[Arguments, Arguments]) -> Inputs:
        """The batch's tensors, teacher's and student's, on this rank's device."""
        teacher, student = (a.on(self.device).tensors for a in batch)
        return Inputs(teacher, student)

    def teacher_forward(self, block: int, inputs: Inputs, boundary: Boundary | None) -> Boundary:
        """The tensors that cross the cut behind the teacher's block."""
        with torch.no_grad():
            return self._run(
                self.teacher_blocks[block], self.split.pairs[block].teacher.inputs, inputs.teacher, boundary
            )

    def student_forward(self, block: int, inputs: Inputs, boundary: Boundary | None, target: Boundary) -> Tensor:
        """The loss of the student block on the teacher's boundary, against the teacher's next boundary `target`."""
        recipe, pair = self.recipes[block], self.split.pairs[block]
        with torch.no_grad():
            targets = [self.adapters[block][i](target[i]) for i in pair.student.distilled]
            normalisers = self.normalisers[block]
            if normalisers is None:
                normalisers = self.normalisers[block] = [mean_square(t) for t in targets]
        with torch.enable_grad(), keyed(student_seed(self.seed, self.step, block), self.device, self.keys_python):
            given = None if boundary is None else self._adapted(block, boundary)
            output = self._run(self.student_blocks[block], pair.student.inputs, inputs.student, given)
            outputs = [self.maps.leave(block, i, output[i]) for i in pair.student.distilled]
            self.learns[block] = not self.varies[block] or any(t.requires_grad for t in outputs)
            losses = [evaluate(recipe.loss, s, t, self._where(block)) for s, t in zip(outputs, targets, strict=True)]
            scaled = [loss / n for loss, n in zip(losses, normalisers, strict=True)]
            loss = torch.stack(scaled if isinstance(recipe.loss, MSE) and recipe.loss.normalised else losses).mean()
        with torch.no_grad():
            errors = (
                [s.detach() for s in scaled]
                if isinstance(recipe.loss, MSE)
                else [
                    (s.detach() - t).square().mean() / n for s, t, n in zip(outputs, targets, normalisers, strict=True)
                ]
            )
            self.relative[block] = torch.stack(errors).mean()
            self.teacher_norms[block] = torch.stack([torch.linalg.vector_norm(t) for t in targets]).sum()
        self.losses[block] = loss.detach()
        return loss

    def _adapted(self, block: int, boundary: Boundary) -> Boundary:
        """The teacher's boundary before `block` as the student's block takes it."""
        adapters = self.adapters[block - 1]
        return tuple(self.maps.enter(block, i, a(t)) for i, (a, t) in enumerate(zip(adapters, boundary, strict=True)))

    def student_backward(self, block: int, loss: Tensor) -> None:
        if not self.trains[block] or not self.learns[block]:
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

    def plain_weights(self) -> dict[str, Tensor]:
        """Weights that the plain student has instead of the trained one's: those with a channel map folded in."""
        return self.maps.folded(self.named)

    def refresh_ties(self) -> None:
        """Bring later blocks' copies of tied weights up to date (at epoch ends)."""
        with torch.no_grad():
            for copies in self.stale:
                for name, copy in copies.items():
                    copy.copy_(self.named[name])

    def _run(self, module: Any, takes: tuple[int, ...], inputs: list[Tensor], boundary: Boundary | None) -> Boundary:
        output: Boundary = module(*(boundary or ()), *(inputs[i] for i in takes))
        return output

    def _where(self, block: int) -> str:
        first, last = self.split.pairs[block].student.modules
        return f"Rank {self.rank}, block {block} ({first} .. {last}), step {self.step}"
