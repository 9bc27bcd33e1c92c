"""Carve a captured model at cuts into blocks: fx graphs over the user's own submodules, run one after the other."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ..graph import Captured
from .cuts import Boundary, Cut, boundary
from .dataflow import Dataflow


@dataclass(frozen=True)
class Block:
    """A contiguous part of a model.

    Called as `block(*boundary, *inputs)`: the tensors that cross the cut before it (none for the first block), then
    those of the model's own input tensors that it reads (images for the first block, masks for later ones). Returns
    the tuple of tensors that cross the cut behind it; what only passes through is handed on.

    Attributes:
        graph: its operations; `inputs`: indices of the model inputs it takes.
        receives, returns: the tensors at the cuts before and behind it.
        passes: indices in `returns` of tensors that an earlier block made.
        modules: first and last module path in it.
        parameters: keys (in the model) of the parameters it uses.
        parameter_count, flops (one forward pass at the example's batch size), activation_bytes (its outputs inside,
        likewise).
    """

    graph: fx.Graph
    inputs: tuple[int, ...]
    receives: tuple[Boundary, ...]
    returns: tuple[Boundary, ...]
    passes: tuple[int, ...]
    modules: tuple[str, str]
    parameters: tuple[str, ...]
    parameter_count: int
    flops: int
    activation_bytes: int

    @property
    def distilled(self) -> tuple[int, ...]:
        """Indices in `returns` of the tensors that a student block learns."""
        return tuple(i for i, b in enumerate(self.returns) if b.distilled and i not in self.passes)

    def bind(self, captured: Captured, model: nn.Module, frozen: Mapping[str, Tensor] | None = None) -> fx.GraphModule:
        """The block over the submodules of `model`, which is the captured model or a copy of it; `frozen` tensors take
        the place of the parameters of these names."""
        return captured.bind(self.graph, model, frozen)


def carve(flow: Dataflow, cuts: list[Cut]) -> list[Block]:
    """The blocks between consecutive `cuts`, first to last; the last ends at the distilled output."""
    last = (boundary(flow, flow.output, len(flow.order) - 1),), len(flow.order) - 1
    blocks: list[Block] = []
    before: tuple[Boundary, ...] = ()
    start = 0
    for returns, position in [*((c.tensors, c.position) for c in cuts), last]:
        blocks.append(_block(flow, flow.order[start : position + 1], before, returns))
        before, start = returns, position + 1
    return blocks


def _block(flow: Dataflow, own: list[fx.Node], receives: tuple[Boundary, ...], returns: tuple[Boundary, ...]) -> Block:
    needed = set(own).union(*(flow.floats(n) for n in own))
    nodes = sorted(needed, key=lambda n: flow.position[n])
    placeholders = [n for n in flow.nodes if n.op == "placeholder"]
    rows = next((n for n in nodes if n.meta.get("size") and n.target == "size"), None)
    used = set(nodes)
    if receives and rows is not None:  # the batch size is read from the boundary
        others = {a for n in nodes if n is not rows for a in flow.needs[n]}
        used -= {n for n in placeholders if n not in others}
    inputs = tuple(i for i, n in enumerate(placeholders) if n in used)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    changed = frozenset().union(*(n.meta["mutates"] for n in nodes)) if nodes else frozenset()
    entries = [*(b.node for b in receives), *(placeholders[i] for i in inputs)]
    for node in entries:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in entries:
        if flow.storage(node) in changed:  # the teacher, the student and a neighbour share this tensor
            copies[node] = graph.call_method("clone", (copies[node],))
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node is rows and receives:
            copies[node] = graph.call_method("size", (copies[receives[0].node], 0))
            if receives[0].folded != 1:
                copies[node] = graph.call_function(operator.floordiv, (copies[node], receives[0].folded))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[b.node] for b in returns))
    return _described(flow, graph, nodes, inputs, own, receives, returns)


def _described(
    flow: Dataflow,
    graph: fx.Graph,
    nodes: list[fx.Node],
    inputs: tuple[int, ...],
    own: list[fx.Node],
    receives: tuple[Boundary, ...],
    returns: tuple[Boundary, ...],
) -> Block:
    names = {id(p): name for name, p in flow.captured.model.named_parameters()}
    parameters = list({id(p): p for n in nodes for p in flow.own_parameters(n)}.values())
    saved = {flow.storage(n): n for n in own if "shape" in n.meta}
    changed = frozenset().union(*(n.meta["mutates"] for n in nodes)) if nodes else frozenset()
    given = {b.node for b in receives if flow.storage(b.node) not in changed}
    return Block(
        graph,
        inputs,
        receives,
        returns,
        tuple(i for i, b in enumerate(returns) if b.node in given),
        _ends(flow, own) or (returns[0].node.name,) * 2,
        tuple(names[id(p)] for p in parameters),
        sum(p.numel() for p in parameters),
        sum(n.meta["flops"] for n in nodes),
        sum(torch.Size(n.meta["shape"]).numel() * n.meta["dtype"].itemsize for n in saved.values()),
    )


def _ends(flow: Dataflow, own: list[fx.Node]) -> tuple[str, str] | None:
    """First and last module of a block, each as the outermost that lies wholly inside it."""
    paths = [str(n.meta["path"]) for n in own if n.meta["path"]]
    if not paths:
        return (own[0].name, own[-1].name) if own else None
    first, last = flow.index[own[0]], flow.index[own[-1]]

    def outermost(path: str) -> str:
        names = path.split(".")
        prefixes = (".".join(names[:i]) for i in range(1, len(names) + 1))
        return next((p for p in prefixes if first <= flow.extent[p][0] and flow.extent[p][1] <= last), path)

    return outermost(paths[0]), outermost(paths[-1])
