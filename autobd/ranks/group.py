"""`open(cluster) -> Group`: ranks that are started once and run several jobs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import weakref
from collections.abc import Callable
from functools import cached_property, partial
from threading import Thread
from types import TracebackType
from typing import Any, TypeVar

import torch

from ..cluster import Cluster
from ..errors import InputError, RankError
from . import local
from .control import RemoteTraceback, Report, posted, receive_bytes, send_bytes
from .memory import memory_kept
from .peers import ALL, Groups, Peers
from .pickling import culprit, dumps, loads
from .store import DirectoryStore
from .waiting import Lost, Patience, Waiter
from .worker import torch_settings

T = TypeVar("T")
_START = 120.0  # seconds for a process to start and import torch, however short the timeout
_LET_GO = 5.0  # seconds for connections to end
_REPORTS = 6.0  # seconds in which the rank that failed first has left its report


class Group:
    """Ranks that wait for jobs; rank 0 is this process. To be used in a `with` statement, or closed.

    The other ranks start at once and are waited for when the first job is run.

    Attributes:
        cluster: the devices, one rank each; `timeout`: seconds after which a silent rank is an error.
        threads: of each rank on a CPU; None: as many as are set.
    """

    def __init__(self, cluster: Cluster, timeout: float, threads: int | None) -> None:
        self.cluster, self.timeout = cluster, timeout
        self.threads, self._broken = threads, False
        self._runs = 0  # so far; each has tags of its own for its messages
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._waiter, self._patience = Waiter(), Patience(timeout, self._alarm)
        if self.size > 1:
            directory = tempfile.mkdtemp(prefix="autobd-")  # readable by this user alone
            self._processes = local.start(directory, cluster.devices, threads or 1, timeout)
            self._finish = weakref.finalize(self, _clean, self._processes, directory)
            self._store: Any = DirectoryStore(directory)
            self._groups = Groups(0, self._store, loopback=True)
            if any(d.startswith("cuda") for d in cluster.devices):
                Thread(target=_watch, args=(self._processes, self._groups), daemon=True).start()

    @property
    def broken(self) -> bool:
        """Whether a rank has failed, so that no other can be reached."""
        return self._broken

    @property
    def size(self) -> int:
        return len(self.cluster.devices)

    def run(
        self,
        own: Callable[[Peers], T],
        others: dict[int, Callable[[Peers], Any]],
        what: Callable[[int], str] = lambda rank: "",
        results: dict[int, Any] | None = None,
    ) -> T:
        """Run one job on each rank and return what this rank's gives.

        Arguments:
            own: this process's; `others`: by rank; each is pickled, and taken out when it is sent.
            what: what a rank does, for errors.
            results: takes what the other ranks' jobs give, by rank.

        Errors: those of `own`; the first error of another rank, with its traceback as the cause; RankError for a rank
        that died or does not answer. The group is of no use afterwards.
        """
        if self._broken:
            raise RankError("This group of ranks has failed before.", do="open a new one")
        self._broken = True
        self._runs += 1
        threads = torch.get_num_threads()
        if self.threads:
            torch.set_num_threads(self.threads)
        try:
            result = self._run(own, others, what, results)
        except (Lost, RankError) as error:
            first = self._explained(error, what) if self.size > 1 else error
        else:
            self._broken = False
            return result
        finally:
            torch.set_num_threads(threads)
        raise first from first.__cause__  # here, so that the connection's own error is not shown before it

    def _run(
        self,
        own: Callable[[Peers], T],
        others: dict[int, Callable[[Peers], Any]],
        what: Callable[[int], str],
        results: dict[int, Any] | None,
    ) -> T:
        ranks = list(others)
        for rank in ranks:
            data = _sendable((self._runs, torch_settings(), others.pop(rank)), f"rank {rank} ({what(rank)})")
            self._wait(partial(send_bytes, self._control, rank, data))
            del data
        make_group = self._groups if self.size > 1 else _alone
        peers = Peers(0, self.cluster.devices, self._patience, make_group, self._runs)
        try:
            with memory_kept(peers.device):
                result = own(peers)
        finally:
            peers.close()
        for rank in ranks:
            given = loads(self._wait(partial(receive_bytes, self._control, rank)))
            if results is not None:
                results[rank] = given
        return result

    def close(self) -> None:
        """End the other ranks; at once if one has failed."""
        if self.size == 1 or not self._finish.alive:
            return
        if not self._broken:
            for rank in self._processes:
                try:
                    self._wait(partial(send_bytes, self._control, rank, b""))
                except (Lost, RankError):
                    break
            for process in self._processes.values():
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    break
        self._broken = True
        self._finish()
        self.__dict__.pop("_control", None)
        self._waiter.submit(self._groups.close)  # not here: a call into a broken connection may not return
        self._waiter.close(_LET_GO)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @cached_property
    def _control(self) -> Any:
        """The group for jobs and messages, once every rank has joined it."""
        start = Patience(max(self.timeout, _START), self._alarm)
        try:
            return self._waiter.submit(lambda: self._groups(ALL, range(self.size), "gloo")).result(start)
        except (Lost, TimeoutError) as error:
            raise RankError(
                "The ranks could not be started.", given=str(error) or None, do="look at their output above"
            ) from None

    def _alarm(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise Lost(f"rank {rank} {local.cause_of_death(process.returncode)}")

    def _wait(self, function: Callable[[], Any]) -> Any:
        try:
            return self._waiter.submit(function).result(self._patience)
        except TimeoutError:
            raise RankError(
                f"A rank has not answered for {self.timeout:g} s.",
                expected="an answer in time",
                do="look at what the other ranks do, or pass a longer timeout=",
            ) from None

    def _explained(self, error: Exception, what: Callable[[int], str]) -> Exception:
        """The first cause of a failure: a report of another rank, or its death."""
        deadline = time.monotonic() + _REPORTS
        reports: dict[int, Report] = {}
        while time.monotonic() < deadline:
            reports = {r: report for r in range(1, self.size) if (report := posted(self._store, r)) is not None}
            first = next(((r, report) for r, report in reports.items() if not report.lost), None)
            if first is not None:
                return first[1].as_error(first[0], what(first[0]))
            dead = [r for r, p in self._processes.items() if p.poll() is not None and r not in reports]
            if dead:
                rank, code = dead[0], self._processes[dead[0]].returncode
                return RankError(
                    f"Rank {rank} ({what(rank)}) {local.cause_of_death(code)}.",
                    given=str(error),
                    expected="a rank that lives to the end",
                    do="look at its output above and at its host's memory; smaller batches or more ranks need less",
                )
            if isinstance(error, RankError):
                return error
            time.sleep(0.05)
        traces = "\n".join(f"rank {r}:\n{report.trace}" for r, report in reports.items())
        lost = RankError(
            "A rank lost its connection.", given=str(error), do="see the tracebacks above; is its host still there?"
        )
        lost.__cause__ = RemoteTraceback(traces)
        return lost


def open(cluster: Cluster, timeout: float = 300.0, threads: int | None = None) -> Group:
    """A group with one rank for each device of `cluster`; rank 0 is this process, the others are started.

    Arguments:
        timeout: seconds after which a rank that does not answer is an error.
        threads: of each rank on a CPU; default: the cores, shared evenly (a single rank keeps what is set).

    Errors: InputError for a `timeout` or `threads` that is none; RankError if a rank does not start.
    """
    check_limits(timeout, threads)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = len(cluster.devices)
    return Group(cluster, timeout, threads or (max(1, cores // ranks) if ranks > 1 else None))


def check_limits(timeout: object, threads: object) -> None:
    """Errors: InputError for what are no seconds, or no number of threads."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InputError("timeout= is no time.", given=repr(timeout), expected="seconds, more than 0")
    if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int) or threads < 1):
        raise InputError("threads= is no number of threads.", given=repr(threads), expected="at least 1, or None")


def _sendable(job: object, whose: str) -> bytes:
    try:
        return dumps(job)
    except Exception as error:
        raise InputError(
            f"A part of {whose} cannot be sent to another process.",
            given=f"{culprit(job)}: {type(error).__name__}: {error}",
            expected="models, losses and optimizers that cloudpickle can pickle",
            do="leave open files, locks and the like out of the model's attributes, or use one device",
        ) from error


def _alone(name: str, ranks: object, backend: str) -> Any:
    raise RankError("A single rank has nobody to talk to.", given=name)


def _watch(processes: dict[int, subprocess.Popen[bytes]], groups: Groups) -> None:
    """Free this rank from waiting on its GPU for one that has died."""
    while all(process.poll() is None for process in list(processes.values())):
        time.sleep(0.5)
    groups.abort()


def _clean(processes: dict[int, subprocess.Popen[bytes]], directory: str) -> None:
    local.stop(processes, 0.5)
    shutil.rmtree(directory, ignore_errors=True)
