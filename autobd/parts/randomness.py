"""Random numbers of a student step, keyed by what is computed and not by where or after what."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from ..graph.randomness import same_python_randomness


def student_seed(seed: int, step: int, block: int, round: int = 0, share: int = 0) -> int:
    """The seed of a student block's forward pass: equal for every plan that computes the same thing."""
    digest = hashlib.blake2b(repr((seed, step, block, round, share)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@contextmanager
def keyed(seed: int, device: torch.device, python: bool) -> Iterator[None]:
    """Seed torch's generators (CPU and `device`; with `python` also Python's and NumPy's); put them back on leaving."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    states = [g.get_state() for g in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        with same_python_randomness() if python else nullcontext():
            if python:
                random.seed(seed)
                if "numpy" in sys.modules:
                    sys.modules["numpy"].random.seed(seed % 2**32)
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
