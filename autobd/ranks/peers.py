"""What a job knows of the other ranks: its number, and ways to reach them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from .lane import Lane
from .store import DirectoryStore
from .transport import Place, Receiver, Sender
from .waiting import Patience, Pending, Waiter

FOREVER = timedelta(days=365)  # timeouts are ours: a process group's own would break the connection
ALL = "all"
MakeGroup = Callable[[str, Sequence[int], str], Any]


class Peers:
    """A rank's view of its group, for one run.

    Attributes:
        rank, size: its number, and how many there are.
        patience: how long a peer may be silent.

    Arguments:
        devices: where each rank computes.
        make_group: makes or gives the process group of a name, some ranks and a backend.
        run: number of the run, the same on all ranks; messages of different runs do not mix.
    """

    def __init__(self, rank: int, devices: Sequence[str], patience: Patience, make_group: MakeGroup, run: int) -> None:
        self.rank, self.size, self.patience = rank, len(devices), patience
        self._devices, self._make_group, self._run = [torch.device(d) for d in devices], make_group, run
        self._waiter = Waiter()
        self._ends: list[Sender | Receiver] = []

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._devices[self.rank]

    def sender(self, target: int, tag: int, slots: int, carries: str, keep: bool = False) -> Sender:
        """The sending end of an edge; `tag` is its number in this run; `keep` as at the other end."""
        place, lane = Place(self.rank, target, carries), None if keep else self._lane(self.rank, target, tag)
        sender = Sender(self._messages(), place, self._tag(tag), slots, self.patience, lane)
        self._ends.append(sender)
        return sender

    def receiver(self, source: int, tag: int, carries: str, keep: bool = False) -> Receiver:
        """The receiving end; `keep`: see `Receiver`."""
        place, lane = Place(self.rank, source, carries), None if keep else self._lane(source, self.rank, tag)
        receiver = Receiver(self._messages(), place, self._tag(tag), self.patience, keep, lane)
        self._ends.append(receiver)
        return receiver

    def reducer(self, ranks: Sequence[int]) -> Callable[[Sequence[Tensor]], Pending]:
        """A function that sums tensors over `ranks`, in place. Every one of them must make it, and call it, in the
        same order."""
        devices = [self._devices[r] for r in ranks]
        backend = "nccl" if _have_nccl(devices) else "gloo"
        others = " and ".join(str(r) for r in ranks if r != self.rank)
        edge = f"rank {self.rank} for rank {others} to "
        name = " ".join(map(str, ranks))
        group = self._waiter.submit(lambda: self._make_group(name, ranks, backend), edge + "join").result(self.patience)

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
        return self._make_group(ALL, range(self.size), "gloo")

    def _lane(self, source: int, target: int, tag: int) -> Lane | None:
        """The stream of an edge, on a GPU. Both of its ends must ask for it, in the order of the edges."""
        if self.device.type != "cuda":
            return None
        if not _have_nccl([self._devices[source], self._devices[target]]):
            return Lane(self.device)
        # Relays have communicators of their own: one for each edge, so that nothing waits for another edge's turn.
        group = self._make_group(f"edge {tag} from {source} to {target}", [source, target], "nccl")
        return Lane(self.device, group, int(self.rank == source))

    def _tag(self, tag: int) -> int:
        return (self._run << 16) + tag + 1


class Groups:
    """Process groups by name, made when they are first asked for.

    Arguments:
        store: where the ranks meet; None: the default process group is joined (torchrun).
        loopback: connect on this host only.
    """

    def __init__(self, rank: int, store: DirectoryStore | None, loopback: bool) -> None:
        self._rank, self._store, self._loopback = rank, store, loopback
        self._made: dict[tuple[str, str], Any] = {}

    def __call__(self, name: str, ranks: Sequence[int], backend: str) -> Any:
        key = name, backend
        if key not in self._made:
            self._made[key] = self._make(name, list(ranks), backend)
        return self._made[key]

    def close(self) -> None:
        """Let go of them: of their connections and threads, once nobody else holds them."""
        self._made.clear()

    def abort(self) -> None:
        """End what waits on a GPU for a rank that has died: unlike gloo, NCCL does not notice."""
        for (_, backend), group in self._made.items():
            if backend == "nccl":
                group.abort()

    def _make(self, name: str, ranks: list[int], backend: str) -> Any:
        if self._store is None:
            return dist.new_group(ranks, FOREVER, backend, use_local_synchronization=True, sort_ranks=False)
        if backend == "nccl":
            store = c10d.PrefixStore(name, self._store.for_nccl())
            nccl = c10d.ProcessGroupNCCL.Options()
            nccl._timeout = FOREVER
            return c10d.ProcessGroupNCCL(store, ranks.index(self._rank), len(ranks), nccl)
        store = c10d.PrefixStore(name, self._store)
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = FOREVER
        if self._loopback:
            options._devices = [c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return c10d.ProcessGroupGloo(store, ranks.index(self._rank), len(ranks), options)


def _have_nccl(devices: Sequence[torch.device]) -> bool:
    """Whether NCCL can connect these: GPUs, no two of them the same."""
    cuda = [d for d in devices if d.type == "cuda"]
    return len(cuda) == len(devices) == len(set(devices)) and dist.is_nccl_available()
