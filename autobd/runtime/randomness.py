"""Random numbers of a student step, keyed by what is computed and not by where or after what."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def student_seed(seed: int, step: int, block: int, round: int = 0, share: int = 0) -> int:
    """The seed of a student block's forward pass: equal for every plan that computes the same thing."""
    digest = hashlib.blake2b(repr((seed, step, block, round, share)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def keyed(seed: int, device: torch.device, python: bool) -> Iterator[None]:
    """Seed the generators (of torch on CPU and `device`; `python`: Python's too), and put them back on leaving."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [g.get_state() for g in generators]
    python_state = random.getstate() if python else None
    for generator in generators:
        generator.manual_seed(seed)
    if python:
        random.seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        if python_state is not None:
            random.setstate(python_state)
