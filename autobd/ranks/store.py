"""What the ranks of one host tell each other before they are connected, and how they failed."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_LOOK = 0.01  # seconds


class DirectoryStore(dist.Store):  # type: ignore[misc, name-defined]
    """A file for each key, whole or not there: a rank may be killed at any time.

    torch's own FileStore reads a file that such a rank has left half-written for ever, and waits for one that is gone;
    a TCPStore has a port that other users of the host can reach.

    Arguments:
        path: a directory that this user alone can read; all ranks see it.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def set(self, key: str, value: str | bytes) -> None:
        """Errors: RuntimeError if the directory is gone."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.path, prefix="new-", delete=False) as file:
                file.write(value.encode() if isinstance(value, str) else value)
            os.replace(file.name, self._file(key))
        except OSError as error:
            gone = not self.path.exists()
            raise RuntimeError(f"the ranks' directory {self.path} {'is gone' if gone else f': {error}'}") from error

    def get(self, key: str) -> bytes:
        """Wait for a value. Errors: as for `wait`."""
        self.wait([key])
        return self._file(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Errors: RuntimeError if the directory is gone, or after `timeout`."""
        end = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if not self.path.exists():
                raise RuntimeError(f"the ranks' directory {self.path} is gone")
            if end is not None and time.monotonic() > end:
                raise RuntimeError(f"nobody has set {' or '.join(keys)}")
            time.sleep(_LOOK)

    def for_nccl(self) -> Any:
        """A store that NCCL's own threads can use."""
        return dist.FileStore(str(self.path / "nccl"), -1)  # type: ignore[attr-defined]

    def _file(self, key: str) -> Path:
        return self.path / hashlib.sha256(key.encode()).hexdigest()
