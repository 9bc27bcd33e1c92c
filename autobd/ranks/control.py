"""Jobs and reports between the rank that calls and the others."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import AutobdError, RankError
from .waiting import Lost

_TAG = 0  # edges have tags from 1 on


def send_bytes(group: Any, target: int, data: bytes) -> None:
    """Errors: RuntimeError if the peer is gone."""
    size = torch.tensor([len(data)])
    payload = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    group.send([size], target, _TAG).wait()
    if data:
        group.send([payload], target, _TAG).wait()


def receive_bytes(group: Any, source: int) -> memoryview:
    """Errors: RuntimeError if the peer is gone."""
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], source, _TAG).wait()
    payload = torch.empty(int(size), dtype=torch.uint8)
    if len(payload):
        group.recv([payload], source, _TAG).wait()
    return payload.numpy().data


class RemoteTraceback(Exception):
    """The traceback of an error on another rank, as text; the cause of the error that the caller gets."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class Report:
    """How a rank failed: the error if it can be sent, its text, and whether it only lost another rank."""

    error: bytes | None
    text: str
    trace: str
    lost: bool

    @classmethod
    def of(cls, error: BaseException) -> Report:
        try:
            sent = pickle.dumps(error) if isinstance(error, AutobdError) else None
        except Exception:
            sent = None
        trace = "".join(traceback.format_exception(error))
        return cls(sent, f"{type(error).__name__}: {error}", trace, isinstance(error, Lost))

    def as_error(self, rank: int, what: str) -> Exception:
        """The error for the caller, with the remote traceback as its cause."""
        error: Exception = (
            pickle.loads(self.error)
            if self.error
            else RankError(f"Rank {rank} ({what}) failed: {self.text}", do="see its traceback above")
        )
        error.__cause__ = RemoteTraceback(f"rank {rank}:\n{self.trace}")
        return error


def post(store: Any, rank: int, report: Report) -> None:
    """Leave a report where the caller finds it."""
    store.set(f"report {rank}", pickle.dumps(report))


def posted(store: Any, rank: int) -> Report | None:
    key = f"report {rank}"
    return pickle.loads(store.get(key)) if store.check([key]) else None
