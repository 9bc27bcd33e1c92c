"""One rank of a whole model's forward: the blocks that it trains, as they will be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..parts.part import autocast
from ..program import Program
from ..ranks import STOP, Header, Receiver, Sender
from .exchange import Boundary, Inputs, as_sent
from .rank import Rank
from .work import Work

Part = tuple[Header, list[Tensor]]  # a share of a step's output


class Evaluation(Work):
    """The instructions of an evaluation program.

    Arguments:
        rank: whose blocks are used; `program`: what all ranks do.
        first: number of the first edge of this program.
    """

    def __init__(self, rank: Rank, program: Program, first: int) -> None:
        super().__init__(rank.number, program, rank.parts, rank.peers, first, talks=False)
        self.rank, self.maps = rank, rank.maps
        self.students = {b: s for b, s in rank.students.items() if b < program.blocks}
        self.at = None
        own, end = program.plan.assignments[-1].ranks, self.links.end
        self.outputs: list[Part] = []  # of this rank, where it is the one that calls
        self.senders: list[Sender] = []
        self.receivers: list[Receiver] = []
        self._counts: list[int] = []  # from each of them, which all send once a step
        if self.number == 0:
            self.receivers = [rank.peers.receiver(r, end + r, "outputs", keep=True) for r in own if r != 0]
        elif self.number in own:
            self.senders = [rank.peers.sender(0, end + self.number, 2, "outputs", keep=True)]
        self.end = end + rank.peers.size
        self._counts = [0] * len(self.receivers)
        self.works = bool(program.ranks[self.number])
        self._in_use = False  # whether the student's blocks are set as they will be used
        self._seen: dict[int, int] | None = None  # rows by block, where statistics are taken of them

    def begin(self, header: Header) -> None:
        """Start a step."""
        if self.rank.resize(header.sizes) and self._in_use:
            for s in self.students.values():
                s.part.module.training = False  # its layers are those of the other sizes, and set already
        self.parts = self.rank.parts
        super().begin(header)

    def evaluate(self, block: int, inputs: Inputs | None, boundary: Boundary | None) -> Boundary | None:
        """The student's tensors behind a block, of those before it."""
        self.at = block
        if boundary is None if block else inputs is None or inputs.student is None:
            return None
        student = self.students[block]
        if self._seen is not None:
            first, last = self.rows(self.assignment[block], self.number)
            self._seen[block] += last - first
        given = [] if inputs is None or inputs.student is None else [inputs.student[i] for i in student.part.inputs]
        entering = [self.maps.enter(block, i, t) for i, t in enumerate(boundary or ())]
        with torch.no_grad():
            with autocast(self.device, student.recipe.precision):
                output = student.part.module(*entering, *given)
            output = [t.to(a.student.dtype) for t, a in zip(output, student.part.behind, strict=True)]
            return as_sent(
                [self.maps.leave(block, i, t) if i in student.part.distilled else t for i, t in enumerate(output)]
            )

    def output(self, block: int, boundary: Boundary | None) -> None:
        """Send the model's output to the rank that calls."""
        if self._seen is not None:  # nobody wants the outputs
            return
        first, last = self.rows(self.assignment[block], self.number)
        header = Header(self.header.kind, self.header.step, self.header.batch, first, last)
        tensors = list(boundary or ()) if first < last else []
        if self.number == 0:
            self.outputs.append((header, [t.clone() for t in tensors]))  # a received one is soon overwritten
        for sender in self.senders:
            sender.send(header, tensors)

    def take(self) -> list[Part]:
        """The outputs that are there."""
        found, self.outputs = self.outputs, []
        for i, receiver in enumerate(self.receivers):
            while receiver.ready():
                found.append(self._take(i))
        return found

    def wait(self) -> Part:
        """The next output of another rank."""
        return self._take(self._counts.index(min(self._counts)))

    def _take(self, i: int) -> Part:
        self._counts[i] += 1
        return self.receivers[i].take()

    def stop(self, step: int) -> None:
        """Close all edges, at the end of the run."""
        self.links.pass_on(STOP, step)
        for sender in self.senders:
            sender.send(Header(STOP, step))
        for receiver in self.receivers:
            receiver.take()
        self.links.join()
        ends: list[Sender | Receiver] = [*self.senders, *self.receivers]
        for end in ends:
            end.join()

    # ---------------------------------------------------------------- how the student is used

    @contextmanager
    def as_used(self) -> Iterator[None]:
        """Within, the student's blocks are as its owner will have them: in eval mode, with averaged weights, and with
        the running statistics of the first replica."""
        with self._in_eval(), self._averaged(), self._first_statistics():
            yield

    @contextmanager
    def recalibrating(self) -> Iterator[None]:
        """Within, batch norms take in the statistics of what they see, from nothing, all batches alike; replicas share
        theirs at the end."""
        with self._in_eval(), self._averaged():
            every = [(b, m) for b, s in self.students.items() for m in s.part.module.modules()]
            norms = [(b, m) for b, m in every if isinstance(m, _BatchNorm) and m.running_mean is not None]
            momenta = [m.momentum for _, m in norms]
            for _, m in norms:
                m.reset_running_stats()
                m.momentum = None
                m.train()
            self._seen = seen = dict.fromkeys(self.students, 0)
            yield
            self._seen = None
            for (block, m), momentum in zip(norms, momenta, strict=True):
                m.momentum = momentum
                self._pool(block, m, seen[block])

    @contextmanager
    def _in_eval(self) -> Iterator[None]:
        modules = [m for s in self.students.values() for m in s.part.module.modules()]
        before = [m.training for m in modules]
        for s in self.students.values():
            s.part.module.eval()
        self._in_use = True
        try:
            yield
        finally:
            self._in_use = False
            for m, mode in zip(modules, before, strict=True):
                m.training = mode
            self.rank.set_modes()

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        pairs = [
            (s.learner.parameters[name], average)
            for s in self.students.values()
            for name, average in s.learner.average.items()
        ]
        before = [p.detach().clone() for p, _ in pairs]
        with torch.no_grad():
            for p, average in pairs:
                p.copy_(average)
            try:
                yield
            finally:
                for (p, _), value in zip(pairs, before, strict=True):
                    p.copy_(value)

    @contextmanager
    def _first_statistics(self) -> Iterator[None]:
        shared = [b for b in self.students if self.rank.assignment[b] in self.rank.reducers]
        buffers = {b: list(self.students[b].part.module.buffers()) for b in shared}
        before = {b: [t.clone() for t in own] for b, own in buffers.items()}
        for b, own in buffers.items():
            self._take_firsts(b, own)
        try:
            yield
        finally:
            for b, own in buffers.items():
                for t, value in zip(own, before[b], strict=True):
                    t.copy_(value)

    def _take_firsts(self, block: int, tensors: list[Tensor]) -> None:
        """Give all replicas of a block the values of the first one."""
        number = self.rank.assignment[block]
        if self.rank.program.plan.assignments[number].ranks[0] != self.number:
            for t in tensors:
                t.zero_()
        self.rank.reducers[number](tensors).result(self.peers.patience)

    def _pool(self, block: int, norm: Any, rows: int) -> None:
        """Give all replicas of a block the statistics of what they have seen together; this one has seen `rows`."""
        number = self.rank.assignment[block]
        if number not in self.rank.reducers:
            return
        mean, variance = norm.running_mean, norm.running_var
        seen = torch.full((1,), float(rows), dtype=mean.dtype, device=mean.device)
        sums = [seen, mean * rows, (variance + mean.square()) * rows]
        self.rank.reducers[number](sums).result(self.peers.patience)
        total = sums[0].clamp(min=1)
        mean.copy_(sums[1] / total)
        variance.copy_((sums[2] / total - mean.square()).clamp(min=0))
