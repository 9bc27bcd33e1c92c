"""Memory of a rank: how much it holds at most, and on a CPU, that it is kept from step to step.

glibc hands large tensors back to the system when they are freed, and each new one comes in page by page: up to a third
of a step of a convolutional network.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_LIBC = ctypes.CDLL(None) if os.name == "posix" else None
_NEVER, _DEFAULT_TRIM, _DEFAULT_MMAPS = -1, 64 << 20, 65536


class Peak:
    """The most memory that this process holds, beyond what it does now; other objects of this class begin anew."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = float(torch.cuda.memory_allocated(device))
            return
        if _LIBC is not None and hasattr(_LIBC, "malloc_trim"):
            _LIBC.malloc_trim(0)  # what is kept for the next tensor would hide it
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            self._before = math.nan
        else:
            self._before = _status("VmRSS")

    @property
    def bytes(self) -> float:
        """Until now; not a number where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return _status("VmHWM") - self._before


def _status(name: str) -> float:
    """Bytes of this process, as Linux tells them."""
    try:
        with open("/proc/self/status") as file:
            return next((1024.0 * int(line.split()[1]) for line in file if line.startswith(name)), math.nan)
    except OSError:
        return math.nan


@contextmanager
def memory_kept(device: torch.device) -> Iterator[None]:
    """Keep freed memory for the next tensor, and give it back at the end. Nothing is done on a GPU, without glibc, or
    where the environment says how it is to allocate."""
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith(("MALLOC_TRIM_", "MALLOC_MMAP_")) for name in os.environ
    )
    if device.type != "cpu" or chosen or not hasattr(_LIBC, "malloc_trim"):
        yield
        return
    assert _LIBC is not None
    _LIBC.mallopt(_MMAP_MAX, 0)
    _LIBC.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        _LIBC.mallopt(_MMAP_MAX, _DEFAULT_MMAPS)
        _LIBC.mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM)
        _LIBC.malloc_trim(0)
