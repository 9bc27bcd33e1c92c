"""When a training is written to disk, and where: `Checkpoint`."""

from __future__ import annotations

import re
import tempfile
import time
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from ..checkpoints import Saved, saved
from ..errors import CheckpointError, InputError

_UNITS = {"epoch": "epochs", "step": "steps", "minute": "minutes"}


@dataclass(frozen=True)
class Checkpoint:
    """`distill(checkpoint=Checkpoint("runs/one"), resume="auto")`: where a training is, written while it goes on.

    Every rank writes its own blocks: with several hosts the directory is one that all of them share. It belongs to one
    training.

    Arguments:
        directory: where checkpoints are, in folders of their own; made if it is not there.
        every: "1 epoch", "200 steps", "10 minutes", or a number of steps.
        keep: how many; older ones are deleted.

    Errors: InputError for an `every` or `keep` that says nothing.
    """

    directory: str | PathLike[str]
    every: str | int = "1 epoch"
    keep: int = 3
    count: int = field(init=False, repr=False)
    unit: Literal["epochs", "steps", "minutes"] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        text = f"{self.every} steps" if isinstance(self.every, int) else str(self.every)
        match = re.fullmatch(r"\s*(\d+)\s*(epoch|step|minute)s?\s*", text)
        if match is None or int(match[1]) < 1 or isinstance(self.every, bool):
            raise InputError(
                "Checkpoint.every says no time.",
                given=repr(self.every),
                expected='"1 epoch", "200 steps", "10 minutes" or a number of steps',
            )
        if not isinstance(self.keep, int) or isinstance(self.keep, bool) or self.keep < 1:
            raise InputError(
                "Checkpoint.keep is no count.", given=repr(self.keep), expected="a whole number of at least 1"
            )
        object.__setattr__(self, "count", int(match[1]))
        object.__setattr__(self, "unit", _UNITS[match[2]])

    @property
    def path(self) -> Path:
        return Path(self.directory).absolute()


class Due:
    """When the next one is to be written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._every, self._last = checkpoint, time.monotonic()

    def at_step(self, step: int) -> bool:
        """After `step` steps are done, counted from 1."""
        if self._every.unit == "minutes":
            return time.monotonic() - self._last >= 60 * self._every.count
        return self._every.unit == "steps" and step % self._every.count == 0

    def at_epoch(self, epoch: int) -> bool:
        """After `epoch` epochs."""
        return self._every.unit == "epochs" and epoch % self._every.count == 0

    def done(self) -> None:
        """One is being written now."""
        self._last = time.monotonic()


def asked_checkpoint(given: Any) -> Checkpoint | None:
    """A `Checkpoint`, or a directory. Errors: InputError for anything else, or a place that cannot be written to."""
    if given is None:
        return None
    if isinstance(given, (str, PathLike)):
        given = Checkpoint(given)
    if isinstance(given, Checkpoint):
        try:
            given.path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=given.path).close()
        except OSError as error:
            raise InputError(
                "Checkpoints cannot be written there.", given=f"{given.directory}: {error}", do="pass another directory"
            ) from error
        return given
    raise InputError(
        "checkpoint= is no checkpoint.", given=repr(given), expected="Checkpoint(directory), or a directory"
    )


def asked_resume(given: Any, checkpoint: Checkpoint | None) -> Saved | None:
    """What to go on from. Errors: InputError, CheckpointError for one that is not there, or damaged."""
    chosen = None
    if given == "auto":
        if checkpoint is None:
            raise InputError('resume="auto" looks where checkpoints are written.', do="pass checkpoint= too")
        chosen = next(reversed(saved(checkpoint.path)), None)
    elif isinstance(given, (str, PathLike)):
        path = Path(given).absolute()
        inside = saved(path)
        beside = [s for s in saved(path.parent) if s.path == path]
        if not inside and not beside:
            raise CheckpointError(
                "There is no checkpoint.", given=str(given), expected="a folder step-... or a directory of these"
            )
        chosen = (beside or inside)[-1]
    elif given is not None:
        raise InputError("resume= is no place.", given=repr(given), expected='"auto", a directory or None')
    if chosen is not None:
        chosen.check()
    if checkpoint is not None:
        _check_place(checkpoint, chosen)
    return chosen


def _check_place(checkpoint: Checkpoint, chosen: Saved | None) -> None:
    """Errors: InputError for a directory with checkpoints that the training, which goes on from `chosen`, has not come
    by."""
    found = saved(checkpoint.path)
    if chosen is None or chosen.path.parent != checkpoint.path:
        if found:
            raise InputError(
                "The directory has checkpoints of an earlier training.",
                given=checkpoint.directory,
                expected="an empty directory, or one that is not there",
                do='pass resume="auto" to go on with it, or another directory',
            )
    elif found[-1].step > chosen.step:
        raise InputError(
            "The directory has later checkpoints than the one to go on from.",
            given=f"{found[-1].path}, resume={str(chosen.path)!r}",
            expected="none that the training has not come by",
            do="delete the later ones, or pass another directory",
        )
