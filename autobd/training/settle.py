"""Give the student the best of its candidates, when all of them are trained."""

from __future__ import annotations

from dataclasses import replace

from ..blocks import BlockPair, Split
from ..blocks.candidates import assembled, install
from ..parts.candidates import name_of
from ..program import build
from ..ranks import Group
from ..recipe import Budget
from .choice import Scores, contest
from .loop import write_back
from .task import Task
from .train import Trained, train


def settle(task: Task, trained: Trained, budget: Budget) -> tuple[Task, Scores, tuple[str, ...]]:
    """Every candidate gets its trained weights; the chosen ones become the student's own modules, with what the rest of
    their blocks has learned beside them.

    Returns: the task with the student as it now is, what all candidates are worth, and what the user should know.
    """
    split, (found, notes) = task.split, contest(task.split, trained.losses, trained.seconds, budget)
    values, chosen = {**task.start, **trained.values}, found.chosen
    weights = []
    for i, c in enumerate(split.candidates):
        model, place = c.split.student.model, f"{c.path}."
        keys = [key for key, _ in (*model.named_parameters(), *model.named_buffers())]
        own = {key: values[name_of(split, i, key)] for key in keys if name_of(split, i, key) in values}
        write_back({k.removeprefix(place): v for k, v in own.items() if k.startswith(place)}, c.module)
        weights.append((c, own))

    def write() -> None:
        for c, own in weights:
            if (c.block, c.number) in chosen:
                write_back(own, split.student.model)

    try:
        whole = assembled(split, chosen)
        write()
    except KeyboardInterrupt:  # the student changes as a whole
        install(split, chosen)
        write()
        raise
    return replace(task, split=whole, start={}, replan=None), found, notes


def judge_again(task: Task, trained: Trained, group: Group) -> None:
    """Note what the student of `task` is worth as it is, in place of what it was before, and with batch norms
    recalibrated if that is asked for; by the plan that `trained` ended with."""
    if task.validation is None and not task.recalibrate:
        return
    folded = _folded(task.split)
    program = build(trained.program.plan, folded, own_rows=trained.program.own_rows)
    history = train(replace(task, split=folded, trains=False, callbacks=()), program, group).history
    scores, steps, epochs = trained.history.scores, trained.history.steps, len(trained.history.epoch_ends)
    before = [s for s in scores if s.what == "teacher" or s.step < steps]
    trained.history.scores = before + [replace(s, epoch=epochs, step=steps) for s in history.scores]


def _folded(split: Split) -> Split:
    """Without trained channel maps, which are in the student's weights by now."""

    def fixed(pair: BlockPair) -> BlockPair:
        kinds = ("matched" if a.kind == "trainable" else a.kind for a in pair.adapters)
        return replace(pair, adapters=tuple(replace(a, kind=k) for a, k in zip(pair.adapters, kinds, strict=True)))

    return replace(split, pairs=tuple(map(fixed, split.pairs)))
