"""How rank 0 keeps a training on disk: when a checkpoint is made, what is in it, and going on from one."""

from __future__ import annotations

import copy
import math
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..runtime import Rank
from .bars import Bars
from .callbacks import Run
from .collect import Collector
from .feed import Feed
from .history import History
from .jobs import Job
from .judge import ask
from .saving import BlockWriter, Restored, Writer
from .signals import Signals
from .stopping import Stopping
from .task import Task


class Kept:
    """The part of a `Loop` that is about checkpoints.

    Attributes:
        writer: of checkpoints; None: there are none.
        asked: whether a signal has ended the training, saved where it was.
    """

    task: Task
    history: History
    feed: Feed
    bars: Bars
    stopping: Stopping
    values: dict[str, Tensor]
    seconds: dict[tuple[int, int | None], float]
    ended: bool
    _run: Run
    _trains: bool
    _started: float

    def __init__(self, task: Task, writer: Writer | None, signals: Signals | None) -> None:
        self.writer, self._signals = writer, signals or Signals()
        self.asked = False
        self._blocks: BlockWriter | None = None
        self._writes: set[int] = set()  # ranks
        own = [task.recipe.for_block(b, len(task.split), task.split.logits).accumulate for b in range(len(task.split))]
        self._together = math.lcm(*own)  # batches after which no gradients wait for more

    def restore(self, found: Restored) -> None:
        """Go on from a checkpoint."""
        run = found.run
        ours = self.history
        self.history = self._run.history = History.from_json(run["history"])
        self.history.candidates = ours.candidates
        self.values = dict(found.values)
        self.feed.go_on(run["feed"])
        self.stopping.go_on(run["stopping"])
        self.seconds = run["seconds"]
        self._run.step, self._run.epoch = self.history.steps, self.feed.epoch
        self._trains = not run["ended"]
        self._started -= self.history.seconds
        self.bars.show(self.history)

    def _open(self, job: Job, rank: Rank) -> None:
        """Begin a program: these ranks write."""
        self._blocks = None if job.place is None else BlockWriter(rank, job.place)
        self._writes = {0, *rank.links.results}

    def _save_after_step(self) -> bool:
        """Whether a checkpoint is made after the step that comes now, and a place for it."""
        writer, step = self.writer, self.feed.done + 1
        if writer is None or writer.busy or self.feed.pending(self._together, more=1):
            return False
        if not (self._signals.asked or writer.due.at_step(step)):
            return False
        writer.begin(step, self._writes)
        return True

    def _save(self) -> None:
        """Copy where the training is; it is written once all ranks have written their blocks."""
        assert self.writer is not None
        assert self._blocks is not None
        step, feed, stopping = self.feed.done, self.feed.state(), copy.deepcopy(self.stopping.state())
        ended, seconds = self.ended, time.perf_counter() - self._started
        known = step, len(self.history.epoch_ends), len(self.history.scores)
        self._blocks.save(step)

        def run() -> dict[str, Any]:
            history = replace(self.history.until(*known), seconds=seconds).to_json()
            return {
                "stage": self.task.stage, "ended": ended, "history": history, "feed": feed, "stopping": stopping,
                "fingerprint": self.task.fingerprint, "before": self.task.before, "seconds": self.seconds,
            }  # fmt: skip

        self.writer.note(run, step)
        self.asked = self._signals.asked is not None and not ended

    def _look(self, collector: Collector, wait: bool = False) -> None:
        """Bring checkpoints on their way."""
        if self.writer is None or self._blocks is None:
            return
        found = [(0, *done) for done in self._blocks.finished(wait)] + collector.saved
        collector.saved = []
        for rank, step, failure in found:
            self.writer.reported(rank, step, failure)
        self.writer.look(self.history.steps, wait)

    def _save_at_epoch(self, rank: Rank, collector: Collector) -> None:
        writer, asked = self.writer, self._signals.asked
        if writer is None or not (asked or self.ended or writer.due.at_epoch(self.feed.epoch)):
            return
        self._look(collector, wait=True)  # one that was made on the way: the other ranks have written theirs
        writer.begin(self.feed.done, self._writes)
        ask(rank, "save", [torch.tensor(self.feed.done)])
        self._save()
