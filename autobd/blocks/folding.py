"""Multiply trained channel maps into the student's own layers, so that the student comes back plain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError, SplitError
from ..graph import Captured
from .adapters import Adapter
from .carve import Block
from .layout import Lowest

_POOLS = ("AvgPool1d", "AvgPool2d", "AvgPool3d")
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
Wanted = str | Mapping[int, str]
KINDS = ("auto", "matched", "trainable")


def layers_to_fold_into(block: Block, tensor: int, student: Captured) -> tuple[str, ...]:
    """The layers of a student `block` that a map of its received `tensor` can be multiplied into.

    All that reads the tensor, itself or averaged over positions, must be a trained linear layer without groups whose
    weight nothing else reads; a depthwise convolution, a norm, an activation function or a shortcut forbids it (empty
    result).
    """
    reads, keys = _reads(student), {id(p): name for name, p in student.model.named_parameters()}
    source, received = list(block.graph.nodes)[tensor], block.receives[tensor]
    names: list[str] = []
    todo = [(source, received.channels + 1)]
    while todo:
        node, axis = todo.pop()
        for user in node.users:
            layer = student.model.get_submodule(str(user.target)) if user.op == "call_module" else None
            if len(user.all_input_nodes) != 1 or user.args[:1] != (node,):
                return ()
            after = _axis_after(user, layer, node, axis)
            if after is not None:
                todo.append((user, after))
            elif layer is not None and _takes_map(layer, axis, node) and reads[id(layer.weight)] == 1:
                names.append(keys[id(layer.weight)].removesuffix(".weight"))
            else:
                return ()
    return tuple(sorted(names))


def _takes_map(layer: nn.Module, axis: int, node: fx.Node) -> bool:
    weight = layer._parameters.get("weight")  # none of its own: computed by a parametrization or a hook
    if type(layer) not in _LINEAR or getattr(layer, "groups", 1) != 1 or weight is None or not weight.requires_grad:
        return False
    return axis == (len(node.meta["dims"]) - 1 if isinstance(layer, nn.Linear) else 1)


def _reads(student: Captured) -> Counter[int]:
    """How often the forward reads each parameter, by id."""
    found: Counter[int] = Counter()
    names = dict(student.model.named_parameters(remove_duplicate=False))
    for node in student.graph.nodes:
        if node.op == "call_module":
            found.update(id(p) for p in student.model.get_submodule(str(node.target)).parameters())
        elif node.op == "get_attr" and node.target in names:
            found.update([id(names[str(node.target)])] * max(1, len(node.users)))
    return found


def _axis_after(user: fx.Node, layer: nn.Module | None, node: fx.Node, axis: int) -> int | None:
    """Where the channels are after an operation that a channel map can be moved through; None if it is not one."""
    sizes = [c for _, c in node.meta["dims"]]
    name = type(layer).__name__ if layer is not None else str(getattr(user.target, "__name__", user.target))
    if name in ("Identity", "Dropout", "Dropout2d", "dropout", "contiguous"):
        return axis
    if name in (*_POOLS, *(f"Adaptive{p}" for p in _POOLS), "avg_pool2d", "adaptive_avg_pool2d"):
        return axis if axis == 1 else None
    if name in ("Flatten", "flatten"):
        return 1 if axis == 1 and all(size == 1 for size in sizes[2:]) and len(user.meta["dims"]) == 2 else None
    if name == "mean":
        dims: Any = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
        reduced = {d % len(sizes) for d in (dims if isinstance(dims, (tuple, list)) else [dims]) if isinstance(d, int)}
        if not reduced or 0 in reduced or axis in reduced:
            return None
        kept = len(user.meta["dims"]) == len(sizes)
        return axis if kept else axis - sum(d < axis for d in reduced)
    return None


def with_kinds(
    adapters: Sequence[tuple[Adapter, ...]], blocks: Sequence[Block], student: Captured, wanted: Wanted, hybrid: bool
) -> list[tuple[Adapter, ...]]:
    """The adapters behind each block, of the wanted kinds where channels differ.

    Arguments:
        wanted: "auto" (by rule), "matched", "trainable", or one of these for some blocks, `{block: kind}`.
        hybrid: allow trainable ones that cannot be folded; the student then is of use in `Distilled.hybrid` only.

    Errors: InputError for an unknown kind or block; SplitError for a map that could not be folded.
    """
    kinds = dict(wanted) if isinstance(wanted, Mapping) else dict.fromkeys(range(len(adapters) - 1), wanted)
    known = all(k in KINDS for k in (kinds.values() if isinstance(wanted, Mapping) else [wanted]))
    if not known or not all(isinstance(b, int) and 0 <= b < len(adapters) for b in kinds):
        raise InputError(
            "adapters= is not a kind of adapter.",
            given=repr(wanted),
            expected=f"one of {', '.join(KINDS)}, or such a kind for blocks 0 to {len(adapters) - 1}: {{block: kind}}",
        )
    chosen = []
    for number, behind in enumerate(adapters):
        kind = kinds.get(number, "auto")
        chosen.append(
            tuple(
                _of_kind(a, i, kind, number, blocks, student, hybrid)
                if a.kind == "matched" and kind != "matched"
                else a
                for i, a in enumerate(behind)
            )
        )
    return chosen


def _of_kind(
    adapter: Adapter, tensor: int, kind: str, number: int, blocks: Sequence[Block], student: Captured, hybrid: bool
) -> Adapter:
    last = number + 1 == len(blocks)
    if last or tensor in blocks[number].passes or tensor in _passed_on(blocks[number + 1]):
        if kind == "auto":
            return adapter
        raise SplitError(
            f"Block {number}: an adapter behind it cannot be trainable.",
            given=f"'{adapter.student.node.name}' {'is the output' if last else 'crosses more than one cut'}",
            expected="a tensor that one block makes and the next one takes up",
            do=f'use adapters={{{number}: "matched"}}, or cut elsewhere',
        )
    after = blocks[number + 1]
    folds = layers_to_fold_into(after, tensor, student)
    if kind == "auto":
        return replace(adapter, kind="trainable", folds=folds) if folds and _gains(adapter) else adapter
    if not folds and not hybrid:
        readers = ", ".join(str(n.target) for n in list(after.graph.nodes)[tensor].users) or "nothing"
        raise SplitError(
            f"Block {number}: a trainable adapter behind it could not be folded into the student.",
            given=f"its output is read by {readers}",
            expected="nothing but convolutions without groups and Linear layers",
            do='use adapters="matched" there, cut elsewhere, or pass hybrid=True to keep the adapter in result.hybrid',
        )
    return replace(adapter, kind="trainable", folds=folds)


def _gains(adapter: Adapter) -> bool:
    """Whether a trainable map does better than a fixed one, by the measurements of `examples/adapters.py`: everywhere
    but in images behind an activation function that a student with less than half the channels has to give."""
    narrow = adapter.student.width * 2 < adapter.teacher.width
    return not (narrow and len(adapter.student.grid) > 1 and adapter.student.lowest is not Lowest.UNBOUNDED)


def _passed_on(block: Block) -> set[int]:
    received = {b.node: i for i, b in enumerate(block.receives)}
    return {received[b.node] for b in block.returns if b.node in received}


def folded(weights: Mapping[str, Tensor], maps: Mapping[tuple[str, ...], Tensor]) -> dict[str, Tensor]:
    """`weight @ map` for each layer that a map folds into.

    Arguments:
        weights: of the student, by key.
        maps: layers -> [channels, channels], the map of their common input.
    """
    return {
        f"{name}.weight": torch.einsum("oc...,cd->od...", weights[f"{name}.weight"].detach(), channel_map)
        for layers, channel_map in maps.items()
        for name in layers
    }
