"""One rank over a run: its steps, and what it gives and takes between epochs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..blocks.verify import set_mode
from ..parts.channels import ChannelMaps
from ..parts.form import Form
from ..parts.part import Part, StudentPart, held_bytes, on_device
from ..parts.student import BlockState, ShareLosses, Student
from ..program import Op, Program
from ..ranks import Header, Peers
from ..ranks.memory import Peak
from .reduce import AllReduce, GradientSum
from .trace import Tape
from .work import Work


class Rank(Work):
    """A rank over a run: its steps, and what it gives and takes between epochs.

    Arguments:
        number: which rank; `program`: what all of them do.
        parts: the block pairs that this rank runs, with students where it trains them, by number of the block or
            candidate.
        seed: as for `distill`.
        peers: the way to the other ranks.
        states: what blocks go on from that have been trained before.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        parts: Mapping[int, Part],
        seed: int,
        peers: Peers,
        states: Mapping[int, BlockState] | None = None,
    ) -> None:
        super().__init__(number, program, on_device(parts, peers.device), peers)
        self._held, self._peak = held_bytes(self.parts), Peak(peers.device)
        self.seed = seed
        students = {b: part.student for b, part in self.parts.items() if part.student is not None}
        like = _like(students)
        self.students = {b: Student(s, like) for b, s in students.items()}
        self.maps = ChannelMaps({b: (s.before, s.behind) for b, s in students.items() if b < program.blocks}, like)
        for block, student in self.students.items():
            student.train_too(self.maps.trained_with(block) if block < program.blocks else {})
            student.rests = block in program.stopped
            if states and block in states:
                student.go_on(states[block])
            self.assignment[block] = self.assignment[self.parts[block].block]
        _set_modes(self.parts)
        self.sums: dict[int, GradientSum] = {}
        self.reducers: dict[int, AllReduce] = {
            n: peers.reducer(a.ranks)
            for n, a in enumerate(program.plan.assignments)
            if a.replicated and number in a.ranks
        }
        gated = [r for r, own in enumerate(program.ranks) if any(i.op is Op.BARRIER for i in own)]
        self.gate = peers.reducer(gated) if number in gated and len(gated) > 1 else None
        self._forms, self._sizes = {0: self.parts}, 0
        self.at: int | None = None
        self._tape = Tape(len(program.ranks[number]), self.device)

    # ---------------------------------------------------------------- a step

    def begin(self, header: Header) -> None:
        """Start a step: its number, the batch's rows and sizes, and every block's learning rate."""
        self.resize(header.sizes)
        super().begin(header)
        for student in self.students.values():
            student.learner.set_rate(header.progress)

    def set_modes(self) -> None:
        """Students as they are trained, for all sizes of inputs."""
        for parts in self._forms.values():
            _set_modes(parts)

    def resize(self, sizes: int) -> bool:
        """Go over to the blocks for inputs' sizes of this number; returns whether these are others."""
        if sizes == self._sizes:
            return False
        self._sizes, self.parts = sizes, self._forms[sizes]
        for block, student in self.students.items():
            student.take(self.parts[block])
        return True

    def knows(self, sizes: int) -> bool:
        """Whether the rank has blocks for the inputs' sizes of this number."""
        return sizes in self._forms

    def learn(self, sizes: int, forms: Mapping[int, Form]) -> None:
        """Take blocks for other sizes of inputs."""
        self._forms[sizes] = {block: forms[block].of(part) for block, part in self._forms[0].items()}
        _set_modes(self._forms[sizes])

    def run(self, step: Any, batch: Any) -> None:
        """Run the generated function. Errors: as for `Work.perform`."""
        torch.clear_autocast_cache()  # weights as they were cast before the last update
        self.perform(step, self._tape.timed(self), batch)

    def finish_step(self) -> dict[int, ShareLosses]:
        """The step's losses of the rank's own blocks. Errors: NonFiniteError naming rank, block, step, and whether the
        teacher is the cause."""
        blocks = list(self.students.items())
        if not blocks:
            return {}
        noted = [t for _, s in blocks for t in (*s.sums(), s.learner.norm)]
        if self.device.type == "cpu":
            values = [t.item() for t in noted]
        else:  # one copy for all
            values = torch.stack([t.to(self.device, torch.float64) for t in noted]).tolist()
        found = {}
        for i, (block, student) in enumerate(blocks):
            loss, relative, norm = values[3 * i : 3 * i + 3]
            found[block] = student.share(loss, relative, norm, partial(self._where, block))
        return found

    def times(self) -> Tensor:
        """When the last steps' instructions ran and their messages were sent and came (see `trace.joined`)."""
        sent = [(e, *seen) for e, sender in self.links.senders.items() for seen in sender.sent]
        arrived = [(e, *seen) for e, end in self.links.receivers.items() for seen in end.arrived]
        return self._tape.rows(sent, arrived, self._held + self._peak.bytes)

    # ---------------------------------------------------------------- between epochs

    def end_epoch(self) -> None:
        """Make a step of gradients that still wait for more batches."""
        waiting = [block for block, student in self.students.items() if student.learner.pending]
        for block in waiting:
            number = self.assignment[block]
            if number in self.reducers:
                parameters = list(self.students[block].learner.parameters.values())
                GradientSum(parameters, self.reducers[number]).finish(self.peers)
            self.students[block].finish()

    def trained(self) -> dict[str, Tensor]:
        """What training has changed, of the blocks whose first replica this is: tensors by their keys in the student,
        and channel maps."""
        found: dict[str, Tensor] = {}
        for _, student in self._leading():
            found |= student.trained()
        return found

    def restore(self, values: Mapping[str, Tensor]) -> None:
        """Give the rank's own blocks these weights and channel maps, by their names as in `trained`."""
        for student in self.students.values():
            student.restore(values)

    def states(self) -> dict[int, BlockState]:
        """What the same blocks are trained on from elsewhere, beside their weights."""
        return {block: student.state() for block, student in self._leading()}

    def whole_states(self) -> dict[int, tuple[dict[str, Tensor], BlockState]]:
        """Of the same blocks, weights as in `trained` and what else training goes on from."""
        return {block: (student.trained(), student.state()) for block, student in self._leading()}

    def _leading(self) -> list[tuple[int, Student]]:
        first = [a.ranks[0] for a in self.program.plan.assignments]
        return [(b, s) for b, s in self.students.items() if first[self.assignment[b]] == self.number]

    def refresh(self, values: Mapping[str, Tensor]) -> None:
        """Bring copies of weights that an earlier block trains up to date."""
        with torch.no_grad():
            for student in self.students.values():
                for key, copy in student.stale.items():
                    copy.copy_(values[key])


def _set_modes(parts: Mapping[int, Part]) -> None:
    set_mode([p.teacher for p in parts.values()], False)
    students = [p.student for p in parts.values() if p.student is not None]
    set_mode([module for s in students for module in s.modules], True)


def _like(students: Mapping[int, StudentPart]) -> Tensor:
    parameters = [p for s in students.values() for p in s.module.parameters() if p.is_floating_point()]
    return next(iter(parameters), torch.zeros(()))
