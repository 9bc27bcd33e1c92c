"""What a recorded call has changed of the attributes of the model's modules."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .leaves import is_leaf
from .recorder import Recorder
from .subject import Bindings


def left_behind(recorder: Recorder) -> dict[str, list[str]]:
    """Attributes that the forward of an opened module has bound anew, by module.

    An entry added to a dict is a filled cache, and a buffer updated in place is recorded: these are not named.
    """
    in_place = {id(f) for f in recorder.ledger.fakes.values()}
    left = {}
    for path, module, whole in _modules(recorder):
        names = [] if whole else recorder.attributes.rewritten(module)
        if names := [n for n in names if id(getattr(module, n, None)) not in in_place]:
            left[path] = names
    return left


def set_after_calls(recorder: Recorder) -> dict[str, str]:
    """An attribute of each module recorded as one operation that was bound anew while that did not run."""
    in_place = {id(f) for f in recorder.ledger.fakes.values()}
    found = {}
    for path, module, whole in _modules(recorder):
        before = recorder.left_as.get(module)
        if whole and before is not None and not (now := Bindings(module)).same(before):
            changed = now.changed_from(before)
            if names := [n for n, value in changed.items() if id(value) not in in_place]:
                found[path] = names[0]
    return found


def _modules(recorder: Recorder) -> Iterator[tuple[str, nn.Module, bool]]:
    """Path, module, and whether it is, or is inside of, one that was recorded as one operation."""
    wholes: set[str] = {*recorder.recording.opaque, *recorder.forced}
    for path, module in recorder.model.named_modules():  # parents first
        if path and (path in wholes or path.rpartition(".")[0] in wholes or is_leaf(module)):
            wholes.add(path)
        yield path, module, path in wholes
