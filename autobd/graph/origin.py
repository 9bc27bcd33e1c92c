"""Where in the user's code something could not be recorded, and what to tell the user."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from ..errors import CaptureError
from .arguments import Arguments

_OWN = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, __file__))


class Opaque(Exception):
    """Something that a graph would freeze; ends the recording of the smallest submodule around it."""


class Rolled(Opaque):
    """A random number that Python code uses: to skip a layer, to mask a part of the input."""


def user_line(error: BaseException) -> str:
    """The last line of the user's code (outside torch and this package) that led to `error`: "net.py:12 in forward"."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_OWN):
            return shown((frame.filename, frame.lineno or 0, frame.name))
    return ""


def calling_line() -> tuple[str, int, str]:
    """File, line and function of the user's code that is running; cheap, it is asked for every node."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


def shown(line: tuple[str, int, str]) -> str:
    """A line as text for an error: "net.py:12 in forward"."""
    return f"{Path(line[0]).name}:{line[1]} in {line[2]}"


def explain(error: Exception, model: nn.Module | None, path: str | None, arguments: Arguments | None) -> CaptureError:
    """`error`, met while recording submodule `path`, as a CaptureError with a remedy."""
    if isinstance(error, CaptureError):
        return error
    where = f"{type(model).__name__}.forward" if not path else f"module '{path}'"
    given = user_line(error) or None
    reason = _frozen(error)
    if reason is None:
        shown = arguments.describe() if arguments is not None else ""
        return CaptureError(
            f"{where} fails on the example: {type(error).__name__}: {error}",
            given=" ".join(filter(None, [shown, given and f"at {given}"])) or None,
            expected="inputs that the model accepts",
            do="pass example=..., or inputs=(for_teacher, for_student) to turn a batch into arguments",
        )
    elsewhere = "move these lines into a submodule of their own: it is then kept whole"
    off = "switch it off for distillation (set its probability in the model's configuration to 0), or "
    return CaptureError(
        f"{where} {reason}; a recording would freeze it.",
        given=given,
        expected="code that does the same for every batch, or a submodule around it",
        do=off + elsewhere if isinstance(error, Rolled) else elsewhere,
    )


def on_meta(path: str, error: Exception) -> CaptureError:
    """For a module whose recording ended in `error`, and whose weights are on the meta device."""
    return CaptureError(
        f"module '{path}' {_frozen(error) or f'fails on fake tensors: {error}'}: it could only be run with values, and "
        "its weights are on the meta device.",
        given=user_line(error) or None,
        expected="a module that runs without values, or weights that have values",
        do="build the model on the CPU",
    )


def reason_of(error: Exception) -> str:
    """Why the module that `error` was met in stays whole, and where."""
    known = (
        str(error) if isinstance(error, CaptureError) else _frozen(error) or f"fails: {type(error).__name__}: {error}"
    )
    hint = "; without this randomness it would be opened" if isinstance(error, Rolled) else ""
    line = user_line(error)
    return f"{known}{hint} ({line})" if line else known + hint


def _frozen(error: Exception) -> str | None:
    """What a recording would freeze, where `error` says that; None for any other error."""
    if isinstance(error, Opaque):
        return str(error)
    if isinstance(error, DataDependentOutputException) or ".numpy() is not supported" in str(error):
        return "uses the value of a tensor in Python (if, int(), .item(), .numpy(), torch.equal)"
    if isinstance(error, DynamicOutputShapeException):
        return "makes a tensor whose shape depends on values (nonzero, unique, a boolean index)"
    return None


def by_dice(error: Exception) -> Exception:
    """`error`, met after Python code has drawn random numbers: if something would be frozen, it is what was drawn."""
    if _frozen(error) is None or isinstance(error, Rolled):
        return error
    return Rolled("draws random numbers in Python").with_traceback(error.__traceback__)
