"""What the caller's own code hears while training runs: `Callback`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CallbackError
from ..planner import Plan
from .history import History


@dataclass
class Run:
    """Where a training is.

    Attributes:
        stage: "assembled" while blocks are trained, "finished" while the whole student is.
        history: losses and scores so far; `plan`: who does what now.
        step, epoch: how many are done.
        stop: set it to True to end the training after this step, as if it had been the last one.
    """

    stage: str
    history: History
    plan: Plan
    step: int = 0
    epoch: int = 0
    stop: bool = False


class Callback:
    """Called in the caller's process; subclasses override what they need. An error in one ends the training."""

    def on_start(self, run: Run) -> None:
        """Before the first step."""

    def on_step(self, run: Run) -> None:
        """When the losses of a step are known, `run.history.losses[run.step - 1]`: some steps late where other ranks
        report them."""

    def on_epoch(self, run: Run) -> None:
        """After the end of an epoch, when the student has been written and judged."""

    def on_end(self, run: Run) -> None:
        """After the last epoch of the stage; candidates are chosen after it."""


def call(callbacks: Sequence[Any], hook: str, run: Run) -> None:
    """Errors: CallbackError that names the callback which raised."""
    for callback in callbacks:
        method = getattr(callback, hook, None)
        if method is None:
            continue
        try:
            method(run)
        except Exception as error:
            raise CallbackError(
                f"{type(callback).__name__}.{hook} has failed: {type(error).__name__}: {error}",
                given=f"step {run.step}, epoch {run.epoch}",
                do="see the error above for where it began",
            ) from error
