"""The recordings of one mode, at two batch sizes, and what a call leaves behind for the next one.

A forward may bind attributes: a flag that hooks are installed, a table that later calls read, or a memory that changes
what later calls do. From where a first call has left the model, second calls are then recorded at both batch sizes. If
these leave the attributes alone and do what first calls do, they are a cache. Otherwise the module is kept whole.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..errors import CaptureError
from .arguments import Arguments
from .fake_mode import RecordingMode
from .leftovers import Names, forget_tables, left_behind, readers, set_after_calls
from .recorder import Recorder, Recording
from .repetition import constants, difference, differing_constant
from .subject import Subject


class KeptWhole(Exception):
    """Modules that the recordings to come must keep whole: path -> reason."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(", ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Calls:
    """How `model` is called.

    Attributes:
        arguments, names: with what, and a name for each tensor in it.
        sizes: the two batch sizes.
        leaves: modules to keep whole, with the reason; those that a recording cannot open are added.
    """

    model: nn.Module
    arguments: Arguments
    names: list[str]
    sizes: tuple[int, int]
    leaves: dict[str, str]

    def record(self, training: bool) -> list[Recording]:
        """One recording for each batch size, in train or eval mode; attributes are afterwards as before.

        Errors: KeptWhole; CaptureError if the model fails, or if its own code cannot be recorded.
        """
        self.model.train(training)
        subject = Subject(self.model)
        try:
            first = self._first(subject, self.sizes[0])
            left = left_behind(first)
            self._refuse(left, first)
            kept = [constants(first, left)]
            seconds, rebound = self._seconds(subject, first) if left or first.remembers else (None, set())
            subject.attributes.restore()
            other = self._first(subject, self.sizes[1])
            kept.append(constants(other, left))
        finally:
            subject.attributes.restore()
        firsts = [first.recording, other.recording]
        if seconds is not None:
            found = [difference(a, b, k, rebound) for a, b, k in zip(firsts, seconds, kept, strict=False)]
            found += [differing_constant(*kept), "" if len(seconds) < 2 else None]
            self._blame(next((path for path in found if path is not None), None), left, first)
        return firsts

    def _blame(self, reader: str | None, left: Names, first: Recorder) -> None:
        """Keep the module whole that does something else in a second call, or those that have left what it reads."""
        if reader is None:
            return
        if reader in left:
            kind, names = type(self.model.get_submodule(reader)), left[reader]
            setters = [p for p in left if type(self.model.get_submodule(p)) is kind and left[p] == names]
        else:
            setters = [p for p in left if p] or list(left)
        reasons = {p: f"sets self.{left[p][0]} and reads it in the next call" for p in setters}
        self._keep_whole(reasons or {reader: "reads what a module kept whole has set in the call before"}, first)

    def _refuse(self, left: Names, first: Recorder) -> None:
        """Keep whole what no second call can clear: buffers and parameters that are bound anew, and attributes of what
        is recorded as one operation or that it may read."""
        modules = {path: self.model.get_submodule(path) for path in left}
        state = {p: [n for n in left[p] if n in m._buffers or n in m._parameters] for p, m in modules.items()}
        self._keep_whole({p: f"sets self.{names[0]} in its forward" for p, names in state.items() if names}, first)
        set_later = set_after_calls(first)
        reasons = {p.rpartition(".")[0]: f"changes '{n}' of '{p}' after calling it" for p, n in set_later.items()}
        self._keep_whole(reasons, first)
        self._keep_whole(
            {p: f"sets self.{left[p][0]}, which '{leaf}' may read" for p, leaf in readers(first, left).items()}, first
        )

    def _keep_whole(self, reasons: dict[str, str], recorder: Recorder) -> None:
        called = {}
        for path, reason in reasons.items():
            while path and (path not in recorder.called or path in self.leaves):  # it was reached by other means
                path = path.rpartition(".")[0]
            called[path] = reason
        if "" in called:
            raise CaptureError(
                f"{type(self.model).__name__}.forward {called['']}; a recording would freeze it.",
                given=", ".join(f"module '{path}'" for path in reasons if path) or None,
                expected="a forward that does the same in every call",
                do="move these lines into a submodule of their own: it is then kept whole",
            )
        if called:
            raise KeptWhole(called)

    def _first(self, subject: Subject, rows: int) -> Recorder:
        recorder = Recorder(subject, self.leaves, RecordingMode())
        recorder.record(self.arguments, self.names, rows)
        self.leaves.update(recorder.recording.opaque)
        return recorder

    def _seconds(self, subject: Subject, first: Recorder) -> tuple[list[Recording], set[str]]:
        """Calls at both batch sizes from where `first` has left the model, as many as do not fail; and the paths of
        tensors that it has bound."""
        forget_tables(first)
        between, seconds = Subject(self.model), []
        for rows in self.sizes:
            recorder = Recorder(between, self.leaves, first.ledger.fake_mode)
            try:
                seconds.append(recorder.record(self.arguments, self.names, rows))
            except CaptureError:
                break
            changed = left_behind(recorder, counted=True)
            between.attributes.restore()
            self._keep_whole({p: f"changes self.{names[0]} in every call" for p, names in changed.items() if p}, first)
        return seconds, {path for key, (path, _) in between.tensors.items() if key not in subject.tensors}
