"""Under `torchrun` the processes are there already: rank 0 gives the jobs, the others serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from ..cluster import Cluster
from ..errors import InputError, RankError
from .control import Report, post, posted, receive_bytes, send_bytes
from .group import Group, check_limits
from .peers import ALL, Groups
from .pickling import dumps, loads
from .waiting import Lost, Patience, Waiter
from .worker import serve

_OPENED = iter(range(1 << 62))
_last: WeakKeyDictionary[Any, Joined] = WeakKeyDictionary()  # by the default process group


def launched() -> int:
    """How many processes the launcher has started (1 without one)."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if dist.is_torchelastic_launched() else 1


class Joined(Group):
    """The group of a launcher's processes, one rank each. Every one of them must make it, and call the same methods.

    Arguments:
        devices: as for `distill`; "auto": each process's GPU by `LOCAL_RANK`, else the CPU.
        timeout, threads: as for `open`.

    Errors: InputError if `devices` are not as many as the processes, for a `timeout` or `threads` that is none.
    """

    def __init__(self, devices: Any, timeout: float, threads: int | None) -> None:
        check_limits(timeout, threads)
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the launcher's store remembers those before
        if not dist.is_initialized():
            store, rank, world = next(rendezvous("env://"))
            dist.init_process_group("gloo", store=c10d.PrefixStore(attempt, store), rank=rank, world_size=world)
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.timeout, self.threads, self._broken = timeout, threads, False
        self._processes = {}
        self._waiter, self._patience = Waiter(), Patience(timeout)
        self._store = c10d.PrefixStore(f"autobd {attempt} {next(_OPENED)}", c10d._get_default_store())
        self._groups, self._runs = self._kept()
        self.cluster = Cluster(*_names(devices, self.rank, world, self._store))
        self._groups(ALL, range(world), "gloo")

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def serve(self) -> None:
        """On ranks other than 0: run rank 0's jobs until it shares something. Errors: those of a job; RankError."""
        device = torch.device(self.cluster.devices[self.rank])
        if device.type == "cuda":
            torch.cuda.set_device(device)
        threads = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)
        try:
            serve(self.rank, self.cluster.devices, self.timeout, self._groups, self._store, self._has_failed)
        except (Lost, RuntimeError) as error:
            if (report := posted(self._store, 0)) is not None:
                raise report.as_error(0, "the one that calls") from None
            raise RankError(f"Rank {self.rank} lost the others.", given=str(error)) from error
        finally:
            torch.set_num_threads(threads)

    def tell(self, error: Exception) -> None:
        """On rank 0: let the other ranks, which may be waiting for it, end with this error."""
        post(self._store, 0, Report.of(error))

    def _has_failed(self) -> None:
        if posted(self._store, 0) is not None:
            raise Lost("rank 0 has failed")

    def _kept(self) -> tuple[Groups, int]:
        """The process groups of the calls before this one, and how many runs they have had; new ones if they are no
        longer whole on rank 0."""
        before = _last.get(dist.group.WORLD)
        number = -1 if before is None else before.number
        if self.leads:
            whole = before is not None and not before._broken
            self._store.set("groups", str(number if whole else number + 1))
        self.number: int = int(self._store.get("groups"))
        _last[dist.group.WORLD] = self
        if before is not None and self.number == before.number:
            return before._groups, before._runs
        return Groups(self.rank, None, loopback=False), 0

    def share(self, value: Any = None) -> Any:
        """Rank 0's `value` on every rank; ends `serve`."""
        if not self.leads:
            return loads(receive_bytes(self._groups(ALL, range(self.size), "gloo"), 0))
        data = dumps(value)
        for rank in range(1, self.size):
            for part in (b"", data):
                self._wait(partial(send_bytes, self._control, rank, part))
        return value

    def close(self) -> None:
        """Nothing to end: the processes are the launcher's, and the next call uses their connections again."""


def _names(devices: Any, rank: int, world: int, store: Any) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Every rank's device, and the number of its host."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    if devices == "auto":
        own = f"cuda:{local}" if torch.cuda.is_available() and local < torch.cuda.device_count() else "cpu"
    else:
        names = (devices,) * world if isinstance(devices, str) else devices
        if not isinstance(names, Sequence) or len(names) != world:
            raise InputError(
                "devices= does not fit the processes of the launcher.",
                given=f"devices={devices!r}, {world} processes",
                expected=f'"auto", one name for all, or {world} names',
            )
        own = names[rank]
    host = os.environ.get("GROUP_RANK", "0")
    store.set(f"device {rank}", f"{host} {own}")
    found = [store.get(f"device {r}").decode().split(" ", 1) for r in range(world)]
    return tuple(name for _, name in found), tuple(int(number) for number, _ in found)
