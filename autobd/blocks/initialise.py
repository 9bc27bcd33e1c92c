"""Start a student from its teacher's weights, where shapes allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ..graph import Captured

if TYPE_CHECKING:
    from .carve import Block
    from .split import Split


def weights_from_teacher(split: Split) -> dict[str, Tensor]:
    """The teacher's tensors that the student can start from, by the student's keys.

    Within a block pair the longest common sequence of layers of the same kind and shapes is taken, in the order of the
    forward pass: a student with half the layers gets every other one, each from the block it replaces. Tied weights
    keep what their first block gave them.
    """
    teacher, student = split.teacher.model, split.student.model
    source = {**dict(teacher.named_parameters(remove_duplicate=False)), **_buffers(teacher)}
    target = {**dict(student.named_parameters(remove_duplicate=False)), **_buffers(student)}
    keys = {id(t): name for name, t in (*student.named_parameters(), *student.named_buffers())}
    found: dict[str, Tensor] = {}
    for pair in split.pairs:
        theirs, mine = _layers(pair.teacher, split.teacher), _layers(pair.student, split.student)
        for i, j in _common([kind for _, kind in theirs], [kind for _, kind in mine]):
            for from_name, to_name in zip(theirs[i][0], mine[j][0], strict=True):
                if from_name in source and to_name in target:
                    found.setdefault(keys[id(target[to_name])], source[from_name])
    return found


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_buffers(remove_duplicate=False))


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
