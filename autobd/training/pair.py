"""From a batch to what both models are called with, and to the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import InputError, users_code
from ..graph import Arguments, called_as
from ..graph.arguments import TARGET_NAMES

Pair = tuple[Arguments, Arguments, Arguments]  # for the teacher, for the student, and the targets


@dataclass(frozen=True)
class ToPair:
    """Makes a `Pair` of a batch.

    Attributes:
        models: stand-ins that take the teacher's and the student's arguments.
        functions: callables from a batch to these arguments; None: the batch as it is.
        positional: how many positional arguments a batch begins with; None: those that the model requires.
        targets: callable from a batch to its targets; None: what follows the inputs, or an entry of such a name.
        wanted: whether targets are needed at all.
    """

    models: tuple[nn.Module, nn.Module]
    functions: tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]
    positional: int | None
    targets: Callable[[Any], Tensor] | None
    wanted: bool

    @classmethod
    def of(
        cls,
        teacher: nn.Module,
        student: nn.Module,
        inputs: Sequence[Callable[[Any], Any] | None] | None,
        targets: Callable[[Any], Tensor] | None,
        example: Any,
        wanted: bool,
    ) -> ToPair:
        """Arguments as for `distill`. Errors: InputError for `inputs` that are no pair."""
        if inputs is not None and (not isinstance(inputs, Sequence) or len(inputs) != 2):
            raise InputError(
                "inputs= is not a pair.", given=repr(inputs), expected="(for_teacher, for_student), callables or None"
            )
        if inputs is not None and not all(f is None or callable(f) for f in inputs):
            raise InputError("inputs= holds no function.", given=repr(inputs), expected="callables or None")
        if targets is not None and not callable(targets):
            raise InputError("targets= is no function.", given=repr(targets), expected="a callable from a batch")
        positional = len(example) if isinstance(example, (tuple, list)) and inputs is None else None
        functions = (inputs[0], inputs[1]) if inputs is not None else (None, None)
        return cls((called_as(teacher), called_as(student)), functions, positional, targets, wanted)

    def __call__(self, batch: Any) -> Pair:
        """Errors: InputError for a batch without what is needed."""
        teacher, student = (
            Arguments.from_batch(batch, model, self.positional)
            if function is None
            else Arguments.of(called("inputs", function, batch), model)
            for model, function in zip(self.models, self.functions, strict=True)
        )
        if not self.wanted:
            return teacher, student, Arguments()
        found = self._targets(batch)
        if not isinstance(found, Tensor):
            raise InputError(
                "A batch has no targets.",
                given=f"{type(batch).__name__}, targets {type(found).__name__}",
                expected="(inputs, targets), or a dict with labels",
                do="pass targets=, a callable from a batch to its targets, or leave target_loss= and validate= out",
            )
        if not found.ndim or found.shape[0] != student.rows:
            raise InputError(
                "The targets are not one for each row.",
                given=f"targets {list(found.shape)}, {student.rows} rows",
                expected=f"a tensor whose first dimension is {student.rows}",
                do="pass targets=, a callable from a batch to its targets",
            )
        return teacher, student, Arguments((found,))

    def _inputs(self, batch: Sequence[Any]) -> int:
        """How many entries of a batch are inputs."""
        if all(function is not None for function in self.functions):
            return 1
        used = (len(Arguments.from_batch(batch, m, self.positional).args) for m in self.models)
        return 1 if isinstance(batch[0], (tuple, list, Mapping)) else max(used)

    def targets_of(self, batch: Any) -> Tensor | None:
        """None for a batch without targets. Errors: InputError where `targets` fails."""
        found = self._targets(batch)
        return found if isinstance(found, Tensor) else None

    def _targets(self, batch: Any) -> Any:
        if self.targets is not None:
            return called("targets", self.targets, batch)
        if isinstance(batch, Mapping):
            return next((batch[name] for name in sorted(TARGET_NAMES) if name in batch), None)
        return batch[-1] if isinstance(batch, (tuple, list)) and len(batch) > self._inputs(batch) else None


def called(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """What the user's function makes of a batch. Errors: InputError where it fails."""
    with users_code(f"{name}= fails on a batch ({type(batch).__name__})."):
        return function(batch)
