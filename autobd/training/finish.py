"""Train the whole student end to end, after its blocks: as one block, the batch split over all ranks."""

from __future__ import annotations

import copy
from dataclasses import replace

from ..blocks import split
from ..costs import analytic
from ..planner import plan
from ..program import build
from ..ranks import Group
from ..recipe import Finish
from .own_rows import OwnRows
from .task import Task
from .train import Trained, train


def train_whole(task: Task, how: Finish, batch_size: int, group: Group, progress: bool) -> Trained:
    """Go on from what `task` has left in the student. Arguments: `batch_size`: rows of a whole batch.

    Errors: PlanError where both models do not fit into a rank's memory; else as `train`.
    """
    old, recipe = task.split, how.recipe(task.recipe)
    whole = split(
        old.teacher.model,
        old.student.model,
        (old.teacher.example, old.student.example),
        inputs=(lambda pair: pair[0], lambda pair: pair[1]),
        blocks=1,
        logits=recipe.logits,
    )
    verification = whole.verify()
    to_pair = replace(task.to_pair, wanted=recipe.target_loss is not None)
    batches = task.batches
    if isinstance(batches, OwnRows):
        batches = copy.copy(batches)
        batches.reader = replace(batches.reader, to_pair=to_pair)
    own = replace(
        task,
        split=whole,
        recipe=recipe,
        batches=batches,
        to_pair=to_pair,
        seed=task.seed + 1,
        teacher_writes=tuple(verification.teacher_writes),
        start={},
        replan=None,
        recalibrate=0,
        stage="finished",
    )
    chosen = plan(analytic(whole, group.cluster, batch_size), "ir")
    program = build(chosen, whole, own_rows=isinstance(batches, OwnRows), targets=to_pair.wanted)
    return train(own, program, group, progress)
