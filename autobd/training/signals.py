"""Signals that ask a training to end in order: it saves where it is, and goes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ..checkpoints import Saved

_ASKED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # a scheduler's notices, and Ctrl-C


class Signals:
    """What has come so far: `asked` is the first signal that asked to end, or None."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self.asked is not None:
                raise KeyboardInterrupt
            os.write(2, b"\nautobd: saving a checkpoint; Ctrl-C again stops at once\n")  # print may be under way
        self.asked = self.asked or signal.Signals(number)


class Interrupted(Exception):
    """A signal has asked to end. Arguments: which; the checkpoint that was written, if that was possible."""

    def __init__(self, number: signal.Signals, saved: Saved | None) -> None:
        super().__init__(number, saved)
        self.number, self.saved = number, saved


@contextmanager
def in_order() -> Iterator[None]:
    """End the process, or the call, as the signal asked that has interrupted a training."""
    try:
        yield
    except Interrupted as error:
        text = "the last steps could not be saved"
        if error.saved is not None:
            text = f'saved in {error.saved.path}; resume="auto" goes on from there'
        print(f"autobd: {error.number.name}: {text}", file=sys.stderr, flush=True)
        if error.number == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(0 if error.saved is not None else 1) from None


@contextmanager
def signals(heard: bool) -> Iterator[Signals]:
    """Within, where they are to be `heard`, these signals are noted. Only a process's main thread can do so."""
    found = Signals()
    before: dict[signal.Signals, Any] = {}
    if heard and threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, found) for s in _ASKED}
    try:
        yield found
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
