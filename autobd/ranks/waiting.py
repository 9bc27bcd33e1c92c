"""Wait for other ranks: for so long, open to Ctrl-C, and only while they live."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import RankError

T = TypeVar("T")
_LOOK = 0.25  # seconds between two looks at whether the other ranks live


class Lost(Exception):
    """The connection to a peer broke, or a rank died."""


@dataclass(frozen=True)
class Patience:
    """How long to wait.

    Attributes:
        timeout: seconds; None: for ever.
        alarm: called now and then while waiting; raises Lost if a rank has died.
    """

    timeout: float | None
    alarm: Callable[[], None] = lambda: None

    def get(self, source: queue.Queue[T]) -> T:
        """The next item. Errors: TimeoutError, Lost."""
        end = None if self.timeout is None else time.monotonic() + self.timeout
        while True:
            left = _LOOK if end is None else min(_LOOK, max(end - time.monotonic(), 0))
            try:
                return source.get(timeout=left)
            except queue.Empty:
                self.alarm()
                if end is not None and time.monotonic() >= end:
                    raise TimeoutError from None


class Pending:
    """The result of a function that runs on another thread, so that what blocks in C++ does not block Ctrl-C.

    Arguments:
        for_what: whom it waits for, for the error when that takes too long; None: TimeoutError.
    """

    def __init__(self, for_what: str | None = None) -> None:
        self._for_what = for_what
        self._result: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue()

    def run(self, function: Callable[[], Any]) -> None:
        try:
            self._result.put((function(), None))
        except BaseException as error:
            self._result.put((None, error))

    def result(self, patience: Patience) -> Any:
        """Errors: RankError or TimeoutError; Lost, also for what the connection's own code raises; or what the function
        raised."""
        try:
            value, error = patience.get(self._result)
        except TimeoutError:
            if self._for_what is None:
                raise
            raise RankError(
                f"Waited {patience.timeout:g} s: {self._for_what}.",
                expected="an answer in time",
                do="look at what the other ranks do, or pass a longer timeout=",
            ) from None
        if isinstance(error, RuntimeError):
            raise Lost(str(error)) from error
        if error is not None:
            raise error
        return value


class Waiter:
    """One thread that runs functions in order, from the first one to `close`; it does not keep the process alive."""

    def __init__(self) -> None:
        self._todo: queue.Queue[tuple[Pending, Callable[[], Any]] | None] = queue.Queue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any], for_what: str | None = None) -> Pending:
        if self._thread is None:
            self._thread = threading.Thread(target=_run, args=(self._todo,), daemon=True, name="waiter")
            self._thread.start()
        pending = Pending(for_what)
        self._todo.put((pending, function))
        return pending

    def close(self, patience: float = 0.0) -> None:
        """Let the thread end when it has done what there is; wait for that up to `patience` seconds."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join(patience)


def _run(todo: queue.Queue[tuple[Pending, Callable[[], Any]] | None]) -> None:
    while (item := todo.get()) is not None:
        item[0].run(item[1])
        del item  # what a function holds, such as a group of ranks, is not kept until the next one
