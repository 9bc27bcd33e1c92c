"""What a model is like before it is recorded: taken once for the recordings of one mode, which all start from it."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch import nn

from .randomness import cuda_devices
from .state import PRIMITIVES, Attributes, module_tensors, storage_of


class Subject:
    """A model in the mode (train or eval) that it is in.

    Attributes:
        paths: of its modules, by id; a module that is registered twice has the first.
        attributes: to undo what a recording does to them.
        tensors: its parameters, buffers and plain tensor attributes, by id; `memories`: how many there are by storage.
        bindings: of each module.
        devices: indices of the CUDA devices whose random generators a recording could move.
        instead_of_meta: the device that tensors on the meta device are taken to be on; `on_meta`: it has such tensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.attributes = Attributes(model)
        self.tensors = module_tensors(model)
        self.memories = Counter(storage_of(t) for _, t in self.tensors.values())
        self.bindings = {m: Bindings(m) for m in model.modules()}
        self.devices = cuda_devices(model)
        real = [t.device for _, t in self.tensors.values() if not t.is_meta]
        self.on_meta = len(real) < len(self.tensors)
        self.instead_of_meta = next(iter(real), torch.device("cpu"))

    def off_meta(self) -> AbstractContextManager[Any]:
        """New tensors are not made on the meta device, where it is the default."""
        return self.instead_of_meta if torch.get_default_device().type == "meta" else nullcontext()


class Bindings:
    """What the attributes of a module are bound to, and the entries of dicts (parameters, buffers, hooks) and lists."""

    __slots__ = ("names", "values")

    def __init__(self, module: nn.Module) -> None:
        self.names: list[Any] = list(vars(module))
        self.values: list[Any] = list(vars(module).values())
        for value in vars(module).values():
            if isinstance(value, (dict, list)) and value:
                self.names += value if isinstance(value, dict) else range(len(value))
                self.values += value.values() if isinstance(value, dict) else value

    def same(self, other: Bindings) -> bool:
        """Numbers are compared by value, other objects and tensors by identity."""
        return self.names == other.names and (
            all(map(is_, self.values, other.values)) or all(map(_same, self.values, other.values))
        )

    def changed_from(self, other: Bindings) -> dict[str, Any]:
        """What is bound anew, by name."""
        before = dict(zip(other.names, other.values, strict=True))
        return {
            n: v for n, v in zip(self.names, self.values, strict=True) if n not in before or not _same(v, before[n])
        }


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, PRIMITIVES) and a == b)
