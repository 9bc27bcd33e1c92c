"""Cut candidates of one model: the positions where a single activation crosses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx, nn

from ..errors import SplitError, nearest
from ..graph.leaves import is_leaf
from .dataflow import Dataflow


@dataclass(frozen=True)
class Cut:
    """A place between two blocks.

    Attributes:
        name: the outermost module whose output the boundary is, else the node's name.
        aliases: every name that `cuts=` accepts for it.
        node: the boundary's node; `position`: how far in `Dataflow.order` the block before it goes.
        shape: of one row (without the batch); `dtype`.
        border: the boundary is the output of a stage or layer (a module with submodules, in the root or a container).
        changed_later: a later in-place operation overwrites the boundary (the block after it then works on a copy).
        depth: share of the model's FLOPs before it, 0 to 1.
        weights: how many weights are used before it.
    """

    name: str
    aliases: tuple[str, ...]
    node: fx.Node
    position: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    border: bool
    changed_later: bool
    depth: float
    weights: int


def candidates(flow: Dataflow) -> list[Cut]:
    """All cuts of a model, in order. Of several positions with the same boundary the last is taken, so that an in-place
    change of the boundary belongs to the block that makes it."""
    found: dict[fx.Node, int] = {}
    for position, live in enumerate(flow.crossing):
        if len(live) == 1 and position not in flow.forbidden:
            (node,) = live
            if node is not flow.output and _is_boundary(node):
                found[node] = position
    return [_cut(flow, node, position) for node, position in found.items()]


def _is_boundary(node: fx.Node) -> bool:
    dims: tuple[tuple[int, int], ...] = node.meta.get("dims", ())
    return dims[:1] == ((1, 0),) and not any(a for a, _ in dims[1:]) and node.meta["dtype"].is_floating_point


def _cut(flow: Dataflow, node: fx.Node, position: int) -> Cut:
    exits: list[str] = node.meta.get("exits", [])
    total = flow.flops_until[-1] or 1
    storage = flow.storage(node)
    later = any(storage in n.meta["mutates"] for n in flow.order[position + 1 :])
    return Cut(
        exits[-1] if exits else node.name,
        tuple(dict.fromkeys([*exits, node.name])),
        node,
        position,
        tuple(c for _, c in node.meta["dims"][1:]),
        node.meta["dtype"],
        any(_is_stage(flow, path) for path in exits),
        later,
        flow.flops_until[position] / total,
        flow.weights_until[position],
    )


def _is_stage(flow: Dataflow, path: str) -> bool:
    module, parent = flow.modules[path], flow.modules[path.rpartition(".")[0]]
    in_container = parent is flow.captured.model or isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    return in_container and not is_leaf(module) and any(p.ndim >= 2 for p in module.parameters())


def named(name: str, cuts: list[Cut], flow: Dataflow, whose: str) -> Cut:
    """The cut called `name` (module path or node name) of the model called `whose`.

    Errors: SplitError that lists the nearest valid names.
    """
    matches = [c for c in cuts if name in c.aliases]
    if matches:
        return matches[-1]
    valid = [alias for c in cuts for alias in c.aliases]
    if name in flow.modules:
        problem = (
            f"Nothing can be cut after module '{name}' of the {whose}: more than one tensor crosses there, "
            "or a weight is used on both sides."
        )
    else:
        problem = f"The {whose} has no module or node '{name}' to cut after."
    raise SplitError(problem, given=repr(name), expected=f"one of: {nearest(name, valid)}")
