"""Write a training to disk while it goes on: every rank its own blocks, rank 0 the rest, and then all of it counts."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..checkpoints import Draft, Saved, clear, prune
from ..errors import CheckpointError
from ..parts import BlockState
from ..runtime import Rank
from .checkpoint import Checkpoint, Due

Place = tuple[str, str, int]  # a directory, the name of the run that writes there, and steps of earlier stages
RUN = "run.safetensors"


class BlockWriter:
    """One rank's side: its blocks, copied when it has passed a step, and written beside the next ones."""

    def __init__(self, rank: Rank, place: Place) -> None:
        self._rank, self._place = rank, place
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[tuple[int, Future[None]]] = []

    def save(self, step: int) -> None:
        """As blocks are now, after `step` steps."""
        found = {
            _name(block): {**vars(state), "weights": weights}
            for block, (weights, state) in self._rank.whole_states().items()
        }
        own = tree_map_only(Tensor, lambda t: t.detach().to("cpu", copy=True), found)
        self._pending.append((step, self._pool.submit(self._write, step, own)))

    def finished(self, wait: bool = False) -> list[tuple[int, str]]:
        """The steps that are written by now, each with what went wrong, if anything did."""
        done = [(step, future) for step, future in self._pending if wait or future.done()]
        self._pending = [pair for pair in self._pending if pair not in done]
        return [(step, _failure(future)) for step, future in done]

    def close(self) -> None:
        self._pool.shutdown()

    def _write(self, step: int, found: Mapping[str, Any]) -> None:
        draft = _draft(self._place, step)
        for name, state in found.items():
            draft.write(name, state)


class Writer:
    """Rank 0's side of all checkpoints of a training.

    Arguments:
        checkpoint: where and when; `before`: steps of the stages before this one.
    """

    def __init__(self, checkpoint: Checkpoint, before: int) -> None:
        self.checkpoint, self.due = checkpoint, Due(checkpoint)
        self.place: Place = str(checkpoint.path), f"{socket.gethostname()}-{os.getpid()}", before
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._draft: Draft | None = None
        self._step = 0
        self._waits: set[int] = set()  # ranks whose blocks are not written yet
        self._run: tuple[Callable[[], dict[str, Any]], int] | None = None
        self._commit: Future[Saved] | None = None
        self._failed = ""
        self.last: Saved | None = None  # the one that was begun last, when it counts
        clear(checkpoint.path)

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._draft is not None

    def begin(self, step: int, ranks: set[int]) -> None:
        """Make a place for what all of these ranks will write."""
        self._draft, self._step = _draft(self.place, step), step
        self._waits, self._failed, self._run, self.last = set(ranks), "", None, None
        self.due.done()
        try:
            self._draft.begin()
        except OSError as error:
            self._failed = str(error)

    def note(self, run: Callable[[], dict[str, Any]], step: int) -> None:
        """What is to be written beside the blocks, once all of these are, and all losses of so many steps are known."""
        self._run = run, step

    def reported(self, rank: int, step: int, failure: str) -> None:
        """A rank has written its blocks, or could not."""
        if self._draft is not None and self._step == step:
            self._waits.discard(rank)
            self._failed = self._failed or (failure and f"rank {rank}: {failure}")

    def look(self, steps: int, wait: bool = False) -> None:
        """Make it count, when all is written; losses of so many `steps` are known."""
        if self._draft is None:
            return
        if self._commit is None and not self._waits and self._run is not None and steps >= self._run[1]:
            if self._failed:
                self._give_up(self._failed)
                return
            self._commit = self._pool.submit(self._finish, self._draft, self._run[0]())
        if self._commit is not None and (wait or self._commit.done()):
            failure = _failure(self._commit)
            if failure:
                self._give_up(failure)
            else:
                self.last, self._draft, self._commit = self._commit.result(), None, None

    def close(self) -> None:
        self._pool.shutdown()
        if self._draft is not None:
            self._draft.drop()

    def _finish(self, draft: Draft, run: dict[str, Any]) -> Saved:
        draft.write(RUN, run)
        found = draft.commit()
        prune(draft.directory, self.checkpoint.keep)
        return found

    def _give_up(self, why: str) -> None:
        assert self._draft is not None
        self._draft.drop()
        self._draft = self._commit = None
        warnings.warn(
            f"the checkpoint after step {self._step} could not be written, training goes on: {why}", stacklevel=2
        )


@dataclass(frozen=True)
class Restored:
    """What a training goes on from.

    Attributes:
        saved: where it comes from; `run`: rank 0's part.
        values: what training has changed, by name; `states`: of blocks and candidates, by number.
    """

    saved: Saved
    run: dict[str, Any]
    values: dict[str, Tensor]
    states: dict[int, BlockState]

    @classmethod
    def of(cls, saved: Saved) -> Restored:
        """Errors: CheckpointError for a file that cannot be read."""
        values: dict[str, Tensor] = {}
        states = {}
        for name in saved.names():
            if name == RUN:
                continue
            found = saved.read(name)
            values |= found.pop("weights")
            states[int(name.removeprefix("block-").removesuffix(".safetensors"))] = BlockState(**found)
        run = saved.read(RUN)
        if not isinstance(run, dict) or "stage" not in run:
            raise CheckpointError(f"The checkpoint {saved.path} is damaged.", given=f"{RUN}: no stage")
        return cls(saved, run, values, states)


def _draft(place: Place, step: int) -> Draft:
    directory, owner, before = place
    return Draft(Path(directory), before + step, owner)


def _name(block: int) -> str:
    return f"block-{block}.safetensors"


def _failure(future: Future[Any]) -> str:
    error = future.exception()
    return "" if error is None else f"{type(error).__name__}: {error}"
