"""Which modules to keep whole where recordings of one model disagree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from torch import fx, nn

Nodes = Sequence[fx.Node]


def owner_of(node: fx.Node) -> str:
    """The path of the module whose own code made the node."""
    path = str(node.meta.get("path", ""))
    return path.rpartition(".")[0] if node.op == "call_module" else path


def kind_of(node: fx.Node) -> tuple[Any, ...]:
    """What must be equal for two nodes to be the same operation."""
    return node.op, node.target, node.meta.get("path", "")


def first_difference(a: Nodes, b: Nodes) -> int | None:
    """The first position at which two recordings are not the same operations."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if kind_of(x) != kind_of(y):
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def blamed(a: Nodes, b: Nodes, at: int) -> str:
    """The module to keep whole for two recordings that part at position `at`; "" is the root.

    It is the innermost that one of them is in, such that they go on alike after what they do in it. If there is none,
    one left a module earlier than the other: then it is the innermost that holds two of the nodes there.
    """
    rest = a[at:], b[at:]
    inside = {path for side in rest for node in side[:1] for path in _prefixes(owner_of(node))}
    for path in sorted(inside, key=len, reverse=True):
        after = [next((n for n in side if not _is_in(path, n)), None) for side in rest]
        if after[0] is not None and after[1] is not None and kind_of(after[0]) == kind_of(after[1]):
            return path
    owners = [owner_of(n) for n in (*a[max(at - 1, 0) : at], *rest[0][:1], *rest[1][:1])]
    return max((_shared(x, y) for i, x in enumerate(owners) for y in owners[i + 1 :]), key=len, default="")


def alike(model: nn.Module, path: str, recordings: Sequence[Nodes]) -> list[str]:
    """The modules that will disagree as the one at `path` does, which saves as many recordings: those of its class that
    have no children (every drop path of a model), that are recorded as it is, or that differ in their operations."""
    module = model.get_submodule(path)
    same = [p for p, m in model.named_modules() if type(m) is type(module)]
    if not module._modules:
        return same
    known = [_signatures(same, nodes) for nodes in recordings]
    kinds = {p: [[entry[:3] for entry in signature[p]] for signature in known] for p in same}
    raw = known[1:]  # numbers in the first one are being replaced
    return [
        p
        for p in same
        if any(k != kinds[p][0] for k in kinds[p]) or all(signature[p] == signature[path] for signature in raw)
    ]


def _signatures(paths: list[str], nodes: Nodes) -> dict[str, list[tuple[Any, ...]]]:
    """For each module what it does: operations with paths relative to it, and their constants."""
    found: dict[str, list[tuple[Any, ...]]] = {path: [] for path in paths}
    for node in nodes:
        constants = fx.node.map_aggregate((node.args, node.kwargs), lambda v: None if isinstance(v, fx.Node) else v)
        for prefix in _prefixes(owner_of(node)):
            if prefix in found:
                named = node.op in ("call_module", "get_attr")
                target = str(node.target).removeprefix(prefix) if named else node.target
                found[prefix].append((node.op, target, kind_of(node)[2].removeprefix(prefix), repr(constants)))
    return found


def _prefixes(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, without the root."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _is_in(path: str, node: fx.Node) -> bool:
    return owner_of(node) == path or owner_of(node).startswith(path + ".")


def _shared(a: str, b: str) -> str:
    """The path of the innermost module that holds both."""
    pairs = zip(a.split("."), b.split("."), strict=False)
    return ".".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
