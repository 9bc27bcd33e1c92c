"""The messages of one rank's program: its ends of the edges, and the way back to the rank that calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..program import Program
from ..program.instruction import Edge
from ..ranks import Header, Peers, Receiver, Sender


class Links:
    """Both kinds of ends of the edges that touch a rank, opened for one run; beside the program's, an edge from every
    other rank to rank 0 for results, and one back for news: blocks for other sizes, and weights trained elsewhere.

    Arguments:
        first: the number of the first edge, where other programs of the run have edges of their own.
        talks: whether there are edges for results and news.
    """

    def __init__(self, program: Program, rank: int, peers: Peers, first: int = 0, talks: bool = True) -> None:
        edges, busy = program.edges, [r for r, instructions in enumerate(program.ranks) if instructions]
        self.senders: dict[int, Sender] = {}
        self.receivers: dict[int, Receiver] = {}
        for i, edge in enumerate(edges):
            if edge.source == rank:
                self.senders[i] = peers.sender(edge.target, first + i, edge.slots, _carries(edge))
            if edge.target == rank:
                self.receivers[i] = peers.receiver(edge.source, first + i, _carries(edge))
        self.results: dict[int, Receiver] = {}
        self.announce: dict[int, Sender] = {}
        self.report: Sender | None = None
        self.news: Receiver | None = None
        back, down = first + len(edges), first + len(edges) + peers.size
        self.end = down + peers.size  # number of the next edge that others may open
        if rank == 0 and talks:
            others = [r for r in busy if r != 0]
            self.results = {r: peers.receiver(r, back + r, "losses and weights", keep=True) for r in others}
            self.announce = {r: peers.sender(r, down + r, 2, "news") for r in others}
        elif talks:
            self.report = peers.sender(0, back + rank, 2, "losses and weights", keep=True)
            self.news = peers.receiver(0, down + rank, "news")
        taken = [e for i in program.ranks[rank] for e in i.edges if e in self.receivers]
        self._first = taken[0] if taken else None

    def send(self, edge: int, header: Header, tensors: Sequence[Tensor]) -> None:
        self.senders[edge].send(header, tensors)

    def take(self, edge: int) -> tuple[Header, list[Tensor]]:
        return self.receivers[edge].take()

    def next(self) -> Header:
        """The header of the message that the rank's next step starts with, or that ends the epoch or the run."""
        assert self._first is not None, "a rank that takes nothing"
        return self.receivers[self._first].peek()

    def pass_on(self, kind: int, step: int) -> None:
        """Send an end (EPOCH or STOP) to the next ranks and take it from the ones before: no step is under way then."""
        for sender in self.senders.values():
            sender.send(Header(kind, step))
        for receiver in self.receivers.values():
            receiver.take()

    def join(self) -> None:
        """Wait until everything has arrived, after a STOP on every edge."""
        news = [self.news] if self.news is not None else []
        report = [self.report] if self.report is not None else []
        ends: list[Sender | Receiver] = [*self.senders.values(), *self.announce.values(), *report]
        ends += [*self.receivers.values(), *self.results.values(), *news]
        for end in ends:
            end.join()


def _carries(edge: Edge) -> str:
    return "inputs" if edge.block is None else f"the {edge.kind}'s boundary after block {edge.block}"
