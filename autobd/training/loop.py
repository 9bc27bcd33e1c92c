"""Epochs: feed batches to the generated steps, and hand the weights back to the user's student at epoch ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..blocks import Split
from ..errors import InputError
from ..graph.state import copied, module_tensors, untouched
from ..parts import BlockState, Part, parts_of
from ..parts.channels import Place, between, plain_weights
from ..parts.form import Form
from ..planner import Plan
from ..program import Program, Trace, build
from ..ranks import EPOCH, STEP, STOP, Group, Header, Peers
from ..ranks.pickling import dumps
from ..ranks.waiting import Waiter
from ..recipe import Recipe
from ..runtime import Rank
from .collect import Collector
from .data import Batches
from .history import History
from .jobs import Job, blocks_run, by_name, follow, jobs
from .own_rows import OwnRows
from .pair import Pair
from .sizes import Sizes, check_like

_END = object()


@dataclass(frozen=True)
class Trained:
    """How it went: losses; the program that ran last, and when every rank did what; trained channel maps."""

    history: History
    program: Program
    trace: Trace
    maps: dict[Place, Tensor]


Replan = Callable[[Program, Trace], Program | None]


def train(
    split: Split,
    program: Program,
    recipe: Recipe,
    batches: Batches,
    to_pair: Callable[[Any], Pair],
    seed: int,
    progress: bool,
    group: Group,
    teacher_writes: Sequence[str] = (),
    start: Mapping[str, Tensor] | None = None,
    replan: Replan | None = None,
) -> Trained:
    """Train the student of `split` in place, on the ranks of `group`.

    The work is done on copies: the user's student changes at the end of each epoch and at no other time, so an error or
    Ctrl-C leaves it as it was at the last one.

    Arguments:
        to_pair: from a batch to the teacher's and the student's arguments, and the targets.
        progress: show a progress bar with the relative loss of each block.
        teacher_writes: tensors that the teacher's forward changes, to be put back (see `Verification`).
        start: values that tensors of the student begin with, by key.
        replan: asked at every epoch's end but the last: another program to go on with, or None; None: never.

    Errors: LossError and InputError as they occur, RankError for a rank that failed; they name the block and step.
    """
    reader = batches.reader if isinstance(batches, OwnRows) else None
    parts = _parts(split, recipe, program.plan, start or {})
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        teacher = split.teacher.model
        tensors = dict(module_tensors(teacher).values())
        stack.enter_context(untouched(teacher, tensors=[tensors[path] for path in teacher_writes]))
        teacher.eval()
        total = recipe.steps or (batches.length * recipe.epochs if batches.length else None)
        if total is None and recipe.epochs == 1 and recipe.block_input == "teacher-then-student":
            raise InputError(
                "The middle of the training is not known.",
                given="data without a length, one epoch",
                expected="a number of steps, for block_input='teacher-then-student'",
                do="pass Recipe(steps=...), or data with a length",
            )
        bar = stack.enter_context(
            tqdm(total=total, desc="distil", unit="step", disable=not progress, dynamic_ncols=True)
        )
        loop = Loop(split, program, recipe, batches, to_pair, bar, replan, start or {})
        states: dict[int, BlockState] = {}
        while True:
            given = jobs(loop.program, parts, seed, reader, states)
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
            parts = _parts(split, recipe, loop.moves_to.plan, {**loop.start, **loop.values})
            loop.program = loop.moves_to
    assert loop.trace is not None
    return Trained(loop.history, loop.program, loop.trace, loop.maps)


def _parts(split: Split, recipe: Recipe, plan: Plan, start: Mapping[str, Tensor]) -> list[Part]:
    student = copied(split.student.model)
    tensors = (*student.named_parameters(), *student.named_buffers())
    _copy_all([(tensor, start[name]) for name, tensor in tensors if name in start])
    student.train()
    return parts_of(split, student, recipe, [b for a in plan.assignments if a.recompute for b in a.blocks])


class Loop:
    """What rank 0 does: feed batches to the steps, collect losses, write the student at epoch ends."""

    def __init__(
        self,
        split: Split,
        program: Program,
        recipe: Recipe,
        batches: Batches,
        to_pair: Callable[[Any], Pair],
        bar: Any,
        replan: Replan | None,
        start: Mapping[str, Tensor],
    ) -> None:
        self.split, self.program, self.recipe, self.batches = split, program, recipe, batches
        self.to_pair, self.bar, self.replan, self.start = to_pair, bar, replan, start
        self.history = History()
        self.done = self.epoch = 0  # steps and epochs
        self.refreshed: list[int] = []
        self.values: dict[str, Tensor] = {}
        self.maps: dict[Place, Tensor] = {}
        self.trace: Trace | None = None
        self.moves_to: Program | None = None
        self._left: Iterator[Any] | None = None  # of the epoch's batches; or, with OwnRows, all of its order
        self._order: list[list[int]] | None = None
        self._in_epoch = 0
        self._held: list[Any] = []  # a batch that was read before a move
        self._started = time.perf_counter()

    def run(self, job: Job, peers: Peers) -> dict[int, BlockState]:
        """Train to the end, or until there is another program to go on with; then return what the rank's blocks go on
        from."""
        rank, step = job.start(peers), self.program.compile(0)
        sizes, self.refreshed = Sizes(self.split, self.program.batched), [r for r in job.refreshed if r != 0]
        collector = Collector(rank, len(self.split), self.history)
        recipe, self.moves_to = self.recipe, None
        epochs = recipe.epochs if recipe.steps is None else recipe.steps
        while self.epoch < epochs and self.done != recipe.steps and self.moves_to is None:
            for batch, rows in self._read(self._epoch(rank), peers):
                now = self.done / self.bar.total if self.bar.total else self.epoch / epochs
                own = recipe.own_input(now)
                if own > 0 and not self.program.own_input:
                    self._held.append(batch)
                    old = self.program
                    self.moves_to = build(old.plan, self.split, True, old.own_rows, old.targets)
                    break
                pair = self.to_pair(batch)
                check_like(pair, self.split)
                number, forms = sizes.of(pair)
                if forms is not None:
                    _announce(rank, number, forms, job)
                rank.begin(Header(STEP, self.done, rows or pair[0].rows, progress=now, sizes=number, own=own))
                rank.run(step, pair)
                collector.add(self.done, rank.finish_step())
                collector.look()
                self.done += 1
                self._in_epoch += 1
                self._show()
                if self.done == recipe.steps:
                    break
            self._collect(rank, collector)
            if self.moves_to is not None:
                break
            self._end_epoch()
            self.epoch += 1
            if self.replan is not None and self.epoch < epochs and self.done != recipe.steps:
                self.moves_to = self.replan(self.program, collector.trace())
        self.trace = collector.trace()
        rank.links.pass_on(STOP, self.done)
        ask = [torch.zeros(1)] if self.moves_to else []
        for sender in rank.links.announce.values():
            sender.send(Header(STOP, self.done), ask)
        rank.links.join()
        return rank.states() if self.moves_to else {}

    def what(self, rank: int) -> str:
        """What a rank does, for errors."""
        return f"{self.program.plan.blocks_of(rank)}; rank 0 is at step {self.done}"

    def _epoch(self, rank: Rank) -> Iterator[tuple[Any, int | None]]:
        """What rank 0 reads of each batch that is left of the epoch, and the rows of the batch where that is not all of
        it."""
        if not isinstance(self.batches, OwnRows):
            if self._left is None:
                self._left = self.batches.epoch(self.epoch)
            while self._held:
                yield self._held.pop(), None
            for batch in self._left:
                yield batch, None
            return
        self._held.clear()
        if self._order is None:
            self._order = self.batches.order()
        order = self._order[self._in_epoch :]
        for sender in rank.links.announce.values():
            sender.send(Header(STEP), [_bytes(order)])
        spans = [self.program.span(0, len(batch)) for batch in order]
        read = self.batches.reader.read([batch[a:b] for batch, (a, b) in zip(order, spans, strict=True)])
        yield from zip(read, map(len, order), strict=True)

    def _read(self, batches: Iterator[Any], peers: Peers) -> Iterator[Any]:
        """The batches. Where other ranks wait for them, each is read on another thread, so that a loader that stalls is
        an error in time, and a rank that dies meanwhile is noticed."""
        if peers.size == 1:
            yield from batches
            return

        def following() -> tuple[Any, BaseException | None]:
            try:
                return next(batches, _END), None
            except BaseException as error:
                return None, error

        waiter = Waiter()
        try:
            while True:
                what = f"rank 0 for the loader's next batch, step {self.done}"
                batch, error = waiter.submit(following, what).result(peers.patience)
                if error is not None:
                    raise error
                if batch is _END:
                    return
                yield batch
        finally:
            waiter.close()

    def _collect(self, rank: Rank, collector: Collector) -> None:
        """Bring what training has changed together, between two steps."""
        rank.links.pass_on(EPOCH, self.done)
        rank.end_epoch()
        self.values = values = collector.weights()
        rank.refresh(values)
        for other in self.refreshed:
            rank.links.announce[other].send(Header(EPOCH, self.done), by_name(values))
        self.maps = between(self.split, values)

    def _end_epoch(self) -> None:
        self._left, self._order, self._in_epoch = None, None, 0
        self.history.epoch_ends.append(self.done)
        values = self.values
        write_back({**self.start, **values, **plain_weights(self.split, values)}, self.split.student.model)
        self.history.seconds = time.perf_counter() - self._started
        self._show()

    def _show(self) -> None:
        if self.history.steps:
            losses = " ".join(f"{v:.3f}" for v in self.history.relative[-1])
            self.bar.set_postfix_str(f"relative loss {losses}", refresh=False)
        self.bar.update(self.history.steps - self.bar.n)


def _announce(rank: Rank, number: int, forms: Mapping[int, Form], job: Job) -> None:
    """Give every rank its blocks for other sizes of inputs."""
    rank.learn(number, forms)
    for other, sender in rank.links.announce.items():
        own = {b: forms[b] for b in blocks_run(job.program.plan, other)}
        sender.send(Header(STEP, sizes=number), [_bytes(own)])


def _bytes(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)


def write_back(values: Mapping[str, Tensor], target: nn.Module) -> None:
    """Copy `values` into the parameters and buffers of these names; Ctrl-C waits for the end."""
    tensors = (*target.named_parameters(), *target.named_buffers())
    pairs = [(tensor, values[name]) for name, tensor in tensors if name in values]
    try:
        _copy_all(pairs)
    except KeyboardInterrupt:
        _copy_all(pairs)
        raise


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for to, value in pairs:
            to.copy_(value)
