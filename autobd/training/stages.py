"""The stages of a training: its blocks, the choice of candidates, and the whole student end to end."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..blocks.candidates import assembled
from ..checkpoints import Saved
from ..errors import CheckpointError
from ..program import Program, Trace
from ..ranks import Group
from ..recipe import Budget, Finish
from ..runtime import statistics_note
from .checkpoint import Checkpoint
from .choice import Score, Scores
from .fingerprint import check, fingerprint
from .finish import finishing
from .history import History
from .saving import Restored
from .settle import judge_again, settle
from .task import Task
from .train import Trained, train


@dataclass(frozen=True)
class Stages:
    """What is to be done.

    Attributes:
        task, program: of the blocks; `recalibrate`: batches for that in the end.
        finish: how to train end to end after them; None: not at all. `batch`: the first one.
        budget: for the choice of candidates.
        checkpoint: where to write; `saved`: what to go on from.
    """

    task: Task
    program: Program
    recalibrate: int
    finish: Finish | None
    batch: Any
    budget: Budget
    checkpoint: Checkpoint | None
    saved: Saved | None

    def run(self, group: Group, progress: bool) -> Done:
        """Errors: as `train`; CheckpointError for a checkpoint of another training. What cannot be is refused before
        anything is trained."""
        task = self._described(self.task)
        several = bool(task.split.candidates)
        restored = None if self.saved is None else Restored.of(self.saved)
        later = restored is not None and restored.run["stage"] == "finished"
        if restored is not None:
            before = restored.run["before"]["fingerprint"] if later else restored.run["fingerprint"]
            check(restored.saved, before, task.fingerprint)
        last = self._finishing(task, group)
        notes: tuple[str, ...] = ()
        if restored is not None:
            notes = (f"went on from {restored.saved.path}, after {restored.saved.step} steps",)
        scores: Scores | None = None
        if restored is not None and later:
            if last is None:
                raise CheckpointError(
                    f"The checkpoint {restored.saved.path} was made while the whole student was trained.",
                    given="finish=None",
                    do="pass finish= as then",
                )
            trained = _before(restored, self.program)
            rows = restored.run["before"]["candidates"]
            if rows:
                scores = Scores(tuple(Score(**row) for row in rows))
                task = replace(task, split=assembled(task.split, scores.chosen))
        else:
            own = replace(task, recalibrate=0 if several else self.recalibrate)
            trained = train(own, self.program, group, progress, self.checkpoint, restored)
            if several:
                task, scores, more = settle(task, trained, self.budget)
                task, notes = replace(task, recalibrate=self.recalibrate), (*notes, *more)
                judge_again(task, trained, group)
        if last is not None:
            if several:
                last = self._finishing(task, group)
                assert last is not None
            split_batch = statistics_note(last[0].split, last[1].plan)
            notes = notes if split_batch is None else (*notes, f"end to end: {split_batch}")
            kept = {
                "fingerprint": task.fingerprint,
                "history": trained.history.to_json(),
                "candidates": [asdict(s) for s in scores.rows] if scores is not None else [],
            }
            whole = replace(self._described(last[0]), before=kept, steps_before=trained.history.steps)
            if later and restored is not None:
                check(restored.saved, restored.run["fingerprint"], whole.fingerprint)
            then = restored if later else None
            trained.history.finish = train(whole, last[1], group, progress, self.checkpoint, then).history
            trained.history.scores += trained.history.finish.scores
        return Done(task, trained, scores, (*notes, *trained.notes))

    def _described(self, task: Task) -> Task:
        """With what checkpoints are compared by, where there are any."""
        if self.checkpoint is None and self.saved is None:
            return task
        return replace(task, fingerprint=fingerprint(task.split, task.recipe, task.seed, task.batches.length))

    def _finishing(self, task: Task, group: Group) -> tuple[Task, Program] | None:
        return None if self.finish is None else finishing(task, self.finish, self.batch, group.cluster)


@dataclass(frozen=True)
class Done:
    """What came of it: `task`: with the student as it is now; `trained`: its blocks, with the history of all stages;
    `scores`: of candidates; `notes`: what the user should know."""

    task: Task
    trained: Trained
    scores: Scores | None
    notes: tuple[str, ...]


def _before(restored: Restored, program: Program) -> Trained:
    """The blocks' training, which a checkpoint of the stage after it remembers."""
    history = History.from_json(restored.run["before"]["history"])
    return Trained(history, program, Trace(program, (), ()), {}, {}, [], {})
