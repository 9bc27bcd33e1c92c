"""Tensors inside nested tuples, lists, dicts and objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = frozenset({bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size, slice})


def map_tensors(function: Any, value: Any) -> Any:
    """`value` with `function` applied to the tensors in tuples, lists, dicts and dataclass-like objects."""
    if isinstance(value, Tensor):
        return function(value)
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is tuple or kind is list:
        return kind([map_tensors(function, v) for v in value])
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return kind(*[map_tensors(function, v) for v in value])
        return value if kind is torch.Size else tuple(map_tensors(function, v) for v in value)
    if kind is dict:
        return {k: map_tensors(function, v) for k, v in value.items()}
    if isinstance(value, dict):
        for key in list(value):
            value[key] = map_tensors(function, value[key])
    return value


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings and attributes."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in PLAIN:
        return
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from tensors_in(item, depth)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth)
    elif depth < 4 and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


def has_tensor(value: Any) -> bool:
    """Whether `tensors_in(value)` finds any."""
    return next(tensors_in(value), None) is not None
