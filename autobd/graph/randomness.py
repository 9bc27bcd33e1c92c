"""Random generators: what state they are in, whether a forward used them, and how to put them back."""

from __future__ import annotations

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


def randomness() -> tuple[Any, ...]:
    """A value that changes when Python's or NumPy's global generator is used, or torch's gets another seed."""
    seen: tuple[Any, ...] = (random.getstate(), torch.initial_seed())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return seen
    _, keys, position, *rest = numpy.random.get_state()
    return *seen, position, int(keys[0]), tuple(rest)


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
