"""`torch.no_grad()` regions of a forward, put back around the recorded operations."""

from __future__ import annotations

import torch
from torch import fx


def with_gradient_regions(graph: fx.Graph) -> fx.Graph:
    """`graph` with gradient recording switched off where the recorded code did so, and back to what it was after.

    The flag on entry is restored, not set: a teacher's graph runs without gradients as a whole.
    """
    if all(node.meta.get("grad", True) for node in graph.nodes):
        return graph
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    entry: fx.Node | None = None
    for node in graph.nodes:
        records = node.meta.get("grad", True) or node.op in ("placeholder", "get_attr")
        if not records and entry is None:
            entry = result.call_function(torch.is_grad_enabled)
            result.call_function(torch._C._set_grad_enabled, (False,))
        elif (records or node.op == "output") and entry is not None:
            result.call_function(torch._C._set_grad_enabled, (entry,))
            entry = None
        copies[node] = result.node_copy(node, lambda n: copies[n])
    return result
