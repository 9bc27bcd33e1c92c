"""Train the whole student end to end, after its blocks: as one block, the batch split over all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..blocks import split
from ..cluster import Cluster
from ..costs import analytic
from ..planner import plan
from ..program import Program, build
from ..recipe import Finish, TargetLoss
from .own_rows import OwnRows
from .task import Task


def finishing(task: Task, how: Finish, batch: Any, cluster: Cluster) -> tuple[Task, Program]:
    """What to train, and by which program, once `task` is done.

    Arguments:
        batch: the first one.

    Errors, before anything is trained: InputError for a batch without the targets that it needs, PlanError where both
    models do not fit into a rank's memory.
    """
    old, recipe = task.split, how.recipe(task.recipe)
    to_pair = replace(task.to_pair, wanted=recipe.target_loss is not None)
    rows = to_pair(batch)[1].rows
    whole = split(
        old.teacher.model,
        old.student.model,
        (old.teacher.example, old.student.example),
        inputs=(lambda pair: pair[0], lambda pair: pair[1]),
        blocks=1,
        logits=recipe.logits,
    )
    verification = whole.verify()
    batches = task.batches.later(to_pair) if isinstance(task.batches, OwnRows) else task.batches
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
        trains=True,
        stage="finished",
    )
    chosen = plan(analytic(whole, cluster, rows), "ir")
    alone = isinstance(recipe.target_loss, TargetLoss) and recipe.target_loss.alone
    program = build(chosen, whole, own_rows=isinstance(batches, OwnRows), targets=to_pair.wanted, taught=not alone)
    return own, program
