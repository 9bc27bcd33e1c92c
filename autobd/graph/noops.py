"""Operations that hand back their input as it is, and that one mode has and the other has not, are taken out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from .blame import kind_of
from .liveness import written_by
from .recorder import Recording


def take_out_noops(evaluation: Sequence[Recording], training: Sequence[Recording]) -> None:
    """Make the graphs of two modes alike where all that one has more is such an operation (a slice of everything)."""
    returned: set[fx.Node] = set()
    for recording in (*evaluation, *training):
        fx.node.map_arg(recording.outputs, returned.add)
    sides = [[list(r.graph.nodes) for r in recordings] for recordings in (evaluation, training)]
    if any(list(map(kind_of, side[0])) != list(map(kind_of, other)) for side in sides for other in side[1:]):
        return
    at = [0, 0]
    found: list[fx.Node] = []
    while all(i < len(side[0]) for i, side in zip(at, sides, strict=True)):
        if kind_of(sides[0][0][at[0]]) == kind_of(sides[1][0][at[1]]):
            at = [i + 1 for i in at]
            continue
        here = [[nodes[i] for nodes in side] for i, side in zip(at, sides, strict=True)]
        extra = next((k for k in (0, 1) if returned.isdisjoint(here[k]) and all(map(_is_noop, here[k]))), None)
        if extra is None:
            break
        found += here[extra]
        at[extra] += 1
    for node in reversed(found):
        source = node.all_input_nodes[0]
        source.meta.setdefault("exits", []).extend(node.meta.get("exits", ()))
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)


def _is_noop(node: fx.Node) -> bool:
    """Whether the result is the first input: the same memory, seen in the same way, and gradients pass through."""
    if node.op not in ("call_function", "call_method") or written_by(node):
        return False
    if not node.all_input_nodes or node.args[:1] != (node.all_input_nodes[0],):
        return False
    before, after = node.all_input_nodes[0].meta.get("tensor"), node.meta.get("tensor")
    return bool(before is not None and before == after and after.view is not None)
