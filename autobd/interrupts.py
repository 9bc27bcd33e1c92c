"""Ctrl-C that is not lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_AGAIN = 0.01  # seconds


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Within, a KeyboardInterrupt that falls into a destructor or a weak reference's callback comes again.

    Python raises it wherever the main thread happens to be. There it could only print it ("Exception ignored in") and
    go on; recording a model and a GPU's tensors are full of such places.
    """
    usual = sys.unraisablehook

    def hook(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            threading.Timer(_AGAIN, signal.raise_signal, [signal.SIGINT]).start()
        else:
            usual(lost)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual
