"""What a training depends on, to refuse a checkpoint of another one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..blocks import Split
from ..checkpoints import Saved
from ..errors import CheckpointError
from ..graph import Captured
from ..recipe import Recipe

Fingerprint = dict[str, str]


def fingerprint(split: Split, recipe: Recipe, seed: int, batches: int | None) -> Fingerprint:
    """Everything by name: models and blocks, fields of the recipe, seed and number of batches."""
    found = {"the teacher": _model(split.teacher), "the student": _model(split.student)}
    found["the blocks"] = "; ".join(" .. ".join(pair.student.modules) for pair in split.pairs)
    found["the adapters"] = "; ".join(f"{a.kind} {a.teacher} {a.student}" for p in split.pairs for a in p.adapters)
    found["the candidates"] = "; ".join(f"{c} {_model(c.split.student)}" for c in split.candidates)
    for field in fields(recipe):
        found[f"Recipe.{field.name}"] = re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(recipe, field.name)))
    found["the seed"] = str(seed)
    found["the number of batches"] = str(batches)
    return found


def check(saved: Saved, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """Errors: CheckpointError that tells all differences."""
    names = [n for n in {**theirs, **ours} if theirs.get(n) != ours.get(n)]
    if names:
        told = "\n            ".join(f"{n}: {theirs.get(n)} in the checkpoint, {ours.get(n)} now" for n in names)
        raise CheckpointError(
            f"The checkpoint {saved.path} is of another training.",
            given=told,
            expected="the same models, recipe, seed and data",
            do="call distill as it was called then, or begin anew in another directory",
        )


def _model(captured: Captured) -> str:
    """The class, and a digest of the operations and of the names and shapes of all tensors."""
    model = captured.model
    tensors = [(n, tuple(t.shape), str(t.dtype)) for n, t in (*model.named_parameters(), *model.named_buffers())]
    operations = [(n.op, n.name, _name(n.target)) for n in captured.graph.nodes]
    digest = hashlib.sha256(repr((tensors, operations)).encode()).hexdigest()[:12]
    return f"{type(model).__name__} with {sum(t.numel() for t in model.parameters())} parameters ({digest})"


def _name(target: Any) -> str:
    """Of what a node calls, without the place in memory that its text may have."""
    return target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
