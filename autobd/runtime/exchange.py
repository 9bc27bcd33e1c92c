"""Rows on their way between ranks: the instructions that move inputs and boundaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..graph import Arguments
from ..parts.part import Part
from ..planner.plan import intervals
from ..program import Program
from ..ranks import Header, Peers
from ..ranks.message import dense
from .links import Links

Boundary = tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """The rows of the input tensors that an assignment reads, by index: the teacher's and the student's, and of the
    targets. All None if the batch has too few rows for this share."""

    teacher: Mapping[int, Tensor] | None
    student: Mapping[int, Tensor] | None
    targets: Tensor | None = None


class Exchange:
    """The rows of a step that a rank holds, and their way in and out.

    Arguments:
        number: which rank; `program`: what all of them do; `peers`: the way to the other ranks.
        parts: the block pairs that this rank runs.
        first, talks: as for `Links`.
    """

    def __init__(
        self,
        number: int,
        program: Program,
        parts: dict[int, Part],
        peers: Peers,
        first: int = 0,
        talks: bool = True,
    ) -> None:
        self.number, self.program, self.parts, self.peers = number, program, parts, peers
        self.device = peers.device
        self.links = Links(program, number, peers, first, talks)
        self.header = Header()
        self.assignment = {b: n for n, a in enumerate(program.plan.assignments) for b in a.blocks}

    def begin(self, header: Header) -> None:
        """Start a step."""
        self.header = header

    def rows(self, assignment: int, rank: int) -> tuple[int, int]:
        """First and one-past-last row of the batch that `rank` has in an assignment."""
        a = self.program.plan.assignments[assignment]
        return intervals(a.rows, self.header.batch)[a.ranks.index(rank)]

    def scatter(self, assignment: int, edges: tuple[int, ...], batch: Sequence[Arguments]) -> None:
        """Send each rank of the assignment its rows of the inputs."""
        for edge in edges:
            first, last = self.rows(assignment, self.program.edges[edge].target)
            header = replace(self.header, first=first, last=last)
            given = self._taken(assignment, batch, first, last) if first < last else []
            if self.program.own_rows:
                given = self._taken(assignment, batch, 0, 0) if first < last else []  # what rows look like
            unique = list({id(t): t for t in given}.values())  # both models mostly read the same tensors
            places = {id(t): i for i, t in enumerate(unique)}
            table = torch.tensor([places[id(t)] for t in given], dtype=torch.int64)
            self.links.send(edge, header, [table, *unique] if given else [])

    def load(self, assignment: int, edges: tuple[int, ...], batch: Any) -> Inputs:
        """This rank's rows of the inputs, on its device: of the batch that it has read, or as another rank sends
        them."""
        teacher, student, targets = self.program.inputs[assignment]
        if edges:
            header, tensors = self.links.take(edges[0])
            self.begin(header)
            if header.first == header.last:
                return Inputs(None, None)
            given = [tensors[1 + i] for i in tensors[0].tolist()] if tensors else []
            if self.program.own_rows:
                where = f"Rank {self.number}, step {header.step}"
                given = _alike(self._taken(assignment, batch, header.first, header.last), given, where)
            given = [t.to(self.device) for t in given]
        else:
            first, last = self.rows(assignment, self.number)
            if first == last:
                return Inputs(None, None)
            given = [t.to(self.device) for t in self._taken(assignment, batch, first, last)]
        mine = dict(zip(teacher, given[: len(teacher)], strict=True))
        own = dict(zip(student, given[len(teacher) : len(teacher) + len(student)], strict=True))
        return Inputs(mine, own, given[-1] if targets else None)

    def receive(self, block: int, edges: tuple[int, ...]) -> Boundary | None:
        """The teacher's boundary after `block`, of this rank's rows; None if there are none."""
        messages = [self.links.take(edge) for edge in edges]
        self.begin(messages[0][0])
        parts = sorted((m for m in messages if m[0].first < m[0].last), key=lambda m: m[0].first)
        if not parts:
            return None
        tensors = [[t.to(self.device) for t in tensors] for _, tensors in parts]
        return tuple(tensors[0] if len(tensors) == 1 else (torch.cat(rows) for rows in zip(*tensors, strict=True)))

    receive_student = receive

    def relay(self, block: int, edges: tuple[int, ...], boundary: Boundary | None) -> None:
        """Send each rank behind its rows of the boundary."""
        own, _ = self.rows(self.assignment[block], self.number)
        for index in edges:
            edge = self.program.edges[index]
            first, last = self.rows(edge.assignment, edge.target)
            mine = self.rows(self.assignment[block], self.number)
            first, last = max(first, mine[0]), min(last, mine[1])
            header = replace(self.header, first=first, last=max(first, last))
            rows: list[Tensor] = []
            if boundary is not None and first < last:
                folded = self.parts[block].folded
                whole = (first, last) == mine
                rows = [
                    t if whole else t[(first - own) * f : (last - own) * f]
                    for t, f in zip(boundary, folded, strict=True)
                ]
            self.links.send(index, header, rows)

    relay_student = relay

    def _taken(self, assignment: int, batch: Sequence[Arguments], first: int, last: int) -> list[Tensor]:
        """Rows of the inputs that an assignment reads: the teacher's, the student's, the targets."""
        read = self.program.span(self.number, self.header.batch) if self.program.own_rows else (0, self.header.batch)
        sliced: dict[int, Tensor] = {}
        taken = []
        whole = (first, last) == read
        for arguments, indices, batched in zip(
            batch, self.program.inputs[assignment], self.program.batched, strict=True
        ):
            tensors = arguments.tensors
            for i in indices:
                t = tensors[i]
                if id(t) not in sliced:
                    own = t[first - read[0] : last - read[0]] if i in batched and not whole else t
                    sliced[id(t)] = own.clone() if t.is_inference() else own
                taken.append(sliced[id(t)])
        return taken


def _alike(own: list[Tensor], sent: list[Tensor], where: str) -> list[Tensor]:
    """Rows that this rank has read, if they look like those of rank 0, of which it has sent none."""
    looks = [[(t.dtype, tuple(t.shape[1:])) for t in tensors] for tensors in (own, sent)]
    if looks[0] != looks[1]:
        raise InputError(
            f"{where}: this rank's rows of the batch do not look like those of rank 0.",
            given=looks[0],
            expected=looks[1],
            do="pad all samples to one size, or leave own_rows= out: rank 0 then makes batches for all",
        )
    return own


def as_sent(boundary: Sequence[Tensor]) -> Boundary:
    """As a message has it: where blocks run must not change what the next one computes with."""
    return tuple(dense(t) for t in boundary)
