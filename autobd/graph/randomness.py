"""Random generators: what state they are in, whether a forward used them, and how to put them back."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
    numpy_state = numpy.random.get_state(legacy=False) if numpy is not None else None
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)


class Dice:
    """Python's and NumPy's global generators and torch's seed, watched from now on.

    They are looked at before and after every module, so a look costs some microseconds: it compares positions. For
    that no number drawn earlier may be kept back for a later call (of a pair of normal ones), so these are dropped;
    use it inside `same_python_randomness`.
    """

    def __init__(self) -> None:
        random.setstate((*random.getstate()[:-1], None))
        self._python = random.getstate()
        self._numpy = sys.modules.get("numpy")
        if self._numpy is not None:
            self._numpy.random.set_state({**self._numpy.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
            self._numpy_state = self._numpy.random.get_state(legacy=False)
            self._memory = _words(self._numpy, self._numpy_state)
        self._before = self._look()

    def moved(self) -> bool:
        """Whether one of them was used or seeded since the start, or since `put_back`."""
        return self._look() != self._before

    def put_back(self) -> None:
        """Python's and NumPy's generators as they were at the start."""
        random.setstate(self._python)
        if self._numpy is not None:
            self._numpy.random.set_state(self._numpy_state)

    def _look(self) -> tuple[Any, ...]:
        _, keys, kept = random.getstate()
        seen = keys[-1], keys[0], kept, torch.initial_seed()
        if self._numpy is None:
            return seen
        if self._memory is not None and self._memory[0] is self._numpy.random.get_bit_generator():
            words = self._memory[1]
            return *seen, words[-1], words[0]
        return *seen, repr(_plain(self._numpy.random.get_state(legacy=False)))


def _words(numpy: Any, state: Any) -> tuple[Any, Any] | None:
    """NumPy's global generator and its memory (keys and position), if that is laid out as expected: `get_state` copies
    it number by number."""
    if state["bit_generator"] != "MT19937":
        return None
    generator, known = numpy.random.get_bit_generator(), state["state"]
    words = (ctypes.c_uint32 * (len(known["key"]) + 1)).from_address(generator.ctypes.state_address)
    return (generator, words) if list(words) == [*known["key"].tolist(), known["pos"]] else None


def cuda_devices(*models: nn.Module) -> list[int]:
    """Indices of the CUDA devices that hold a tensor of these models."""
    devices = {t.device for m in models for t in (*m.parameters(), *m.buffers())}
    return sorted(d.index or 0 for d in devices if d.type == "cuda")


def is_generator(value: Any) -> bool:
    """Whether `value` is a random generator of Python's, NumPy's or torch's."""
    kind = type(value)
    numpys = kind.__module__.startswith("numpy.random") and kind.__name__ in ("Generator", "RandomState")
    return numpys or isinstance(value, (random.Random, torch.Generator))


def generator_state(value: Any) -> Any:
    """A copy of the state of a generator."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            return value.get_state()
    return value.get_state() if hasattr(value, "get_state") else value.bit_generator.state


def set_generator_state(value: Any, state: Any) -> None:
    """Put a generator back into `state`."""
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "set_state"):
        value.set_state(state)
    else:
        value.bit_generator.state = state


def generator_moved(value: Any, state: Any) -> bool:
    """Whether a generator was used since `state` was taken."""
    return repr(_plain(generator_state(value))) != repr(_plain(state))


def _plain(state: Any) -> Any:
    """A state without arrays, whose text would be shortened."""
    if isinstance(state, torch.Tensor):
        return bytes(state.untyped_storage())
    if isinstance(state, dict):
        return {k: _plain(v) for k, v in state.items()}
    if isinstance(state, tuple):
        return tuple(_plain(v) for v in state)
    return state.tolist() if hasattr(state, "tolist") else state
