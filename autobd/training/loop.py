"""What rank 0 does: feed batches to the steps, collect losses, judge and write the student at epoch ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..parts import BlockState
from ..parts.channels import Place, between, plain_weights
from ..parts.form import Form
from ..program import Program, Trace, build
from ..ranks import EPOCH, STEP, STOP, Header, Peers
from ..runtime import Rank
from .collect import Collector
from .feed import Feed, as_bytes
from .history import History, Scored
from .jobs import Job, blocks_run, by_name
from .judge import Judge, evaluations
from .sizes import Sizes, check_like
from .task import Task


class Loop:
    """Rank 0's side of a run, from one program to the next.

    Attributes:
        values: what training has changed so far, by key in the student; `maps`: channel maps, multiplied.
        moves_to: the program to go on with; None at the end.
    """

    def __init__(self, task: Task, program: Program, bar: Any) -> None:
        self.task, self.program, self.bar = task, program, bar
        self.history, self.feed = History(), Feed(task.batches)
        self.values: dict[str, Tensor] = {}
        self.maps: dict[Place, Tensor] = {}
        self.trace: Trace | None = None
        self.moves_to: Program | None = None
        self._started = time.perf_counter()

    def run(self, job: Job, peers: Peers) -> dict[int, BlockState]:
        """Train to the end, or until there is another program to go on with; then return what the rank's blocks go on
        from."""
        task, feed, recipe = self.task, self.feed, self.task.recipe
        rank, step = job.start(peers), self.program.compile(0)
        sizes, collector = Sizes(task.split, self.program.batched), Collector(rank, len(task.split), self.history)
        announce = partial(_announce, rank, job)
        by_model = evaluations(rank, job.evaluations)
        judge = Judge(rank, by_model, task.split, sizes, task.bare, announce) if by_model else None
        self.moves_to = None
        while not self.ended and self.moves_to is None:
            for batch, rows in feed.rest(rank, peers):
                now = self._progress()
                own = recipe.own_input(now)
                if own > 0 and not self.program.own_input:
                    feed.put_back(batch)
                    old = self.program
                    self.moves_to = build(old.plan, task.split, True, old.own_rows, old.targets)
                    break
                pair = task.to_pair(batch)
                check_like(pair, task.split)
                number, forms = sizes.of(pair)
                if forms is not None:
                    announce(number, forms)
                rank.begin(Header(STEP, feed.done, rows or pair[0].rows, progress=now, sizes=number, own=own))
                rank.run(step, pair)
                collector.add(feed.done, rank.finish_step())
                collector.look()
                feed.used()
                self._show()
                if feed.done == recipe.steps:
                    break
            self._collect(rank, job, collector)
            if self.moves_to is None:
                self._end_epoch(rank, job, collector, judge)
            elif judge is not None:
                judge.ask("done")
        self.trace = collector.trace()
        rank.links.pass_on(STOP, feed.done)
        ask = [torch.zeros(1)] if self.moves_to else []
        for sender in rank.links.announce.values():
            sender.send(Header(STOP, feed.done), ask)
        for evaluation in by_model.values():
            evaluation.stop(feed.done)
        rank.links.join()
        return rank.states() if self.moves_to else {}

    @property
    def ended(self) -> bool:
        recipe = self.task.recipe
        return self.feed.done == recipe.steps or (recipe.steps is None and self.feed.epoch >= recipe.epochs)

    def what(self, rank: int) -> str:
        """What a rank does, for errors."""
        return f"{self.program.plan.blocks_of(rank)}; rank 0 is at step {self.feed.done}"

    def _progress(self) -> float:
        if self.bar.total:
            return float(self.feed.done / self.bar.total)
        return self.feed.epoch / self.task.recipe.epochs

    def _collect(self, rank: Rank, job: Job, collector: Collector) -> None:
        """Bring what training has changed together, between two steps."""
        rank.links.pass_on(EPOCH, self.feed.done)
        rank.end_epoch()
        self.values = values = collector.weights()
        rank.refresh(values)
        for other in job.refreshed:
            if other != 0:
                rank.links.announce[other].send(Header(EPOCH, self.feed.done), by_name(values))
        self.maps = between(self.task.split, values)

    def _end_epoch(self, rank: Rank, job: Job, collector: Collector, judge: Judge | None) -> None:
        self.history.epoch_ends.append(self.feed.done)
        self.feed.end_epoch()
        self._write()
        if judge is not None:
            self._judge(judge, collector)
            judge.ask("done")
        self.history.seconds = time.perf_counter() - self._started
        self._show()
        if self.task.replan is not None and not self.ended:
            self.moves_to = self.task.replan(self.program, collector.trace())

    def _judge(self, judge: Judge, collector: Collector) -> None:
        task, validation = self.task, self.task.validation
        if validation is not None and (self.ended or self.feed.epoch % validation.every == 0):
            if not self.history.of("teacher"):
                self._note("teacher", judge.score(validation, "teacher", task.to_pair.targets_of))
            self._note("assembled", judge.score(validation, "student", task.to_pair.targets_of))
        if task.recalibrate and self.ended:
            judge.recalibrate(islice(task.batches.epoch(self.feed.epoch), task.recalibrate))
            self.values = collector.weights()
            self._write()
            if validation is not None:
                self._note("recalibrated", judge.score(validation, "student", task.to_pair.targets_of))

    def _note(self, what: str, values: dict[str, float]) -> None:
        self.history.scores.append(Scored(what, self.feed.epoch, self.feed.done, values))

    def _write(self) -> None:
        split, values = self.task.split, self.values
        write_back({**self.task.start, **values, **plain_weights(split, values)}, split.student.model)

    def _show(self) -> None:
        if self.history.steps:
            losses = " ".join(f"{v:.3f}" for v in self.history.relative[-1])
            self.bar.set_postfix_str(f"relative loss {losses}", refresh=False)
        self.bar.update(self.history.steps - self.bar.n)


def _announce(rank: Rank, job: Job, number: int, forms: Mapping[int, Form]) -> None:
    """Give every rank its blocks for other sizes of inputs."""
    rank.learn(number, forms)
    for other, sender in rank.links.announce.items():
        own = {b: forms[b] for b in blocks_run(job.program.plan, other)}
        sender.send(Header(STEP, sizes=number), [as_bytes(own)])


def write_back(values: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy `values` into the parameters and buffers of these names; Ctrl-C waits for the end."""
    tensors = (*target.named_parameters(), *target.named_buffers())
    pairs = [(tensor, values[name]) for name, tensor in tensors if name in values]
    try:
        copy_all(pairs)
    except KeyboardInterrupt:
        copy_all(pairs)
        raise


def copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Each second tensor's values into the first one."""
    with torch.no_grad():
        for to, value in pairs:
            to.copy_(value)
