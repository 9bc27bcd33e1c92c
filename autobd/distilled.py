"""What `distill` returns, on the rank that calls and on a launcher's other processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .blocks import Split, Verification
from .blocks.candidates import assembled
from .blocks.hybrid import hybrid as hybrid_student
from .costs import Profile
from .errors import InputError
from .graph import Arguments
from .planner import Plan
from .program import Program, Trace
from .report import Report, inspect
from .report.plot import plot
from .training import History, Scores, write_back


@dataclass(frozen=True)
class Distilled:
    """What `distill` returns.

    Attributes:
        student: the caller's own object (taken out of a DataParallel wrapper), trained, with its own keys.
        history: losses by step and block.
        trace: when every rank did what, in the last 64 steps of the last program; a change of what blocks are given,
            or a re-plan, starts another.
        split, verification: the block pairs, and the proof that they are the models.
        profile: what the plan was made by.
        plan, program: who did what, in the end; `print(result.program)` shows the code that ran.
        notes: what the user should know.
        candidates: what the candidates are worth, and which were chosen; None without any.
        hybrid: the student with the adapters that could not be folded into it (see `split`); None if there are none.
    """

    student: nn.Module
    history: History
    trace: Trace
    split: Split
    verification: Verification
    profile: Profile
    plan: Plan
    program: Program
    notes: tuple[str, ...] = ()
    hybrid: nn.Module | None = None
    candidates: Scores | None = None

    def report(self) -> Report:
        """The plan and the run side by side, as text (`print`), page (`html`) and trace (`chrome_trace`)."""
        own_input = self.program.own_input
        return inspect(self.split, self.profile, self.plan, own_input=own_input, run=self.trace)

    def plot(self) -> Any:
        """Relative losses by block, and what the models were worth, as a matplotlib Figure. Errors: InputError without
        matplotlib."""
        return plot(self.history)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the student's `state_dict`, whole or not at all: as safetensors where `path` ends so, else as
        `torch.save` does. Its own class loads either (`load_state_dict(safetensors.torch.load_file(path))`). Errors:
        InputError for a directory that does not exist."""
        state = {name: t.detach().cpu() for name, t in self.student.state_dict().items() if isinstance(t, Tensor)}
        target = Path(path)
        if not target.parent.is_dir():
            raise InputError("There is no such directory.", given=target.parent, do="make it first")
        beside = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            if target.suffix == ".safetensors":
                save_file({name: t.contiguous().clone() for name, t in state.items()}, beside)
            else:
                torch.save(state, beside)
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)

    def __str__(self) -> str:
        parts = [str(self.split), str(self.plan), *([] if self.candidates is None else [str(self.candidates)])]
        return "\n\n".join([*parts, "\n".join([str(self.history), *(f"note: {n}" for n in self.notes)])])


@dataclass(frozen=True)
class Shared:
    """What rank 0 tells the launcher's other processes at the end: `Distilled` without models, weights, and inputs to
    split the models with."""

    done: Distilled
    recorded: tuple[Arguments, ...]
    values: Mapping[str, Tensor]
    maps: Mapping[tuple[int, int], Tensor]

    @classmethod
    def of(cls, done: Distilled, recorded: tuple[Arguments, ...], maps: Mapping[tuple[int, int], Tensor]) -> Shared:
        values = {name: t.detach().cpu() for name, t in tensors_of(done.student).items()}
        bare = replace(done, student=cast(Any, None), split=cast(Any, None))
        cpu = torch.device("cpu")
        return cls(bare, tuple(a.on(cpu) for a in recorded), values, {k: m.cpu() for k, m in maps.items()})


def received(told: Any, as_asked: Callable[[Any], Split], student: nn.Module, home: torch.device) -> Distilled:
    """What rank 0 has shared, with this process's own models. Errors: the one that rank 0 has shared."""
    if isinstance(told, Exception):
        raise told
    found = as_asked(tuple(a.on(home) for a in told.recorded))
    if told.done.candidates is not None:
        found = assembled(found, told.done.candidates.chosen)
    write_back(told.values, student)
    return replace(told.done, student=student, split=found, hybrid=hybrid_student(found, student, told.maps))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
