"""Carve a captured model at cuts into blocks: fx graphs over the user's own submodules, run one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from ..graph import Captured
from .cuts import Cut
from .dataflow import Dataflow


@dataclass(frozen=True)
class Block:
    """A contiguous part of a model.

    Called as `block(boundary, *inputs)`: the tensor from the block before (absent for the first block), then those of
    the model's own input tensors that it reads (images for the first block, masks for later ones).

    Attributes:
        graph: its operations; `inputs`: indices of the model inputs it takes; `first`: it takes no boundary.
        modules: first and last module path in it.
        shape: of one row of its output; `dtype`.
        parameters: keys (in the model) of the parameters it uses.
        parameter_count, flops (one forward pass at the example's batch size), activation_bytes (its outputs inside,
        likewise).
    """

    graph: fx.Graph
    inputs: tuple[int, ...]
    first: bool
    modules: tuple[str, str]
    shape: tuple[int, ...]
    dtype: torch.dtype
    parameters: tuple[str, ...]
    parameter_count: int
    flops: int
    activation_bytes: int

    def bind(self, captured: Captured, model: nn.Module) -> fx.GraphModule:
        """The block over the submodules of `model`, which is the captured model or a copy of it."""
        return captured.bind(self.graph, model)


def carve(flow: Dataflow, cuts: list[Cut]) -> list[Block]:
    """The blocks between consecutive `cuts`, first to last; the last ends at the distilled output."""
    ends = [*((c.node, c.position) for c in cuts), (flow.output, len(flow.order) - 1)]
    blocks, boundary, start = [], None, 0
    for node, position in ends:
        blocks.append(_block(flow, flow.order[start : position + 1], boundary, node))
        boundary, start = node, position + 1
    return blocks


def _block(flow: Dataflow, own: list[fx.Node], boundary: fx.Node | None, result: fx.Node) -> Block:
    needed = set(own).union(*(flow.floats(n) for n in own))
    nodes = sorted(needed, key=lambda n: flow.position[n])
    placeholders = [n for n in flow.nodes if n.op == "placeholder"]
    rows = next((n for n in nodes if n.meta.get("size") and n.target == "size"), None)
    used = set(nodes)
    if boundary is not None and rows is not None:  # the batch size is read from the boundary
        others = {a for n in nodes if n is not rows for a in flow.needs[n]}
        used -= {n for n in placeholders if n not in others}
    inputs = tuple(i for i, n in enumerate(placeholders) if n in used)

    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    changed = frozenset().union(*(n.meta["mutates"] for n in nodes)) if nodes else frozenset()
    entries = ([boundary] if boundary is not None else []) + [placeholders[i] for i in inputs]
    for node in entries:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in entries:
        if flow.storage(node) in changed:  # the teacher, the student and a neighbour share this tensor
            copies[node] = graph.call_method("clone", (copies[node],))
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node is rows and boundary is not None:
            copies[node] = graph.call_method("size", (copies[boundary], 0))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(copies[result])
    return _described(flow, graph, nodes, inputs, boundary is None, own, result)


def _described(
    flow: Dataflow,
    graph: fx.Graph,
    nodes: list[fx.Node],
    inputs: tuple[int, ...],
    first: bool,
    own: list[fx.Node],
    result: fx.Node,
) -> Block:
    names = {id(p): name for name, p in flow.captured.model.named_parameters()}
    parameters = list({id(p): p for n in nodes for p in flow.own_parameters(n)}.values())
    paths = [str(n.meta["path"]) for n in own if n.meta["path"]] or [str(n.name) for n in own] or [result.name]
    saved = {flow.storage(n): n for n in own if "shape" in n.meta}
    return Block(
        graph,
        inputs,
        first,
        (paths[0], paths[-1]),
        tuple(c for _, c in result.meta["dims"][1:]),
        result.meta["dtype"],
        tuple(names[id(p)] for p in parameters),
        sum(p.numel() for p in parameters),
        sum(n.meta["flops"] for n in nodes),
        sum(torch.Size(n.meta["shape"]).numel() * n.meta["dtype"].itemsize for n in saved.values()),
    )
