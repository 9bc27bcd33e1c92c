"""Processes of this machine as /proc shows them."""

import os
import time
from pathlib import Path


def _stat(pid):
    """State and parent of a process; None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def children(pid=None):
    """Ids of the direct children of a process (this one), those that ended and were not waited for included."""
    pid = pid or os.getpid()
    found = {int(p.name): _stat(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()}
    return {child for child, stat in found.items() if stat and stat[1] == pid}


def is_worker(pid):
    """Whether a process is a rank that a caller has started."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return any(b"autobd.ranks.worker" in w for w in words)


def workers(pid=None):
    """Ids of the ranks that a process has started, in their order."""
    return sorted(child for child in children(pid) if is_worker(child))


def alive(pid):
    stat = _stat(pid)
    return stat is not None and stat[0] != "Z"


def gone(pids, seconds):
    """Whether none of these processes lives after at most so many seconds."""
    end = time.monotonic() + seconds
    while any(alive(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def listening(pid):
    """The addresses at which a process listens, as /proc has them: hexadecimal."""
    sockets = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(fd))
        except FileNotFoundError:
            continue
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].split(":")[0])
    return found
