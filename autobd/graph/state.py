"""Python-side state of a model (attributes, caches, hooks, mode flags, buffers): snapshot and exact restore."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from .randomness import generator_moved, generator_state, is_generator, same_randomness, set_generator_state

PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))


class Attributes:
    """The `__dict__` of every submodule, with the contents of its dicts, lists and sets, as they were at creation."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = {m: {k: (v, _copied(v)) for k, v in m.__dict__.items()} for m in model.modules()}
        self._nested: list[tuple[Any, Any, nn.Module, str]] = []  # and the module and attribute that they are in
        seen: dict[int, int] = {}
        for module, saved in self._saved.items():
            for name, (value, _) in saved.items():
                self._nested += [(v, _copied(v), module, name) for v in _below(value, seen)]
        own = (v for saved in self._saved.values() for v, _ in saved.values() if is_generator(v))
        self._generators = {id(g): (g, generator_state(g)) for g in own}

    def restore(self, within: nn.Module | None = None) -> None:
        """Put everything back, of the whole model or of the submodule `within` it."""
        self.restore_modules(self._saved if within is None else within.modules())
        for value, contents, *_ in self._nested if within is None else ():
            _refill(value, contents)

    def restore_modules(self, modules: Iterable[nn.Module]) -> None:
        """Put the attributes of these modules back, not of those below them."""
        for module in modules:
            saved = self._saved.get(module)
            if saved is None:
                continue
            for name in [n for n in module.__dict__ if n not in saved]:
                del module.__dict__[name]
            for name, (value, contents) in saved.items():
                module.__dict__[name] = value
                if contents is not None:
                    _refill(value, contents)
                if id(value) in self._generators:
                    set_generator_state(*self._generators[id(value)])

    def rewritten(self) -> Iterator[tuple[nn.Module, str, Any]]:
        """Attributes, buffers, parameters and entries of dicts that were bound to another value, with that value; other
        containers, and those in attributes, that changed. What a dict has gained is not named."""
        for module, saved in self._saved.items():
            for name, (before, contents) in saved.items():
                value = module.__dict__.get(name, _MISSING)
                if value is not before:
                    if not _equal_primitives(value, before):
                        yield module, name, value
                elif isinstance(value, dict) and not _same(value, contents):
                    state = name in ("_buffers", "_parameters")
                    for key in {**contents, **value} if state else contents:
                        if (now := value.get(key, _MISSING)) is not contents.get(key, _MISSING):
                            yield module, key if state else name, now
                elif (contents is not None and not _same(value, contents)) or (
                    id(value) in self._generators and generator_moved(*self._generators[id(value)])
                ):
                    yield module, name, value
            for name in module.__dict__.keys() - saved.keys():
                yield module, name, module.__dict__[name]
        for value, contents, module, name in self._nested:
            if not _same(value, contents) and not (isinstance(value, dict) and _has_all(value, contents)):
                yield module, name, value

    def added(self) -> Iterator[tuple[nn.Module, str, dict[Any, Any], Any]]:
        """Entries that the dicts in attributes have gained: module, attribute, dict, key."""
        for module, saved in self._saved.items():
            for name, (value, contents) in saved.items():
                if isinstance(value, dict) and name not in ("_buffers", "_parameters") and len(value) != len(contents):
                    yield from ((module, name, value, key) for key in value if key not in contents)


_MISSING = object()


def _refill(value: Any, contents: Any) -> None:
    if not _same(value, contents):
        value.clear()
        (value.update if isinstance(value, (dict, set)) else value.extend)(contents)


def _has_all(value: dict[Any, Any], contents: dict[Any, Any]) -> bool:
    return all(k in value and value[k] is v for k, v in contents.items())


def _equal_primitives(a: Any, b: Any) -> bool:
    return isinstance(a, PRIMITIVES) and type(a) is type(b) and a == b


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set, deque)) else None


def _below(value: Any, seen: dict[int, int], depth: int = 0) -> Iterator[Any]:
    """The containers inside an attribute's value: of nested dicts, lists and tuples, and of plain objects. What many
    modules hold (a configuration) is entered once; `seen`: at which depth, by id."""
    if isinstance(value, (Tensor, nn.Module, type, *PRIMITIVES)) or seen.get(id(value), 5) <= depth:
        return
    seen[id(value)] = depth
    if depth and isinstance(value, (dict, list, set, deque)):
        yield value
    if isinstance(value, dict):
        inside: Iterable[Any] = list(value.values())
    elif isinstance(value, (list, tuple, deque)):
        inside = list(value)
    else:
        inside = [vars(value)] if hasattr(value, "__dict__") and not callable(value) else ()
    for item in inside:
        yield from _below(item, seen, depth + 1)


def _same(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(k in contents and contents[k] is v for k, v in value.items()) and list(value) == list(contents)
    if isinstance(value, (list, deque)):
        return all(a is b for a, b in zip(value, contents, strict=True))
    return bool(value == contents)


@contextmanager
def untouched(*models: nn.Module, tensors: Iterable[Tensor] = ()) -> Iterator[None]:
    """Leave attributes, mode flags, buffers and random generators as they were, whatever happens inside.

    Arguments:
        tensors: further ones to keep, such as parameters that a forward is known to write.
    """
    attributes = [Attributes(m) for m in models]
    kept = {id(t): t for t in (*(b for m in models for b in m.buffers()), *tensors) if not t.is_meta}
    saved = [(t, t.detach(), t.detach().clone()) for t in kept.values()]
    try:
        with same_randomness(*models):
            yield
    finally:
        for before in attributes:
            before.restore()
        for tensor, memory, value in saved:
            _put_back(tensor, memory, value)


def _put_back(tensor: Tensor, memory: Tensor, value: Tensor) -> None:
    """`value` into `tensor`, over its first `memory`, also where `.data` was set or written."""
    with torch.no_grad():
        if tensor.data_ptr() != memory.data_ptr():
            tensor.data = memory
        if not identical(tensor, value):
            tensor.copy_(value)


def identical(a: Tensor, b: Tensor) -> bool:
    """Equal in every element; NaN equals NaN."""
    return torch.equal(a, b) or (a.is_floating_point() and torch.allclose(a, b, 0, 0, equal_nan=True))


def written(before: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Names of the tensors of `model` that no longer hold what `before` says."""
    return [path for path, t in module_tensors(model).values() if path in before and not identical(t, before[path])]


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel or `torch.compile` wrappers."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(model, nn.Module) and (inner := model._modules.get("_orig_mod")) is not None:
            model = inner
        else:
            return model


def module_tensors(model: nn.Module) -> dict[int, tuple[str, Tensor]]:
    """Every tensor that a submodule holds as parameter, buffer or plain attribute: id -> (path, tensor)."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        for holder in (module._parameters, module._buffers, module.__dict__):
            for name, value in holder.items():
                if isinstance(value, Tensor):
                    found.setdefault(id(value), (f"{path}.{name}" if path else name, value))
    return found


def storage_of(tensor: Tensor) -> int:
    """An id of the memory behind a tensor; views share it."""
    return tensor.untyped_storage()._cdata


def copied(student: nn.Module) -> nn.Module:
    """A copy of the student, to be trained. Errors: InputError if it cannot be copied."""
    attributes = Attributes(student)
    for module in student.modules():  # weight_norm keeps a computed tensor that deepcopy refuses
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                vars(module)[name] = value.detach()
    try:
        return copy.deepcopy(student)
    except Exception as error:
        raise InputError(
            "The student cannot be copied; it is trained on a copy so that an error leaves yours whole.",
            given=f"{type(error).__name__}: {error}",
            expected="a module that copy.deepcopy accepts",
            do="detach tensors that the model keeps as plain attributes",
        ) from error
    finally:
        attributes.restore()
