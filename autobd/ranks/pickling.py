"""Send what a rank needs to another process: cloudpickle, and fx graphs as graphs.

`GraphModule` itself pickles its source and traces it again, which would freeze random numbers and cannot import
functions of a notebook.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from functools import partial
from typing import Any

import cloudpickle
from torch import fx, nn


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, fx.GraphModule):
            state = {k: v for k, v in obj.__dict__.items() if k not in ("_graph", "_code")}
            return _graph_module, (state, _bare(obj.graph), type(obj).__name__)
        return super().reducer_override(obj)


def dumps(value: Any) -> bytes:
    """Errors: whatever an object in `value` raises that cannot be pickled."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def culprit(value: Any, depth: int = 20) -> str:
    """Where in a value that cannot be pickled the reason is: attributes, keys and positions, joined by dots."""
    for name, part in _parts(value):
        try:
            dumps(part)
        except Exception:
            inner = culprit(part, depth - 1) if depth else ""
            return f"{name}.{inner}" if inner else str(name)
    return ""


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, nn.Module):
        own = [(k, v) for k, v in vars(value).items() if k != "_modules"]
        return [*value._modules.items(), *own]
    if isinstance(value, partial):
        return list(enumerate((value.func, *value.args)))
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return list(getattr(value, "__dict__", {}).items())


def loads(data: bytes | memoryview) -> Any:
    return pickle.loads(data)


def _bare(graph: fx.Graph) -> fx.Graph:
    """A copy without what is known of its nodes."""
    bare = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = bare.node_copy(node, lambda n: copies[n])
        copies[node].meta = {}
    return bare


def _graph_module(state: dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    root = nn.Module()
    root.__dict__.update(state)
    module = fx.GraphModule(root, graph, name)
    module.training = root.training
    return module
