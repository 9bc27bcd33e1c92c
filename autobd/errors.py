"""The error family: each says what was given, what was expected and what to do instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AutobdError(Exception):
    """Base of every error that autobd raises on purpose.

    Arguments:
        problem: one sentence that says what went wrong, with the module path, block or rank where there is one.
        given: what was found.
        expected: what would have been right.
        do: what to write instead.
    """

    def __init__(self, problem: str, *, given: object = None, expected: object = None, do: str | None = None) -> None:
        self.problem, self.given, self.expected, self.do = problem, given, expected, do
        lines = [problem]
        if given is not None:
            lines.append(f"  given:    {given}")
        if expected is not None:
            lines.append(f"  expected: {expected}")
        if do is not None:
            lines.append(f"  do:       {do}")
        super().__init__("\n".join(lines))


class InputError(AutobdError):
    """An argument, model or batch that cannot be used."""


class SpecError(InputError):
    """A model spec of the command line that names nothing."""


class CaptureError(AutobdError):
    """A model whose forward cannot be recorded without freezing something that changes from call to call."""


class SplitError(AutobdError):
    """A pair of models that cannot be split into matching blocks as asked."""


class PlanError(AutobdError):
    """A schedule that cannot be run: blocks trained twice or never, shares that are not the batch, a deadlock."""


class RankError(AutobdError):
    """A rank that failed, was killed or does not answer."""


class CallbackError(AutobdError):
    """A callback that raised."""


class CheckpointError(AutobdError):
    """A checkpoint that is damaged, or of another training."""


class VerifyError(AutobdError):
    """Blocks that do not reproduce the model they were carved from."""


class LossError(AutobdError):
    """A loss that does not give one finite value, or one per row, for tensors of equal shape."""


class NonFiniteError(LossError):
    """A loss or gradient that is NaN or infinite."""


@contextmanager
def users_code(problem: str, expected: object = None) -> Iterator[None]:
    """Around code that is not autobd's. Errors: InputError with `problem` for what it raises, AutobdError as it is."""
    try:
        yield
    except AutobdError:
        raise
    except Exception as error:
        raise InputError(
            problem, given=f"{type(error).__name__}: {error}", expected=expected, do="see the traceback above"
        ) from error


def nearest(name: str, known: Iterable[str], count: int = 5) -> str:
    """The names most like `name`, as text for an error ("none" if nothing is known)."""
    known = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, known, count, cutoff=0.3) or known[:count]
    return ", ".join(close) or "none"
