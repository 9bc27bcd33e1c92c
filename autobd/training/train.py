"""`train(task, program, group)`: from one program to the next, until the training is done."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..errors import InputError
from ..graph.state import copied, module_tensors, untouched
from ..parts import BlockState, Part, parts_of
from ..parts.candidates import candidate_parts
from ..parts.channels import Place
from ..planner import Plan
from ..program import Program, Trace, again, evaluation
from ..ranks import Group
from .bars import bars
from .checkpoint import Checkpoint
from .history import History
from .jobs import follow, jobs
from .loop import Loop, copy_all
from .own_rows import OwnRows
from .saving import Restored, Writer
from .signals import Interrupted, signals
from .task import Task


@dataclass(frozen=True)
class Trained:
    """How it went.

    Attributes:
        history: losses; `program`: what ran last; `trace`: when every rank did what.
        maps: trained channel maps; `values`: what training has changed, by key in the student or of candidates.
        losses, seconds: of the blocks and candidates (see `contest`).
        notes: what the user should know.
    """

    history: History
    program: Program
    trace: Trace
    maps: dict[Place, Tensor]
    values: dict[str, Tensor]
    losses: list[float]
    seconds: dict[tuple[int, int | None], float]
    notes: tuple[str, ...] = ()


def train(
    task: Task,
    program: Program,
    group: Group,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    restored: Restored | None = None,
) -> Trained:
    """Train the student of `task.split` in place, on the ranks of `group`.

    The work is done on copies: the user's student changes at the end of each epoch and at no other time, so an error or
    Ctrl-C leaves it as it was at the last one.

    Arguments:
        progress: show a progress bar with the relative loss of each block.
        checkpoint: where to write the training while it goes on; `restored`: what to go on from.

    Errors: LossError and InputError as they occur, RankError for a rank that failed; they name the block and step.
    Interrupted where a signal has asked to end: a checkpoint is written.
    """
    recipe, batches = task.recipe, task.batches
    reader = batches.reader if isinstance(batches, OwnRows) else None
    start = {**task.start, **restored.values} if restored else task.start
    parts = _parts(task, program.plan, start)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        teacher = task.split.teacher.model
        tensors = dict(module_tensors(teacher).values())
        stack.enter_context(untouched(teacher, tensors=[tensors[path] for path in task.teacher_writes]))
        teacher.eval()
        total = recipe.steps or (batches.length * recipe.epochs if batches.length else None)
        if total is None and recipe.follows_progress:
            raise InputError(
                "The length of the training is not known, and a learning rate or block_input= goes by it.",
                given="data without a length",
                expected="a number of steps",
                do=f"pass {'Finish' if task.stage == 'finished' else 'Recipe'}(steps=...), or data with a length",
            )
        what = "finish" if task.stage == "finished" else "distil"
        writer = None if checkpoint is None else stack.enter_context(closing(Writer(checkpoint, task.steps_before)))
        heard = stack.enter_context(signals(checkpoint is not None))
        loop = Loop(task, program, stack.enter_context(bars(progress, total, what, program.plan)), writer, heard)
        states: dict[int, BlockState] = {}
        if restored is not None:
            loop.restore(restored)
            states = restored.states
            loop.program = again(program, task.split, stopped=loop.stopping.stopped)
        while True:
            models = _evaluations(task, loop.program.plan)
            place = None if writer is None else writer.place
            given = jobs(loop.program, parts, task.seed, reader, states, models, place)
            parts, states = [], {}
            own, found = given.pop(0), dict[int, dict[int, BlockState]]()
            states = group.run(
                partial(loop.run, own),
                {rank: partial(follow, given.pop(rank)) for rank in list(given)},
                loop.what,
                found,
            )
            if loop.moves_to is None:
                break
            for of_rank in found.values():
                states |= of_rank
            parts = _parts(task, loop.moves_to.plan, {**task.start, **loop.values})
            loop.go_over(loop.moves_to)
        if heard.asked is not None and writer is not None:
            raise Interrupted(heard.asked, writer.last)
    assert loop.trace is not None
    stopping = loop.stopping
    return Trained(
        loop.history,
        loop.program,
        loop.trace,
        loop.maps,
        loop.values,
        stopping.losses,
        loop.seconds,
        tuple(stopping.notes),
    )


def _parts(task: Task, plan: Plan, start: Mapping[str, Tensor]) -> list[Part]:
    student = copied(task.split.student.model)
    tensors = (*student.named_parameters(), *student.named_buffers())
    copy_all([(tensor, start[name]) for name, tensor in tensors if name in start])
    student.train()
    recomputed = [b for a in plan.assignments if a.recompute for b in a.blocks]
    parts = parts_of(task.split, student, task.recipe, recomputed)
    return [*parts, *candidate_parts(task.split, student, task.recipe, recomputed, parts, start)]


def _evaluations(task: Task, plan: Plan) -> dict[str, Program]:
    """Programs that run whole models, by name."""
    found = {}
    if task.validation is not None or task.recalibrate:
        found["student"] = evaluation(plan, task.split, "student")
    if task.validation is not None:
        found["teacher"] = evaluation(plan, task.split, "teacher")
    return found
