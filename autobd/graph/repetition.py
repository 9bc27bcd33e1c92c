"""Whether a second call of a model, recorded after a first one, does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from .liveness import live, sources
from .recorder import Recorder, Recording
from .state import module_tensors

Constants = dict[fx.Node, str]  # nodes whose value a later call reads from an attribute -> its path


def constants(recorder: Recorder, left: Mapping[str, list[str]]) -> Constants:
    """Nodes whose tensors a call has just left in attributes and that are made of numbers alone."""
    found: Constants = {}
    paths: dict[int, tuple[str, Tensor]] | None = None
    for path, names in left.items():
        held = vars(recorder.model.get_submodule(path))
        for tensor in (held[name] for name in names if isinstance(held.get(name), Tensor)):
            paths = paths or module_tensors(recorder.model)
            known = recorder.ledger.nodes.get(id(tensor))
            if known is not None and not known[1]._erased and _is_constant(known[1]):
                found[known[1]] = paths[id(tensor)][0]
    return found


def _is_constant(node: fx.Node) -> bool:
    return all(n.op in ("call_function", "call_method") and not n.meta["random"] for n in sources(node))


def same_constants(first: Constants, second: Constants) -> bool:
    """Whether the constants of two recordings have equal values."""
    if sorted(first.values()) != sorted(second.values()):
        return False
    by_path = {path: node for node, path in second.items()}
    for node, path in first.items():
        sides = [_Side(sources(n), {}, {}) for n in (node, by_path[path])]
        if not _same_order(sides):
            return False
    return True


def repeats(first: Recording, second: Recording, kept: Constants) -> bool:
    """Whether both recordings are the same operations on the same constants; `second` reads those in `kept`."""
    sides = []
    for recording, given in ((first, kept), (second, {})):
        needed = live(recording.graph, recording.outputs, given)
        nodes = [n for n in recording.graph.nodes if n in needed and n not in given]
        sides.append(_Side(nodes, given, recording.objects))
    return _same_order(sides) and _same(first.outputs, second.outputs, sides)


class _Side:
    """The operations of one recording, in order, and a name for each value that is the same in a repetition."""

    def __init__(self, nodes: list[fx.Node], given: Constants, objects: Mapping[str, Any]) -> None:
        self.names: dict[fx.Node, Any] = dict(given)
        self.order: list[fx.Node] = []
        for node in nodes:
            if node.op == "get_attr":
                self.names[node] = objects.get(str(node.target), node.target)
            else:
                self.names[node] = len(self.order)
                self.order.append(node)


def _same_order(sides: list[_Side]) -> bool:
    return len(sides[0].order) == len(sides[1].order) and all(
        (a.op, a.target, a.meta.get("path"), a.meta.get("grad"))
        == (b.op, b.target, b.meta.get("path"), b.meta.get("grad"))
        and _same((a.args, a.kwargs), (b.args, b.kwargs), sides)
        for a, b in zip(sides[0].order, sides[1].order, strict=True)
    )


def _same(a: Any, b: Any, sides: list[_Side]) -> bool:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        a, b = sides[0].names[a], sides[1].names[b]
        return a is b or (type(a) is type(b) and bool(a == b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y, sides) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[k], b[k], sides) for k in a)
    if isinstance(a, slice):
        return all(_same(x, y, sides) for x, y in zip(_parts(a), _parts(b), strict=True))
    return a is b or bool(a == b or (a != a and b != b))


def _parts(value: slice) -> Iterator[Any]:
    return iter((value.start, value.stop, value.step))
