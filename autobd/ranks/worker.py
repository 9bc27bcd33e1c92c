"""A rank other than the caller's: takes jobs and runs them until it is told to stop."""

from __future__ import annotations

import os
import pickle
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from .control import Report, post, receive_bytes, send_bytes
from .memory import memory_kept
from .peers import ALL, Groups, Peers
from .pickling import dumps, loads
from .store import DirectoryStore
from .waiting import Lost, Patience

Job = Callable[[Peers], Any]
_LOOK = 1.0  # seconds between two looks at whether the caller lives
_DYING = 1.0  # seconds that a caller may take to be gone


def serve(
    rank: int,
    devices: Sequence[str],
    timeout: float,
    groups: Groups,
    store: Any,
    alarm: Callable[[], None] = lambda: None,
) -> None:
    """Run jobs until rank 0 sends an empty one. An error is left for rank 0 to find, and raised.

    Arguments:
        alarm: called now and then while a job waits; raises Lost if it waits in vain.
    """
    try:
        control = groups(ALL, range(len(devices)), "gloo")
        while data := _next(control):
            job: Job
            run, given, job = loads(data)
            apply(given)
            del data
            peers = Peers(rank, devices, Patience(timeout, alarm), groups, run)
            with memory_kept(peers.device):
                result = job(peers)
            peers.close()
            del job
            send_bytes(control, 0, dumps(result))
    except BaseException as error:
        with suppress(RuntimeError):  # nobody is there to find it
            post(store, rank, Report.of(error))
        raise


def _next(control: Any) -> memoryview:
    try:
        return receive_bytes(control, 0)
    except RuntimeError as error:
        raise Lost(f"the connection to rank 0: {error}") from error


def main() -> None:
    """A local rank, started by `local.start`: its settings come from standard input, whose end means that the caller
    is gone."""
    for number in (
        signal.SIGTERM,
        signal.SIGUSR1,
    ):  # a scheduler tells all processes; what follows is the caller's to say
        signal.signal(number, signal.SIG_IGN)
    source = sys.stdin.buffer
    settings = pickle.load(source)
    threading.Thread(target=_leave_with_the_caller, args=(source, settings), daemon=True).start()
    sys.path[:] = settings["path"]
    torch.set_num_threads(settings["threads"])
    rank, devices = settings["rank"], settings["devices"]
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = DirectoryStore(settings["directory"])
    try:
        serve(rank, devices, settings["timeout"], Groups(rank, store, loopback=True), store)
    except BaseException as error:
        sys.stderr.flush()
        end = time.monotonic() + (_DYING if isinstance(error, Lost) else 0.0)
        while os.getppid() == settings["caller"] and time.monotonic() < end:
            time.sleep(0.01)  # a process that dies lets go of its connections before it is gone
        if os.getppid() != settings["caller"]:
            _leave(settings)
        os._exit(1)  # the caller prints the report; other threads may be waiting in C++
    os._exit(0)


def torch_settings() -> dict[str, Any]:
    """Settings of torch, global or of this thread, that numbers depend on."""
    return {
        "dtype": torch.get_default_dtype(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "autocast": {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")},
    }


def apply(settings: dict[str, Any]) -> None:
    torch.set_default_dtype(settings["dtype"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.backends.mkldnn.enabled = settings["mkldnn"]
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = settings["cudnn"]
    for device, (enabled, dtype) in settings["autocast"].items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _leave_with_the_caller(source: Any, settings: dict[str, Any]) -> None:
    # A process that the caller has forked, such as a loader's, holds the other end of the input open when it dies.
    while os.getppid() == settings["caller"] and not select.select([source], [], [], _LOOK)[0]:
        pass
    _leave(settings)


def _leave(settings: dict[str, Any]) -> None:
    """End without a caller, and clear up what it would have cleared up."""
    for _ in range(20):  # another rank may be writing its report there, or clearing up, too
        shutil.rmtree(settings["directory"], ignore_errors=True)
        if not os.path.exists(settings["directory"]):
            break
        time.sleep(0.01)
    os._exit(2)
