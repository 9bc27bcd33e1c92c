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
    if isinstance(error, Opaque):
        reason: str | None = str(error)
    elif isinstance(error, DataDependentOutputException) or ".numpy() is not supported" in str(error):
        reason = "uses the value of a tensor in Python (if, int(), .item(), .numpy(), torch.equal)"
    elif isinstance(error, DynamicOutputShapeException):
        reason = "makes a tensor whose shape depends on values (nonzero, unique, a boolean index)"
    else:
        reason = None
    if reason is None:
        shown = arguments.describe() if arguments is not None else ""
        return CaptureError(
            f"{where} fails on the example: {type(error).__name__}: {error}",
            given=" ".join(filter(None, [shown, given and f"at {given}"])) or None,
            expected="inputs that the model accepts",
            do="pass example=..., or inputs=(for_teacher, for_student) to turn a batch into arguments",
        )
    return CaptureError(
        f"{where} {reason}; a recording would freeze it.",
        given=given,
        expected="code that does the same for every batch, or a submodule around it",
        do="move these lines into a submodule of their own: it is then kept whole",
    )
