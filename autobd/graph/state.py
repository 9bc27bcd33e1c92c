"""Python-side state of a model (attributes, caches, hooks, mode flags, buffers): snapshot and exact restore."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PRIMITIVES = (bool, int, float, complex, str, bytes, type(None))


class Attributes:
    """The `__dict__` of every submodule, with the contents of its dicts, lists and sets, as they were at creation."""

    def __init__(self, model: nn.Module) -> None:
        self._saved = {m: {k: (v, _copied(v)) for k, v in m.__dict__.items()} for m in model.modules()}

    def restore(self, within: nn.Module | None = None) -> None:
        """Put everything back, of the whole model or of the submodule `within` it."""
        for module in self._saved if within is None else within.modules():
            saved = self._saved.get(module)
            if saved is None:
                continue
            for name in [n for n in module.__dict__ if n not in saved]:
                del module.__dict__[name]
            for name, (value, contents) in saved.items():
                module.__dict__[name] = value
                if contents is not None and not _same(value, contents):
                    value.clear()
                    (value.extend if isinstance(value, list) else value.update)(contents)

    def rewritten(self, module: nn.Module) -> list[str]:
        """Attributes and buffers of `module` that were bound to another value, and lists that changed; a dict that
        gained keys is a filled cache, and is not named."""
        saved = self._saved.get(module)
        if saved is None:
            return []
        names = []
        for name, value in module.__dict__.items():
            before, contents = saved.get(name, (None, None))
            if name not in saved or (value is not before and not _equal_primitives(value, before)):
                names.append(name)
            elif isinstance(value, dict):
                changed = [str(k) for k, v in value.items() if k in contents and contents[k] is not v]
                names += changed if name == "_buffers" else [name] * bool(changed)
            elif contents is not None and not _same(value, contents):
                names.append(name)
        return names


def _equal_primitives(a: Any, b: Any) -> bool:
    return isinstance(a, PRIMITIVES) and type(a) is type(b) and a == b


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, (dict, list, set)) else None


def _same(value: Any, contents: Any) -> bool:
    if len(value) != len(contents):
        return False
    if isinstance(value, dict):
        return all(k in contents and contents[k] is v for k, v in value.items()) and list(value) == list(contents)
    if isinstance(value, list):
        return all(a is b for a, b in zip(value, contents, strict=True))
    return bool(value == contents)


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Leave attributes, mode flags, buffer contents and random generators as they were, whatever happens inside."""
    attributes = [Attributes(m) for m in models]
    buffers = [(b, b.detach().clone()) for m in models for b in m.buffers() if not b.is_meta]
    try:
        with same_randomness(*models):
            yield
    finally:
        for saved in attributes:
            saved.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def same_randomness(*models: nn.Module) -> Iterator[None]:
    """Put the generators of torch, Python and NumPy back where they were on leaving."""
    with same_python_randomness(), torch.random.fork_rng(devices=cuda_devices(*models)):
        yield


@contextmanager
def same_python_randomness() -> Iterator[None]:
    """Put Python's and NumPy's global generators back where they were on leaving."""
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


def cuda_devices(*models: nn.Module) -> list[int]:
    """Indices of the CUDA devices that hold a tensor of these models."""
    devices = {t.device for m in models for t in (*m.parameters(), *m.buffers())}
    return sorted(d.index or 0 for d in devices if d.type == "cuda")


def python_randomness() -> tuple[Any, ...]:
    """A value that changes when Python's or NumPy's global generator is used."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, position, *rest = numpy.random.get_state()
    return random.getstate(), position, int(keys[0]), tuple(rest)


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
