"""Start the other ranks of one host as plain processes: they import autobd, never the caller's `__main__`."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

_MAIN = "from autobd.ranks.worker import main; main()"


def start(directory: str, devices: Sequence[str], threads: int, timeout: float) -> dict[int, subprocess.Popen[bytes]]:
    """Processes for ranks 1 and up. Each ends when its standard input does or its parent is another one, so that
    none survives the caller."""
    processes = {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    for rank in range(1, len(devices)):
        # A session of its own: Ctrl-C goes to the caller alone, who then stops the others.
        process = subprocess.Popen(
            [sys.executable, "-c", _MAIN], stdin=subprocess.PIPE, start_new_session=True, env=environment
        )
        settings: dict[str, Any] = {
            "rank": rank,
            "devices": tuple(devices),
            "directory": directory,
            "caller": os.getpid(),
            "threads": threads,
            "timeout": timeout,
            "path": list(sys.path),
        }
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(settings))
        process.stdin.flush()
        processes[rank] = process
    return processes


def stop(processes: dict[int, subprocess.Popen[bytes]], patience: float) -> None:
    """Wait `patience` seconds for the processes to end, then kill what is left."""
    for process in processes.values():
        if process.stdin is not None:
            process.stdin.close()
    for process in processes.values():
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cause_of_death(code: int) -> str:
    """An exit status as text."""
    if code >= 0:
        return f"ended with status {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
