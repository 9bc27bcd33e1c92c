"""What a job knows of the other ranks: its number, and ways to reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .transport import Place, Receiver, Sender
from .waiting import Patience, Pending, Waiter

FOREVER = timedelta(days=365)  # timeouts are ours: a process group's own would break the connection
ALL = "all"
MakeGroup = Callable[[str, Sequence[int]], Any]


class Peers:
    """A rank's view of its group, for one run.

    Attributes:
        rank, size: its number, and how many there are.
        device: where it computes.
        patience: how long a peer may be silent.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, patience: Patience, make_group: MakeGroup, run: int
    ) -> None:
        self.rank, self.size, self.device, self.patience = rank, size, device, patience
        self._make_group, self._run = make_group, run
        self._waiter = Waiter()
        self._ends: list[Sender | Receiver] = []

    def sender(self, target: int, tag: int, slots: int, carries: str) -> Sender:
        """The sending end of an edge; `tag` is its number in this run."""
        place = Place(self.rank, target, carries)
        sender = Sender(self._messages(), place, self._tag(tag), slots, self.patience)
        self._ends.append(sender)
        return sender

    def receiver(self, source: int, tag: int, carries: str, keep: bool = False) -> Receiver:
        place = Place(self.rank, source, carries)
        receiver = Receiver(self._messages(), place, self._tag(tag), self.patience, keep)
        self._ends.append(receiver)
        return receiver

    def join(self, ranks: Sequence[int]) -> Callable[[Sequence[Tensor]], Pending]:
        """A function that sums tensors over `ranks`, in place. Every one of them must join, and call it, in the same
        order."""
        others = " and ".join(str(r) for r in ranks if r != self.rank)
        edge = f"rank {self.rank} for rank {others} to "
        name = " ".join(map(str, ranks))
        group = self._waiter.submit(lambda: self._make_group(name, ranks), edge + "join").result(self.patience)

        def all_reduce(tensors: Sequence[Tensor]) -> Pending:
            works = [group.allreduce([t]) for t in tensors]
            return self._waiter.submit(lambda: [work.wait() for work in works], edge + "sum or wait together")

        return all_reduce

    def close(self) -> None:
        """Let the threads end, also where a run has failed."""
        self._waiter.close()
        for end in self._ends:
            end.close()

    def _messages(self) -> Any:
        return self._make_group(ALL, range(self.size))

    def _tag(self, tag: int) -> int:
        return (self._run << 16) + tag + 1


class Groups:
    """Process groups by name, made when they are first asked for.

    Arguments:
        store: a torch.distributed store that all ranks see; None: the default process group is joined (torchrun).
        loopback: connect on this host only.
    """

    def __init__(self, rank: int, store: Any | None, loopback: bool) -> None:
        self._rank, self._store, self._loopback = rank, store, loopback
        self._made: dict[str, Any] = {}

    def __call__(self, name: str, ranks: Sequence[int]) -> Any:
        if name not in self._made:
            self._made[name] = self._make(name, list(ranks))
        return self._made[name]

    def close(self) -> None:
        """Let go of them: of their connections and threads, once nobody else holds them."""
        self._made.clear()

    def _make(self, name: str, ranks: list[int]) -> Any:
        if self._store is None:
            return dist.new_group(ranks, FOREVER, "gloo", use_local_synchronization=True)
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = FOREVER
        if self._loopback:
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        store = c10d.PrefixStore(name, self._store)
        return c10d.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)
