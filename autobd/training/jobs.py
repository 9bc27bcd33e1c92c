"""What each rank is given to do, and what the ranks other than the caller's do with it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..parts import BlockState, Part, ShareLosses
from ..parts.form import Form
from ..planner import Plan
from ..program import Program
from ..ranks import EPOCH, SAVED, STEP, Header, Peers, Sender
from ..ranks.pickling import loads
from ..runtime import Rank
from .feed import as_bytes
from .judge import PHASES, evaluations, serve
from .own_rows import Reader, RowsOf
from .saving import BlockWriter, Place

_REPORT_EVERY = 0.05  # seconds


@dataclass(frozen=True)
class Job:
    """One rank's part of a run.

    Attributes:
        rank: its number; `program`: what all ranks do; `seed`: as for `distill`.
        parts: its block pairs, and candidates for its blocks, by number.
        refreshed: ranks that hold copies of weights that another rank trains.
        reader: how the rank reads its own rows, with `Program.own_rows`.
        states: what its blocks go on from, if they have been trained before.
        evaluations: programs that run whole models between two steps of training, by name.
        place: where its blocks are written for checkpoints; None: there are none.
    """

    rank: int
    program: Program
    parts: Mapping[int, Part]
    seed: int
    refreshed: tuple[int, ...]
    reader: Reader | None = None
    states: Mapping[int, BlockState] = field(default_factory=dict)
    evaluations: Mapping[str, Program] = field(default_factory=dict)
    place: Place | None = None

    def start(self, peers: Peers) -> Rank:
        return Rank(self.rank, self.program, self.parts, self.seed, peers, self.states)


def blocks_run(plan: Plan, rank: int) -> list[int]:
    """The blocks of which a rank runs the teacher or the student."""
    own = [a for a in plan.assignments if rank in a.ranks]
    return sorted({b for a in own for b in (*a.blocks, *plan.teacher_blocks(a))})


class Announcer:
    """Gives other ranks their blocks for other sizes of inputs, before the first step that needs them there."""

    def __init__(self, rank: Rank, job: Job) -> None:
        self._rank, self._plan = rank, job.program.plan
        self._forms: dict[int, Mapping[int, Form]] = {}
        self._told: set[tuple[int, int]] = set()  # (rank, sizes)

    def __call__(self, number: int, forms: Mapping[int, Form] | None, ranks: Iterable[int]) -> None:
        """Arguments: `number`: of the sizes; `forms`: the blocks, where they are new; `ranks`: that take the step."""
        if forms is not None:
            self._forms[number] = forms
            self._rank.learn(number, forms)
        for rank in ranks:
            if rank != 0 and number in self._forms and (rank, number) not in self._told:
                self._told.add((rank, number))
                blocks = blocks_run(self._plan, rank)
                own = {n: form for n, form in self._forms[number].items() if form.block in blocks}
                self._rank.links.announce[rank].send(Header(STEP, sizes=number), [as_bytes(own)])


def jobs(
    program: Program,
    parts: Sequence[Part],
    seed: int,
    reader: Reader | None = None,
    states: Mapping[int, BlockState] | None = None,
    evaluations: Mapping[str, Program] | None = None,
    place: Place | None = None,
) -> dict[int, Job]:
    """The job of every rank that has something to do, and of rank 0."""
    plan = program.plan
    found = {}
    for rank, instructions in enumerate(program.ranks):
        if not instructions and rank != 0:
            continue
        trained = {b for a in plan.assignments if rank in a.ranks for b in a.blocks}
        own = {b: parts[b] if b in trained else replace(parts[b], student=None) for b in blocks_run(plan, rank)}
        own |= {number: parts[number] for b in sorted(trained) for number in program.trained_in(b)}
        known = {b: state for b, state in (states or {}).items() if b in own}
        found[rank] = Job(rank, program, own, seed, (), reader, known, evaluations or {}, place)
    refreshed = tuple(r for r, job in found.items() if any(p.student and p.student.stale for p in job.parts.values()))
    return {r: replace(job, refreshed=refreshed) for r, job in found.items()}


def follow(job: Job, peers: Peers) -> Mapping[int, BlockState]:
    """Run steps as they come, until the rank before says stop; send losses and, at epoch ends, weights to rank 0.

    Returns: what its blocks go on from, if rank 0 asks for that.
    """
    rank, step = job.start(peers), job.program.compile(job.rank)
    links, by_model = rank.links, evaluations(rank, job.evaluations)
    assert links.report is not None
    assert links.news is not None
    losses = LossSender(links.report)
    rows = RowsOf(job.reader, job.program, job.rank) if job.reader else None
    blocks = BlockWriter(rank, job.place) if job.place else None
    ended = True

    def tell(wait: bool = False) -> None:
        for step, failure in blocks.finished(wait) if blocks else ():
            losses.send()
            links.report.send(Header(SAVED, step), [as_bytes(failure)])  # type: ignore[union-attr]

    while True:
        coming = links.next()
        if coming.kind == STEP:
            if rows and ended:
                rows.start(loads(bytes(links.news.take()[1][0].numpy())))
                ended = False
            if not rank.knows(coming.sizes):
                rank.learn(coming.sizes, loads(bytes(links.news.take()[1][0].numpy())))
            rank.run(step, rows.of(coming.batch) if rows else None)
            losses.add(coming.step, rank.finish_step())
            if coming.save and blocks:
                blocks.save(coming.step + 1)
            tell()
            continue
        losses.send()
        tell(wait=True)  # rank 0 may be about to make another checkpoint
        links.pass_on(coming.kind, coming.step)
        ended = True
        if coming.kind != EPOCH:
            break
        rank.end_epoch()
        links.report.send(coming, [rank.times(), *by_name(rank.trained())])
        if job.rank in job.refreshed:
            rank.refresh(named(links.news.take()[1]))
        while True:
            number, *tensors = links.news.take()[1]
            phase = PHASES[int(number)]
            if phase == "done":
                break
            if phase == "save":
                assert blocks is not None
                blocks.save(int(tensors[0]))
                continue
            if phase == "restore":
                values = named(tensors)
                rank.restore(values)
                rank.refresh(values)
                continue
            serve(rank, by_model, phase)
            if phase == "recalibrate":
                links.report.send(coming, [rank.times(), *by_name(rank.trained())])
    links.report.send(coming)
    for evaluation in by_model.values():
        evaluation.stop(coming.step)
    states = rank.states() if links.news.take()[1] else {}
    links.join()
    if blocks:
        blocks.close()
    return states


def by_name(values: Mapping[str, Tensor]) -> list[Tensor]:
    """Named tensors as those of a message: the names first."""
    names = bytearray(json.dumps(list(values)).encode())
    return [torch.frombuffer(names, dtype=torch.uint8), *values.values()]


def named(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """What `by_name` was given."""
    names = json.loads(bytes(tensors[0].tolist()))
    return dict(zip(names, tensors[1:], strict=True))


class LossSender:
    """Losses on their way to rank 0: of several steps at once where these are short."""

    def __init__(self, sender: Sender) -> None:
        self._sender, self._rows, self._sent = sender, list[list[float]](), 0.0

    def add(self, step: int, losses: Mapping[int, ShareLosses]) -> None:
        self._rows += [[step, block, s.loss, s.relative, s.weight] for block, s in losses.items()]
        if time.monotonic() - self._sent > _REPORT_EVERY:
            self.send()

    def send(self) -> None:
        """Send what there is."""
        if self._rows:
            step = int(self._rows[-1][0])
            self._sender.send(Header(STEP, step), [torch.tensor(self._rows, dtype=torch.float64)])
        self._rows, self._sent = [], time.monotonic()


def reported(tensors: Sequence[Tensor]) -> dict[int, dict[int, ShareLosses]]:
    """What a `LossSender` has sent: losses by step and block."""
    found: dict[int, dict[int, ShareLosses]] = {}
    for step, block, *values in tensors[0].tolist():
        found.setdefault(int(step), {})[int(block)] = ShareLosses(*values)
    return found
