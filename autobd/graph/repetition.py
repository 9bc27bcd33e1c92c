"""Whether a second call of a model, recorded after a first one, does the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from .blame import blamed, kind_of
from .liveness import live, sources, writers_in
from .recorder import Recorder, Recording
from .state import module_tensors

Constants = dict[fx.Node, str]  # nodes whose value a later call reads from an attribute -> its path


def constants(recorder: Recorder, left: Mapping[str, list[str]]) -> Constants:
    """Nodes whose tensors a call has just left in attributes and that are made of numbers alone."""
    found: Constants = {}
    paths: dict[int, tuple[str, Tensor]] = {}
    writers = writers_in(recorder.ledger.graph)
    for path, names in left.items():
        held = vars(recorder.model.get_submodule(path))
        for tensor in (held[name] for name in names if isinstance(held.get(name), Tensor)):
            paths = paths or module_tensors(recorder.model)
            known = recorder.ledger.nodes.get(id(tensor))
            if known is not None and not known[1]._erased and _is_constant(known[1], writers):
                found[known[1]] = paths[id(tensor)][0]
    return found


def _is_constant(node: fx.Node, writers: dict[int, list[fx.Node]]) -> bool:
    return all(n.op in ("call_function", "call_method") and not n.meta["random"] for n in sources(node, writers))


def differing_constant(first: Constants, second: Constants) -> str | None:
    """The module with a constant that has another value in the second recording."""
    nodes = {path: node for node, path in second.items()}
    writers = [writers_in(next(iter(side)).graph) if side else {} for side in (first, second)]
    for node, path in first.items():
        sides = [_Side(sources(n, w), {}, {}, ()) for n, w in zip((node, nodes.get(path, node)), writers, strict=True)]
        if path not in nodes or _parting(sides) is not None:
            return path.rpartition(".")[0]
    return None


def difference(first: Recording, second: Recording, kept: Constants, rebound: Collection[str]) -> str | None:
    """Where two recordings are not the same operations on the same constants: the path of the module ("" is the root).

    Arguments:
        kept: nodes of `first` that `second` reads from attributes.
        rebound: paths of the attributes that hold another tensor in `second` than in `first`.
    """
    opaque = [path for path in second.opaque if path not in first.opaque]
    if opaque:
        return opaque[0]
    sides = []
    for recording, given, later in ((first, kept, ()), (second, {}, rebound)):
        needed = live(recording.graph, recording.outputs, given)
        nodes = [n for n in recording.graph.nodes if n in needed and n not in given]
        sides.append(_Side(nodes, given, recording.objects, later))
    at = _parting(sides)
    if at is not None:
        return blamed(sides[0].order, sides[1].order, at)
    return None if _same(first.outputs, second.outputs, sides) else ""


class _Side:
    """The operations of one recording, in order, and a name for each value that is the same in a repetition."""

    def __init__(
        self, nodes: list[fx.Node], given: Constants, objects: Mapping[str, Any], rebound: Collection[str]
    ) -> None:
        self.names: dict[fx.Node, Any] = {node: ("kept", path) for node, path in given.items()}
        self.order: list[fx.Node] = []
        for node in nodes:
            if node.op == "get_attr":
                path = str(node.target)
                self.names[node] = ("kept", path) if path in rebound else objects.get(path, path)
            else:
                self.names[node] = len(self.order)
                self.order.append(node)


def _parting(sides: list[_Side]) -> int | None:
    """The first position at which the operations are not the same."""
    for i, (a, b) in enumerate(zip(sides[0].order, sides[1].order, strict=False)):
        alike = kind_of(a) == kind_of(b) and a.meta.get("grad") == b.meta.get("grad")
        if not (alike and _same((a.args, a.kwargs), (b.args, b.kwargs), sides)):
            return i
    lengths = [len(side.order) for side in sides]
    return None if lengths[0] == lengths[1] else min(lengths)


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
