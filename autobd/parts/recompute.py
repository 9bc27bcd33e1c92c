"""Compute a block's activations again in its backward, segment by segment, instead of keeping them all.

A block is trained alone, right after its forward: to compute all of it again at once would save nothing. In segments,
what is kept are the tensors between them and one segment at a time (Chen et al. 2016; PipeDream-2BW, sec. 3.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.utils.checkpoint import checkpoint

from ..graph.liveness import written_by

_COUNTS = (2, 3, 4, 6, 8)  # of segments that are tried


def recomputing(module: fx.GraphModule, graph: fx.Graph) -> nn.Module | None:
    """The block over the same weights, with segments that are computed again; None if it has no place to part.

    Arguments:
        graph: the block's, with shapes and sizes on its nodes.
    """
    segments = _best(graph)[1]
    number = {node.name: i for i, segment in enumerate(segments) for node in segment}
    own = [n.name for n in module.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    if len(segments) < 2 or own != list(number) or not reads_weights_alone(module.graph, module):
        return None
    current = 0

    def part(node: fx.Node) -> int:
        nonlocal current
        current = number.get(node.name, current)
        return current

    parted = split_module(module, module, part, keep_original_order=True)
    for name, segment in list(parted.named_children())[:-1]:  # the last one's are needed at once
        setattr(parted, name, Segment(segment))
    return parted


def recomputed_bytes(graph: fx.Graph) -> int:
    """Bytes of activations that are held at most, at the example's batch size."""
    return _best(graph)[0]


def reads_weights_alone(graph: fx.Graph, model: nn.Module) -> bool:
    """Whether a block can be parted: a buffer or a mode that it reads by itself would be that of another copy."""
    return all(isinstance(_get(model, str(n.target)), nn.Parameter) for n in graph.nodes if n.op == "get_attr")


def _get(model: nn.Module, target: str) -> object:
    found: object = model
    for name in target.split("."):
        found = getattr(found, name, None)
    return found


class Segment(nn.Module):
    """A part of a block whose activations are computed again in the backward, from the same random numbers and without
    a second change of its buffers (running statistics)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*given)
        return checkpoint(self.inner, *given, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        before = [
            (layer, {name: b.clone() for name, b in layer._buffers.items() if b is not None})
            for layer in self.inner.modules()
        ]
        return nullcontext(), _with_buffers(before)


@contextmanager
def _with_buffers(values: list[tuple[nn.Module, dict[str, Tensor]]]) -> Iterator[None]:
    """Layers with copies of their buffers for a while."""
    own = [(layer, {name: layer._buffers[name] for name in given}) for layer, given in values]
    for layer, given in values:
        layer._buffers.update(given)
    try:
        yield
    finally:
        for layer, buffers in own:
            layer._buffers.update(buffers)


def _best(graph: fx.Graph) -> tuple[int, list[list[fx.Node]]]:
    """The segments that hold the fewest bytes, and these."""
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    borders = _borders(graph, nodes)
    total = sum(map(_bytes, nodes))
    found = [(_held([nodes]), [nodes])]
    for count in _COUNTS:
        segments: list[list[fx.Node]] = [[]]
        size = 0
        for position, node in enumerate(nodes):
            segments[-1].append(node)
            size += _bytes(node)
            if position in borders and size >= total / count and position + 1 < len(nodes):
                segments.append([])
                size = 0
        found.append((_held(segments), segments))
    return min(found, key=lambda pair: pair[0])


def _borders(graph: fx.Graph, nodes: list[fx.Node]) -> set[int]:
    """Positions behind which no tensor that crosses is changed: it is what the segment starts from again."""
    place = {node: i for i, node in enumerate(nodes)}
    changed: dict[int, int] = {}
    for node, i in place.items():
        for storage in written_by(node):
            changed[storage] = i
    valid = set(range(len(nodes)))
    for value in graph.nodes:
        last = max((place.get(user, len(nodes)) for user in value.users), default=-1)
        until = min(last, changed.get(_storage(value), -1))
        valid.difference_update(range(max(place.get(value, 0), 0), until))
    return valid


def _held(segments: list[list[fx.Node]]) -> int:
    """Bytes between segments, and of the largest one."""
    place = {node: i for i, segment in enumerate(segments) for node in segment}
    crossing = {_storage(n) or id(n): _bytes(n) for n, i in place.items() if any(place.get(u, i) > i for u in n.users)}
    return sum(crossing.values()) + max(
        sum({_storage(n) or id(n): _bytes(n) for n in segment}.values()) for segment in segments
    )


def _storage(node: fx.Node) -> int:
    info = node.meta.get("tensor")
    return 0 if info is None else int(info.storage)


def _bytes(node: fx.Node) -> int:
    if "shape" not in node.meta:
        return 0
    return int(torch.Size(node.meta["shape"]).numel() * node.meta["dtype"].itemsize)
