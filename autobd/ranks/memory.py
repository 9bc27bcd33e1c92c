"""Memory of a rank on a CPU: kept from step to step.

glibc hands large tensors back to the system when they are freed, and each new one comes in page by page: up to a third
of a step of a convolutional network.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt
_NEVER, _DEFAULT_TRIM, _DEFAULT_MMAPS = -1, 64 << 20, 65536


@contextmanager
def memory_kept(device: torch.device) -> Iterator[None]:
    """Keep freed memory for the next tensor, and give it back at the end. Nothing is done on a GPU, without glibc, or
    where the environment says how it is to allocate."""
    libc = ctypes.CDLL(None) if os.name == "posix" else None
    chosen = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith(("MALLOC_TRIM_", "MALLOC_MMAP_")) for name in os.environ
    )
    if device.type != "cpu" or chosen or not hasattr(libc, "mallopt") or not hasattr(libc, "malloc_trim"):
        yield
        return
    assert libc is not None
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        libc.mallopt(_MMAP_MAX, _DEFAULT_MMAPS)
        libc.mallopt(_TRIM_THRESHOLD, _DEFAULT_TRIM)
        libc.malloc_trim(0)
