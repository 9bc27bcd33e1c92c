"""Which recorded operations anything needs: the rest is no part of what the model computes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import fx

_IN_PLACE = re.compile(r"[^_]_$")  # detach_ and requires_grad_ change the tensor, although no value


def live(graph: fx.Graph, outputs: Any, given: Collection[fx.Node] = ()) -> set[fx.Node]:
    """The nodes that `outputs` depend on, those that draw random numbers or may do anything (modules kept whole), and
    those that change the model's inputs, its state or a tensor that a live node touches.

    Arguments:
        given: nodes whose value is taken as known; what only they need is not live.
    """
    writers = writers_in(graph)
    for node in given:
        writers.pop(_storage(node), None)
    todo: list[fx.Node] = []
    fx.map_arg(outputs, todo.append)
    for node in graph.nodes:
        if node.meta.get("random") or node.meta.get("stateful") or node.meta.get("whole"):
            todo.append(node)
        elif node.op in ("placeholder", "get_attr"):
            todo += writers.get(_storage(node), ())
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node in found:
            continue
        found.add(node)
        if node in given:
            continue
        for touched in (node, *node.all_input_nodes):
            todo += writers.get(_storage(touched), ())
        todo += node.all_input_nodes
    return found


def prune(graph: fx.Graph, outputs: Any) -> None:
    """Erase what is not live, except inputs, and put what is read of the model before its first use."""
    needed = live(graph, outputs)
    for node in reversed(graph.nodes):
        if node not in needed and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    placed: set[fx.Node] = set()
    for node in graph.nodes:
        for read in node.all_input_nodes:
            if read.op == "get_attr" and read not in placed:
                node.prepend(read)
                placed.add(read)


def writers_in(graph: fx.Graph) -> dict[int, list[fx.Node]]:
    """The nodes that change each storage."""
    writers: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for storage in written_by(node):
            writers[storage].append(node)
    return writers


def sources(node: fx.Node, writers: dict[int, list[fx.Node]]) -> list[fx.Node]:
    """What `node`, and all that is ever written to its memory, is made by, in order."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        current = todo.pop()
        if current not in found:
            found.add(current)
            todo += [*current.all_input_nodes, *writers.get(_storage(current), ())]
    return sorted(found)


def _storage(node: fx.Node) -> int:
    info = node.meta.get("tensor")
    return 0 if info is None else int(info.storage)


def written_by(node: fx.Node) -> frozenset[int]:
    """The storages that a node changes."""
    changed: frozenset[int] = node.meta.get("mutates", frozenset())
    if node.op == "call_method" and node.args and _IN_PLACE.search(str(node.target)):
        changed |= {_storage(n) for n in node.args[:1] if isinstance(n, fx.Node)} - {0}
    return changed
