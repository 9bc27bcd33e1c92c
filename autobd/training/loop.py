"""What rank 0 does: feed batches to the steps, collect losses, judge and write the student at epoch ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import islice

import torch
from torch import Tensor, nn

from ..parts import BlockState
from ..parts.channels import Place, between, plain_weights
from ..program import Program, Trace, again
from ..ranks import EPOCH, STEP, STOP, Header, Peers
from ..runtime import Rank
from .bars import Bars
from .callbacks import Run, call
from .choice import forward_seconds
from .collect import Collector
from .feed import Feed
from .history import History, Scored
from .jobs import Announcer, Job, by_name
from .judge import Judge, ask, evaluations
from .kept import Kept
from .saving import Writer
from .signals import Signals
from .sizes import Sizes, check_like
from .stopping import Stopping
from .task import Task


class Loop(Kept):
    """Rank 0's side of a run, from one program to the next.

    Attributes:
        values: what training has changed so far, by key in the student; `maps`: channel maps, multiplied.
        seconds: of every student's forward, where there are candidates (see `forward_seconds`).
        moves_to: the program to go on with; None at the end.
    """

    def __init__(
        self, task: Task, program: Program, bars: Bars, writer: Writer | None = None, signals: Signals | None = None
    ) -> None:
        super().__init__(task, writer, signals)
        self.task, self.program, self.bars = task, program, bars
        self.history, self.feed = History(), Feed(task.batches)
        self.history.candidates = [(c.block, c.number) for c in task.split.candidates]
        self.values: dict[str, Tensor] = {}
        self.maps: dict[Place, Tensor] = {}
        self.seconds: dict[tuple[int, int | None], float] = {}
        self.trace: Trace | None = None
        self.moves_to: Program | None = None
        self._started = time.perf_counter()
        self.stopping = Stopping(task.split, task.recipe)
        self._trains = task.trains
        self._run = Run(task.stage, self.history, program.plan)
        call(task.callbacks, "on_start", self._run)

    def run(self, job: Job, peers: Peers) -> dict[int, BlockState]:
        """Train to the end, or until there is another program to go on with; then return what the rank's blocks go on
        from."""
        rank = job.start(peers)
        collector = Collector(rank, self.history)
        try:
            return self._run_program(rank, job, peers, collector)
        except Exception:
            self._look(collector, wait=True)  # a checkpoint that is all written
            raise
        finally:
            if self._blocks is not None:
                self._blocks.close()

    def _run_program(self, rank: Rank, job: Job, peers: Peers, collector: Collector) -> dict[int, BlockState]:
        task, feed, recipe = self.task, self.feed, self.task.recipe
        step, sizes = self.program.compile(0), Sizes(task.split, self.program.batched)
        announce = Announcer(rank, job)
        by_model = evaluations(rank, job.evaluations)
        judge = Judge(rank, by_model, task.split, sizes, task.bare, announce) if by_model else None
        self._open(job, rank)
        self.moves_to = None
        over = False
        while not over:
            for batch, rows in () if self._goes_over or not self._trains else feed.rest(rank, peers):
                now, save = self._progress, self._save_after_step()
                pair = task.to_pair(batch)
                check_like(pair, task.split)
                number, forms = sizes.of(pair)
                announce(number, forms, rank.links.announce)
                own = recipe.own_input(now)
                rank.begin(
                    Header(STEP, feed.done, rows or pair[0].rows, progress=now, sizes=number, own=own, save=save)
                )
                rank.run(step, pair)
                collector.add(feed.done, rank.finish_step())
                collector.look()
                self._tell_steps()
                feed.used()
                self.bars.show(self.history)
                if save:
                    self._save()
                self._look(collector)
                if feed.done == recipe.steps or self._run.stop or self._goes_over or self.asked:
                    break
            self._collect(rank, job, collector)
            if self.asked:
                ask(rank, "done")
            elif not self._trains and task.trains:  # it had ended before
                self._write()
                ask(rank, "done")
            elif self._goes_over:
                self.moves_to = again(self.program, task.split, own_input=True)
                ask(rank, "done")
            else:
                self._end_epoch(rank, job, collector, judge)
            over = self.asked or self.moves_to is not None
            over = over or (self.ended and (feed.done > 0 or not task.trains))
        self.trace = collector.trace()
        rank.links.pass_on(STOP, feed.done)
        wanted = [torch.zeros(1)] if self.moves_to else []
        for sender in rank.links.announce.values():
            sender.send(Header(STOP, feed.done), wanted)
        for evaluation in by_model.values():
            evaluation.stop(feed.done)
        collector.rest()
        self._look(collector, wait=True)
        rank.links.join()
        return rank.states() if self.moves_to else {}

    def go_over(self, program: Program) -> None:
        """Run another program next."""
        self.program = program
        self.bars.follow(program.plan)

    @property
    def ended(self) -> bool:  # type: ignore[override]
        recipe = self.task.recipe
        done = self.feed.done == recipe.steps or (recipe.steps is None and self.feed.epoch >= recipe.epochs)
        return done or self._run.stop or not self._trains

    def what(self, rank: int) -> str:
        """What a rank does, for errors."""
        return f"{self.program.plan.blocks_of(rank)}; rank 0 is at step {self.feed.done}"

    @property
    def _progress(self) -> float:
        """0 to 1 through the training; 0 where its length is not known, and nothing depends on it."""
        return self._progress_at(self.feed.done)

    def _progress_at(self, step: int) -> float:
        return step / self.bars.total if self.bars.total else 0.0

    @property
    def _goes_over(self) -> bool:
        """Whether the next step gives blocks the student's own boundary, which this program does not bring them. Never
        between batches that one step of an optimizer is made of: their gradients do not move."""
        if self.program.own_input or self._progress >= 1 or self.feed.pending(self._together):
            return False
        return self.task.recipe.own_input(self._progress) > 0

    def _collect(self, rank: Rank, job: Job, collector: Collector) -> None:
        """Bring what training has changed together, between two steps."""
        rank.links.pass_on(EPOCH, self.feed.done)
        rank.end_epoch()
        self.values = values = collector.weights()
        self._tell_steps()
        rank.refresh(values)
        for other in job.refreshed:
            if other != 0:
                rank.links.announce[other].send(Header(EPOCH, self.feed.done), by_name(values))

    def _end_epoch(self, rank: Rank, job: Job, collector: Collector, judge: Judge | None) -> None:
        self.history.epoch_ends.append(self.feed.done)
        self.feed.end_epoch()
        first, last = [0, *self.history.epoch_ends][-2], self.feed.done - 1
        own = [self.task.recipe.own_input(self._progress_at(step)) for step in (first, last)]
        self.stopping.end_epoch(self.history, self.values, (own[0], own[1]))
        if len(self.stopping.stopped) == len(self.stopping.names):
            self._run.stop = True
        ended = self.ended
        self._take_stock(rank, judge, collector)
        self.history.seconds = time.perf_counter() - self._started
        self.bars.show(self.history)
        self._tell("on_epoch")
        if self.ended and not ended:  # by a callback
            self._take_stock(rank, judge, collector)
        self._save_at_epoch(rank, collector)
        ask(rank, "done")
        if self.history.candidates:
            self.seconds |= forward_seconds(collector.trace())
        if self.ended:
            self._tell("on_end")
        self.moves_to = None if self.ended or self.asked else self._next(collector)

    def _next(self, collector: Collector) -> Program | None:
        """What to go on with at an epoch's end; None: as before."""
        task, stopped = self.task, self.stopping.stopped
        if task.replan is not None:
            return task.replan(self.program, collector.trace(), stopped)
        return again(self.program, task.split, stopped=stopped) if stopped != self.program.stopped else None

    def _take_stock(self, rank: Rank, judge: Judge | None, collector: Collector) -> None:
        """Write the student and judge it; at the end with the best weights of its blocks."""
        if self.ended:
            self._keep_best(rank)
        self._write()
        if judge is not None:
            self._judge(judge, collector)

    def _judge(self, judge: Judge, collector: Collector) -> None:
        task, validation = self.task, self.task.validation
        scored = self.history.of(task.stage)
        done = scored and scored[-1].step == self.feed.done and not self.stopping.best()
        if validation is not None and not done and (self.ended or self.feed.epoch % validation.every == 0):
            if task.stage == "assembled" and task.trains and not self.history.of("teacher"):
                self._note("teacher", judge.score(validation, "teacher", task.to_pair.targets_of))
            self._note(task.stage, judge.score(validation, "student", task.to_pair.targets_of))
        if task.recalibrate and self.ended:
            judge.recalibrate(islice(task.batches.epoch(self.feed.epoch), task.recalibrate))
            self.values = collector.weights()
            self._write()
            if validation is not None:
                self._note("recalibrated", judge.score(validation, "student", task.to_pair.targets_of))

    def _tell_steps(self) -> None:
        """Callbacks hear of every step whose losses have come."""
        while self._run.step < self.history.steps:
            self._run.step += 1
            call(self.task.callbacks, "on_step", self._run)

    def _tell(self, hook: str) -> None:
        self._run.epoch, self._run.plan = self.feed.epoch, self.program.plan
        call(self.task.callbacks, hook, self._run)

    def _note(self, what: str, values: dict[str, float]) -> None:
        self.history.scores.append(Scored(what, self.feed.epoch, self.feed.done, values))

    def _keep_best(self, rank: Rank) -> None:
        """Go back to each block's best weights, on all ranks, where they are kept."""
        if best := self.stopping.best():
            self.values |= best
            ask(rank, "restore", by_name(self.values))
            rank.restore(self.values)
            rank.refresh(self.values)

    def _write(self) -> None:
        """Give the user's student what training has made."""
        split, values = self.task.split, self.values
        self.maps = between(split, values)
        write_back({**self.task.start, **values, **plain_weights(split, values)}, split.student.model)


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
