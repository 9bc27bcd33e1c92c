"""What a recorded call has changed of the attributes of the model's modules."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from .leaves import is_leaf
from .liveness import sources, writers_in
from .recorder import Recorder
from .state import PRIMITIVES
from .subject import Bindings

Names = dict[str, list[str]]  # module path -> attributes


def left_behind(recorder: Recorder, counted: bool = False) -> Names:
    """Attributes that the call has bound anew or changed, of modules that were opened.

    A buffer updated in place is recorded, and a table added to a dict is a filled cache: these are not named.

    Arguments:
        counted: not what was added to a dict, and not what is a tensor: what a later call reads of it is recorded.
    """
    opened = _opened(recorder)
    left: dict[str, dict[str, None]] = defaultdict(dict)
    for module, name, value in recorder.attributes.rewritten():
        updated = module in opened and _is_own(recorder, opened[module], name, value)
        if module in opened and not updated and not (counted and isinstance(value, Tensor)):
            left[opened[module]][name] = None
    for module, name, filled, key in recorder.attributes.added():
        if module in opened and not counted and not _is_table(recorder, filled[key]):
            left[opened[module]][name] = None
    return {path: list(names) for path, names in left.items()}


def forget_tables(recorder: Recorder) -> None:
    """Take the tables that the call has added to dicts out again: a later call makes the same."""
    for _, _, filled, key in list(recorder.attributes.added()):
        if _is_table(recorder, filled[key]):
            del filled[key]


def set_after_calls(recorder: Recorder) -> dict[str, str]:
    """An attribute of each module recorded as one operation that was bound anew while that did not run."""
    opened, found = _opened(recorder), {}
    for path, module in recorder.model.named_modules():
        before = recorder.left_as.get(module)
        if module not in opened and before is not None and not (now := Bindings(module)).same(before):
            changed = now.changed_from(before)
            if names := [n for n, value in changed.items() if not _is_own(recorder, path, n, value)]:
                found[path] = names[0]
    return found


def readers(recorder: Recorder, left: Names) -> dict[str, str]:
    """Of the modules in `left`, those that a module recorded as one operation refers to, with its path: what it reads
    of them is not seen."""
    holders = {id(recorder.model.get_submodule(path)): path for path in left}
    opened, found = _opened(recorder), {}
    for path, module in recorder.model.named_modules() if left else ():
        if module not in opened:
            known = {id(m) for m in module.modules()}
            found.update({holders[i]: path for i in _referred_to(vars(module), known) if i in holders})
    return found


def _referred_to(value: Any, known: set[int], depth: int = 0) -> Iterator[int]:
    """Ids of the modules that a value refers to, itself or through containers, objects, methods and closures, and of
    those below them; `known` ones are not entered."""
    if isinstance(value, (Tensor, type, *PRIMITIVES)) or id(value) in known or depth > 6:
        return
    known.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        yield from map(id, value.modules())
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple, set, deque)):
        inside = value
    elif isinstance(value, FunctionType):
        inside = *map(_contents, value.__closure__ or ()), value.__defaults__
    elif isinstance(value, MethodType):
        inside = value.__self__, value.__func__
    elif hasattr(value, "__dict__"):
        inside = (vars(value), getattr(value, "func", None), getattr(value, "args", None))  # functools.partial
    for item in list(inside):
        yield from _referred_to(item, known, depth + 1)


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _opened(recorder: Recorder) -> dict[nn.Module, str]:
    """The modules that are not, and are not inside of, one that was recorded as one operation, with their paths."""
    whole: set[str] = {*recorder.recording.opaque, *recorder.forced}
    for path, module in recorder.model.named_modules():  # parents first
        if path and (path.rpartition(".")[0] in whole or is_leaf(module)):
            whole.add(path)
    return {module: path for path, module in recorder.model.named_modules() if path not in whole}


def _is_own(recorder: Recorder, path: str, name: str, value: Any) -> bool:
    """Whether it is the fake of this very buffer, which `+=` binds."""
    return recorder.ledger.origin.get(id(value)) == (f"{path}.{name}" if path else name)


def _is_table(recorder: Recorder, value: Any) -> bool:
    """Whether it is a tensor that the call uses, made of weights and numbers."""
    known = recorder.ledger.nodes.get(id(value)) if isinstance(value, Tensor) else None
    if known is None or known[1]._erased:
        return False
    made_of = sources(known[1], writers_in(known[1].graph))
    return not any(n.op == "placeholder" or n.meta.get("random") for n in made_of)
