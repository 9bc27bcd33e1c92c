"""Start a student from its teacher's weights, where shapes allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..graph import Captured

if TYPE_CHECKING:
    from .carve import Block
    from .split import Split


def initialise(split: Split, student: nn.Module) -> tuple[str, ...]:
    """Copy the teacher's weights into `student`, a copy of the split's student, block by block.

    Within a block pair the longest common sequence of layers of the same kind and shapes is copied, in the order of
    the forward pass: a student with half the layers gets every other one, each from the block it replaces.

    Returns: the student's tensors that were set. Tied weights keep what their first block gave them.
    """
    done: dict[str, None] = {}
    target = {**dict(student.named_parameters()), **dict(student.named_buffers())}
    source = {**dict(split.teacher.model.named_parameters()), **dict(split.teacher.model.named_buffers())}
    for pair in split.pairs:
        teacher, student_layers = _layers(pair.teacher, split.teacher), _layers(pair.student, split.student)
        for theirs, mine in _common([s for _, s in teacher], [s for _, s in student_layers]):
            for from_name, to_name in zip(teacher[theirs][0], student_layers[mine][0], strict=True):
                if to_name not in done and from_name in source and to_name in target:
                    with torch.no_grad():
                        target[to_name].copy_(source[from_name])
                    done[to_name] = None
    return tuple(done)


def _layers(block: Block, captured: Captured) -> list[tuple[list[str], tuple[object, ...]]]:
    """For each layer of a block, in order: the keys of its tensors, and what must be equal in a layer that fits."""
    found: list[tuple[list[str], tuple[object, ...]]] = []
    seen = set()
    for node in block.graph.nodes:
        if node.target in seen or node.op not in ("call_module", "get_attr"):
            continue
        seen.add(node.target)
        if node.op == "call_module":
            layer = captured.model.get_submodule(str(node.target))
            tensors: Mapping[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            if tensors:
                kind = (type(layer).__name__, *((n, t.shape) for n, t in tensors.items()))
                found.append(([f"{node.target}.{n}" for n in tensors], kind))
        elif "shape" in node.meta:
            found.append(([str(node.target)], ("tensor", tuple(node.meta["shape"]))))
    return found


def _common(a: list[tuple[object, ...]], b: list[tuple[object, ...]]) -> list[tuple[int, int]]:
    """Index pairs of a longest common subsequence."""
    longest = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            same = longest[i + 1][j + 1] + 1 if a[i] == b[j] else 0
            longest[i][j] = max(same, longest[i + 1][j], longest[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j] and longest[i][j] == longest[i + 1][j + 1] + 1:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif longest[i + 1][j] >= longest[i][j + 1]:
            i += 1
        else:
            j += 1
    return pairs
