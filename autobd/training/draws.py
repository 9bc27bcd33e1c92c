"""The random generators that an order of batches may come from, as they are and put back."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..graph.randomness import generator_state, set_generator_state


def states(data: Any) -> dict[str, Any]:
    """Of the process and of a loader's own."""
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "own": [generator_state(g) for g in _own(data)],
    }
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":  # not one that the user has put in its place
            own = state["state"]
            found["numpy"] = ("MT19937", own["key"].tolist(), own["pos"], state["has_gauss"], state["gauss"])
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def put_back(found: dict[str, Any], data: Any) -> None:
    """What `states` gave."""
    torch.set_rng_state(found["torch"])
    random.setstate(found["python"])
    for generator, state in zip(_own(data), found["own"], strict=True):
        set_generator_state(generator, state)
    if "numpy" in found:
        import numpy

        name, keys, *rest = found["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    if "cuda" in found and torch.cuda.is_available() and torch.cuda.device_count() == len(found["cuda"]):
        torch.cuda.set_rng_state_all(found["cuda"])


def _own(data: Any) -> list[torch.Generator]:
    """Of a loader and its samplers, each once."""
    if not isinstance(data, DataLoader):
        return []
    holders = [data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None)]
    found = [g for h in holders if isinstance(g := getattr(h, "generator", None), torch.Generator)]
    return list({id(g): g for g in found}.values())
