"""A directory of checkpoints: each a folder that is there whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import tensors

_VERSION = 1
_NAME = re.compile(r"step-(\d{8})")
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete: its folder, and the step that it was made after."""

    path: Path
    step: int

    def check(self) -> None:
        """Errors: CheckpointError, with the name of the file, where something is missing or other than it was
        written."""
        try:
            manifest = json.loads((self.path / _MANIFEST).read_text())
            files = manifest["files"]
            if manifest["autobd checkpoint"] != _VERSION:
                raise CheckpointError(
                    f"{self.path} was written by another version of autobd.",
                    given=f"form {manifest['autobd checkpoint']}",
                    expected=f"form {_VERSION}",
                )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(_MANIFEST, f"{type(error).__name__}: {error}") from error
        for name, digest in files.items():
            try:
                found = _digest(self.path / name)
            except OSError as error:
                raise self._damaged(name, str(error)) from error
            if found != digest:
                raise self._damaged(name, "other contents than were written")

    def read(self, name: str) -> Any:
        """One file's state. Errors: CheckpointError if it cannot be read."""
        try:
            return tensors.read(self.path / name)
        except Exception as error:
            raise self._damaged(name, f"{type(error).__name__}: {error}") from error

    def names(self) -> list[str]:
        """Of its files."""
        return list(json.loads((self.path / _MANIFEST).read_text())["files"])

    def _damaged(self, name: str, what: str) -> CheckpointError:
        others = [s.path.name for s in saved(self.path.parent) if s.step < self.step]
        do = "delete it" + (
            f', or pass resume="{self.path.parent / others[-1]}" and another directory for new ones' if others else ""
        )
        return CheckpointError(f"The checkpoint {self.path} is damaged.", given=f"{name}: {what}", do=do)


def saved(directory: Path) -> list[Saved]:
    """The complete checkpoints of a directory, oldest first."""
    found = [(m, p) for p in directory.glob("step-*") if (m := _NAME.fullmatch(p.name)) and (p / _MANIFEST).is_file()]
    return sorted((Saved(path, int(match[1])) for match, path in found), key=lambda s: s.step)


class Draft:
    """A checkpoint in the making: a folder beside, which no one takes for one.

    Arguments:
        directory: where checkpoints are; made if it is not there. `step`: that it is made after.
        owner: tells it from those of other runs.
    """

    def __init__(self, directory: Path, step: int, owner: str) -> None:
        self.directory, self.step = directory, step
        self.path = directory / f".step-{step:08d}.{owner}"

    def begin(self) -> None:
        """Make the folder, for its owner alone."""
        self.directory.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(mode=0o700)

    def write(self, name: str, state: Any) -> None:
        """One file, on the disk when this returns. Errors: OSError."""
        tensors.write(self.path / name, state)
        with open(self.path / name, "rb+") as file:
            os.fsync(file.fileno())

    def commit(self) -> Saved:
        """Make it a checkpoint, in place of one of the same step."""
        files = {p.name: _digest(p) for p in sorted(self.path.iterdir())}
        manifest = self.path / _MANIFEST
        with open(manifest, "w") as file:
            json.dump({"autobd checkpoint": _VERSION, "files": files}, file)
            file.flush()
            os.fsync(file.fileno())
        target = self.directory / f"step-{self.step:08d}"
        if target.exists():
            _vanish(target)
        os.rename(self.path, target)
        _sync(self.directory)
        return Saved(target, self.step)

    def drop(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.path, ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Delete all checkpoints but the newest ones; each disappears at once."""
    for old in saved(directory)[:-keep]:
        _vanish(old.path)


def clear(directory: Path) -> None:
    """Delete what a run that was killed has left behind: drafts, and what it was about to delete."""
    for left in directory.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _vanish(path: Path) -> None:
    """Delete a checkpoint at once."""
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
