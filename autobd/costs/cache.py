"""Profiles that were measured before, on disk."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
from pathlib import Path

import torch

from ..blocks import Split
from ..cluster import Cluster
from ..errors import InputError
from ..recipe import Recipe
from .profiles import Profile

_FORM = 3  # of what is measured and how


def directory() -> Path:
    """Where they are: `AUTOBD_CACHE`, or autobd in the user's cache directory."""
    given = os.environ.get("AUTOBD_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else base / "autobd"


def key(split: Split, cluster: Cluster, batch: int, recipe: Recipe, threads: int | None) -> str | None:
    """A name for everything that a profile depends on; None if the recipe has parts without a lasting name."""
    described = repr(recipe)
    if " at 0x" in described:  # a lambda or an object of the user's own
        return None
    graphs = [str(side.graph) for pair in split.pairs for side in (pair.teacher, pair.student)]
    shapes = [str(b) for pair in split.pairs for side in (pair.teacher, pair.student) for b in side.returns]
    graphs += [str(c.student.graph) for c in split.candidates]
    modules = [repr(captured.model) for captured in (split.teacher, split.student)]
    modules += [repr(c.module) for c in split.candidates]
    cpu = (platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads())
    gpus = [torch.cuda.get_device_name(d) for d in cluster.devices if d.startswith("cuda")]
    everything = [_FORM, graphs, shapes, modules, cluster, batch, described, threads, cpu, gpus, torch.__version__]
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:32]


def read(name: str | None) -> Profile | None:
    """What was kept; None if there is nothing, or nothing that can be read."""
    if name is None:
        return None
    try:
        return Profile.from_json((directory() / f"{name}.json").read_text())
    except (OSError, InputError, UnicodeDecodeError):
        return None


def write(name: str | None, profile: Profile) -> None:
    """Keep a profile, whole or not at all; a disk that cannot be written to is no error."""
    if name is None:
        return
    try:
        directory().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=directory(), suffix=".new", delete=False) as file:
            file.write(profile.to_json())
        os.replace(file.name, directory() / f"{name}.json")
    except OSError:
        return
