"""Nested state with tensors in it as one safetensors file: tensors by name, all else as JSON in its header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor


def write(path: Path, state: Any) -> None:
    """Write `state`: dicts, lists and tuples of tensors, numbers, texts and None. Errors: TypeError for anything else;
    OSError."""
    tensors: dict[str, Tensor] = {}
    described = json.dumps(_described(state, tensors))
    save_file(tensors, path, {"state": described})


def read(path: Path) -> Any:
    """What `write` was given, on the CPU. Nothing in the file is executed. Errors: SafetensorError or others for a file
    that `write` has not written."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        return _restored(json.loads(file.metadata()["state"]), tensors)


def _described(state: Any, tensors: dict[str, Tensor]) -> Any:
    """`state` as JSON takes it; its tensors go to `tensors`, each with storage of its own."""
    if isinstance(state, Tensor):
        name = str(len(tensors))
        tensors[name] = state.detach().cpu().clone().contiguous()
        return {"tensor": name}
    if isinstance(state, Mapping):
        return {"dict": [[_described(k, tensors), _described(v, tensors)] for k, v in state.items()]}
    if isinstance(state, (list, tuple)):
        return {type(state).__name__: [_described(v, tensors) for v in state]}
    if state is None or isinstance(state, (bool, int, float, str)):
        return state
    raise TypeError(f"{type(state).__name__} cannot be written")


def _restored(described: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(described, dict):
        return described
    ((kind, value),) = described.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {_restored(k, tensors): _restored(v, tensors) for k, v in value}
    items = [_restored(v, tensors) for v in value]
    return tuple(items) if kind == "tuple" else items
