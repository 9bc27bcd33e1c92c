"""Epochs: feed batches to the generated step, and hand the weights back to the user's student at epoch ends."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..blocks import Split
from ..errors import InputError
from ..graph import Arguments
from ..graph.state import Attributes, module_tensors, untouched
from ..program import Program
from ..recipe import Recipe
from ..runtime import Rank
from .data import Batches
from .history import History

ToPair = Callable[[Any], tuple[Arguments, Arguments]]


def train(
    split: Split,
    program: Program,
    recipe: Recipe,
    batches: Batches,
    to_pair: ToPair,
    seed: int,
    progress: bool,
    teacher_writes: Sequence[str] = (),
    start: Mapping[str, Tensor] | None = None,
) -> tuple[History, Rank]:
    """Train the student of `split` in place, on one rank.

    The work is done on a copy: the user's student changes at the end of each epoch and at no other time, so an error or
    Ctrl-C leaves it as it was at the last one.

    Arguments:
        to_pair: from a batch to the teacher's and the student's arguments.
        teacher_writes: tensors that the teacher's forward changes, to be put back (see `Verification`).
        progress: show a progress bar with the relative loss of each block.
        start: values that tensors of the student begin with, by key.

    Returns: the losses, and the rank's last state.

    Errors: LossError and InputError as they occur; they name the block and step.
    """
    teacher, student = split.teacher.model, split.student.model
    working = _copy(student)
    history, started = History(), time.perf_counter()
    step = program.compile(0)
    total = recipe.steps or (batches.length * recipe.epochs if batches.length else None)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        own = dict(module_tensors(teacher).values())
        stack.enter_context(untouched(teacher, tensors=[own[path] for path in teacher_writes]))
        teacher.eval()
        working.train()
        tensors = (*working.named_parameters(), *working.named_buffers())
        _copy_all([(tensor, start[name]) for name, tensor in tensors if start and name in start])
        rank = Rank(split, working, recipe, seed)
        bar = stack.enter_context(
            tqdm(total=total, desc="distil", unit="step", disable=not progress, dynamic_ncols=True)
        )
        epochs = recipe.epochs if recipe.steps is None else recipe.steps
        for epoch in range(epochs):
            for batch in batches.epoch(epoch):
                pair = to_pair(batch)
                check_like(pair, split)
                rank.set_progress(history.steps / total if total else epoch / epochs)
                step(rank, pair)
                losses = rank.finish_step()
                history.add(losses)
                bar.set_postfix_str("relative loss " + " ".join(f"{v:.3f}" for v in losses.relative), refresh=False)
                bar.update()
                if history.steps == recipe.steps:
                    break
            history.epoch_ends.append(history.steps)
            history.seconds = time.perf_counter() - started
            rank.refresh_ties()
            write_back(working, student, rank.plain_weights())
            if history.steps == recipe.steps:
                break
    return history, rank


def write_back(source: nn.Module, target: nn.Module, instead: Mapping[str, Tensor]) -> None:
    """Copy every parameter and buffer of `source`, or the tensor of its name in `instead`, into the tensors of
    `target`, its twin; Ctrl-C waits for the end."""
    values = {**dict(source.named_parameters()), **dict(source.named_buffers()), **instead}
    pairs = [(tensor, values[name]) for name, tensor in (*target.named_parameters(), *target.named_buffers())]
    try:
        _copy_all(pairs)
    except KeyboardInterrupt:
        _copy_all(pairs)
        raise


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for to, value in pairs:
            to.copy_(value)


def _copy(student: nn.Module) -> nn.Module:
    attributes = Attributes(student)
    for module in student.modules():  # weight_norm keeps a computed tensor that deepcopy refuses
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not value.is_leaf:
                vars(module)[name] = value.detach()
    try:
        return copy.deepcopy(student)
    except Exception as error:
        raise InputError(
            "The student cannot be copied; it is trained on a copy so that an error leaves yours whole.",
            given=f"{type(error).__name__}: {error}",
            expected="a module that copy.deepcopy accepts",
            do="detach tensors that the model keeps as plain attributes",
        ) from error
    finally:
        attributes.restore()


def check_like(pair: Sequence[Arguments], split: Split) -> None:
    """A recording holds for the example's shapes (at any batch size) and constants.

    Errors: InputError for the teacher's and the student's arguments if they differ from those.
    """
    for whose, given, captured in zip(("teacher", "student"), pair, (split.teacher, split.student), strict=True):
        example, rows, batch = captured.example, captured.example.rows, given.rows
        same = (
            given.names_equal(example)
            and len(given.tensors) == len(example.tensors)
            and given.constants == example.constants
            and all(
                a.dtype == b.dtype
                and a.shape[1:] == b.shape[1:]
                and (a.shape[:1] == b.shape[:1] or (b.ndim and a.shape[0] == batch and b.shape[0] == rows))
                for a, b in zip(given.tensors, example.tensors, strict=True)
            )
        )
        if not same or batch < 1:
            raise InputError(
                f"A batch does not fit the {whose} as it was recorded.",
                given=given.describe(),
                expected=f"{example.describe()}, with any number of rows",
                do="pad or resize every batch alike, or set inputs=(for_teacher, for_student)",
            )
