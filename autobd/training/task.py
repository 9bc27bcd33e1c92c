"""What is trained, on what and how: `Task`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ..blocks import Split
from ..program import Program, Trace
from ..recipe import Recipe
from .data import Batches
from .pair import ToPair
from .validation import Validation

Replan = Callable[[Program, Trace, frozenset[int]], Program | None]


@dataclass(frozen=True)
class Task:
    """All that stays the same over a run.

    Attributes:
        to_pair: from a batch to both models' arguments and the targets; `seed`: as for `distill`.
        teacher_writes: tensors that the teacher's forward changes, to be put back (see `Verification`).
        start: values that tensors of the student begin with, by key.
        replan: asked at every epoch's end but the last, with the blocks that have stopped: another program to go on
            with, or None; None: never.
        validation: how to judge the models at epoch ends; None: not at all.
        recalibrate: batches from which the assembled student's batch norms take their statistics in the end.
        callbacks: objects with some of `Callback`'s methods.
        fingerprint: what it depends on; `before`: what a checkpoint of a later stage keeps of the earlier one;
            `steps_before`: how many steps that had.
        trains: False: judge the student as it is, and nothing else.
        stage: what the student is called in scores: "assembled" while its blocks are trained, "finished" after them.
    """

    split: Split
    recipe: Recipe
    batches: Batches
    to_pair: ToPair
    seed: int = 0
    teacher_writes: tuple[str, ...] = ()
    start: Mapping[str, Tensor] = field(default_factory=dict)
    replan: Replan | None = None
    validation: Validation | None = None
    recalibrate: int = 0
    callbacks: tuple[Any, ...] = ()
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    steps_before: int = 0
    trains: bool = True
    stage: str = "assembled"

    @property
    def bare(self) -> ToPair:
        """The same without targets."""
        return replace(self.to_pair, wanted=False)
