"""Four recordings of one model (two batch sizes, eval and train mode) made into one graph that serves all.

A Python number that changed with the batch size is rebuilt from the size of an input; a constant that changed with the
mode is chosen at run time by the block's own `training` flag. Any other difference keeps the smallest module around
it whole (`Differs`, the caller records again) or, in the root's own code, is an error.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import fx

from .blame import blamed, first_difference, kind_of, owner_of
from .ledger import TensorInfo
from .noops import take_out_noops
from .origin import shown
from .recorder import Recording

PLAIN: dict[str, Any] = {
    "path": "",
    "grad": True,
    "flops": 0,
    "random": False,
    "stateful": False,
    "mutates": frozenset(),
}


class Differs(Exception):
    """Recordings disagree at `node`, inside submodule `path` ("" is the root)."""

    def __init__(self, node: fx.Node, what: str, path: str | None = None) -> None:
        super().__init__(f"differs between {what}")
        self.path = owner_of(node) if path is None else path
        self.line: str | None = shown(node.meta["line"]) if "line" in node.meta else None


def by_mode(training: bool, in_training: Any, in_evaluation: Any) -> Any:
    """The constant that the model uses in its current mode."""
    return in_training if training else in_evaluation


class Merger:
    """Merges the recordings `evaluation` and `training`, each at batch sizes `rows`, into the first of `evaluation`.

    Arguments:
        rows: the two batch sizes.
        training: None merges over batch sizes alone.
    """

    def __init__(self, evaluation: list[Recording], training: list[Recording] | None, rows: tuple[int, int]) -> None:
        self.recordings = [*evaluation, *(training or [])]
        if training is not None:
            take_out_noops(evaluation, training)
        self.graph = evaluation[0].graph
        self.rows = rows
        self.index: dict[fx.Node, int] = {}
        self.made: dict[Any, fx.Node] = {}
        self.aligned: list[list[fx.Node]] = [list(evaluation[0].graph.nodes)]
        self.train_only: list[fx.Node] = []

    def merge(self) -> Any:
        """Rewrite the first graph in place; returns its output structure.

        Errors: Differs.
        """
        self._align()
        for position, nodes in enumerate(zip(*self.aligned, strict=True)):
            for node in nodes:
                self.index[node] = position
        placeholders = [n for n in self.aligned[0] if n.op == "placeholder"]
        self.batched = next(n for n in placeholders if n.meta["tensor"].shape[:1] == self.rows[:1])
        self.last_made = placeholders[-1]
        self.storages = [self._storages_of(nodes) for nodes in self.aligned]
        for nodes in zip(*self.aligned, strict=True):
            node = nodes[0]
            self._check_object(nodes)
            node.args = self._combine([n.args for n in nodes], node)
            node.kwargs = self._combine([n.kwargs for n in nodes], node)
            self._describe(node, list(nodes))
        outputs = [r.outputs for r in self.recordings]
        if self.train_only:  # the eval structure is what is used
            return self._combine(outputs[:2], self.aligned[0][-1])
        return self._combine(outputs, self.aligned[0][-1])

    # ---------------------------------------------------------------- nodes

    def _align(self) -> None:
        reference = self.aligned[0]
        differences = ("batch sizes", "train and eval mode", "train and eval mode")
        for recording, what in zip(self.recordings[1:], differences, strict=False):
            nodes = list(recording.graph.nodes)
            first = first_difference(reference, nodes)
            if first is None:
                self.aligned.append(nodes)
                continue
            heads = None if what == "batch sizes" else self._auxiliary_heads(recording, nodes)
            if heads is None:
                node = (nodes[first:] or reference[first:])[0]
                raise Differs(node, what, blamed(reference, nodes, first))
            used = set(heads)
            self.train_only += [n for n in nodes if n not in used]
            self.aligned.append(heads)

    def _auxiliary_heads(self, recording: Recording, nodes: list[fx.Node]) -> list[fx.Node] | None:
        """The nodes of the eval graph in that of train mode, if all that has more are heads: they are returned, and
        give nothing to the others and change nothing that these read."""
        chosen: list[fx.Node] = []
        rest = iter(nodes)
        for wanted in self.aligned[0]:
            found = next((node for node in rest if kind_of(node) == kind_of(wanted)), None)
            if found is None:
                return None
            chosen.append(found)
        used = set(chosen)
        extra = {n for n in nodes if n not in used}
        returned: set[fx.Node] = set()
        fx.node.map_arg(recording.outputs, returned.add)
        read = {n.meta["tensor"].storage for n in nodes if "tensor" in n.meta and (n in used or n.op == "get_attr")}
        gives = any(not extra.isdisjoint(n.all_input_nodes) for n in chosen)
        changes = any(not read.isdisjoint(n.meta["mutates"]) for n in extra)  # storages of one recording
        return None if gives or changes or extra.isdisjoint(returned) else chosen

    def _check_object(self, nodes: tuple[fx.Node, ...]) -> None:
        """A Python object in the arguments must be the same one in every call: one made anew may carry state."""
        held = [r.objects.get(str(n.target)) for r, n in zip(self.recordings, nodes, strict=True)]
        if nodes[0].op == "get_attr" and any(not _equal(o, held[0]) for o in held):
            raise Differs(nodes[0], "calls")

    def _describe(self, node: fx.Node, nodes: list[fx.Node]) -> None:
        """Merge what the recordings know of a node; shapes become linear in the batch size."""
        node.meta["mutates"] = frozenset(
            known.get(storage, storage)
            for n, known in zip(nodes, self.storages, strict=True)
            for storage in n.meta.get("mutates", ())
        )
        node.meta["random"] = any(n.meta.get("random") for n in nodes)
        node.meta["stateful"] = any(n.meta.get("stateful") for n in nodes)
        for key, value in PLAIN.items():
            node.meta.setdefault(key, value)
        infos: list[TensorInfo | None] = [n.meta.get("tensor") for n in nodes]
        if infos[0] is not None and infos[1] is not None:
            dims = (
                [self._linear(a, b) for a, b in zip(infos[0].shape, infos[1].shape, strict=True)]
                if len(infos[0].shape) == len(infos[1].shape)
                else [None]
            )
            if None in dims:
                raise Differs(node, "batch sizes")
            node.meta["dims"] = tuple(dims)

    def _storages_of(self, nodes: list[fx.Node]) -> dict[int, int]:
        """Storage ids of one recording -> those of the first recording."""
        pairs = zip(self.aligned[0], nodes, strict=True)
        return {
            b.meta["tensor"].storage: a.meta["tensor"].storage
            for a, b in pairs
            if "tensor" in a.meta and "tensor" in b.meta
        }

    # ---------------------------------------------------------------- arguments

    def _combine(self, values: list[Any], node: fx.Node) -> Any:
        first = values[0]
        if isinstance(first, fx.Node):
            return self._combine_nodes(values, node)
        if all(isinstance(v, (tuple, list)) for v in values) and len({len(v) for v in values}) == 1:
            items = [self._combine(list(column), node) for column in zip(*values, strict=True)]
            return (
                type(first)(*items) if hasattr(first, "_fields") else items if isinstance(first, list) else tuple(items)
            )
        if all(isinstance(v, dict) for v in values) and all(v.keys() == first.keys() for v in values):
            return {k: self._combine([v[k] for v in values], node) for k in first}
        if all(isinstance(v, slice) for v in values):
            parts = [self._combine([getattr(v, name) for v in values], node) for name in ("start", "stop", "step")]
            return slice(*parts)
        return self._combine_constants(values, node)

    def _combine_nodes(self, values: list[Any], node: fx.Node) -> fx.Node:
        positions = [self.index.get(v, -1) if isinstance(v, fx.Node) else -1 for v in values]
        # An in-place dropout is a value of its own in one mode only; reading it is right in both.
        position = max(positions)
        if not all(p == position or self._is_in_place_version(position, p) for p in positions):
            raise Differs(node, "batch sizes" if positions[0] != positions[1] else "train and eval mode")
        return self.aligned[0][position]

    def _is_in_place_version(self, later: int, earlier: int) -> bool:
        """Whether node `later` hands back node `earlier`, changed in place in at least one recording."""
        if earlier < 0:
            return False
        for nodes in self.aligned:
            a, b = nodes[later], nodes[earlier]
            if (
                "tensor" in a.meta
                and "tensor" in b.meta
                and a.meta["tensor"].storage == b.meta["tensor"].storage
                and a.meta["tensor"].storage in a.meta["mutates"]
            ):
                return True
        return False

    def _combine_constants(self, values: list[Any], node: fx.Node) -> Any:
        def form(pair: list[Any]) -> Any:
            if _equal(pair[0], pair[1]):
                return pair[0]
            if all(type(v) is int for v in pair):
                linear = self._linear(pair[0], pair[1])
                if linear is not None:
                    return self._size(*linear)
            raise Differs(node, "batch sizes")

        evaluation = form(values[:2])
        if len(values) == 2:
            return evaluation
        training = form(values[2:])
        if training is evaluation or (type(training) is type(evaluation) and _equal(training, evaluation)):
            return evaluation
        return self._choice(training, evaluation)

    def _linear(self, first: int, second: int) -> tuple[int, int] | None:
        """`(a, c)` with size = a * rows + c for both batch sizes; None if there is none or it is far from natural."""
        slope, rest = divmod(second - first, self.rows[1] - self.rows[0])
        offset = first - slope * self.rows[0]
        if rest or slope < 0 or (slope and abs(offset) >= self.rows[0] and offset < 0):
            return None
        return slope, offset

    def _size(self, slope: int, offset: int) -> fx.Node:
        call = self.graph.call_function
        value = self._made(("rows",), lambda: self.graph.call_method("size", (self.batched, 0)))
        if slope != 1:
            rows = value
            value = self._made((slope, 0), lambda: call(operator.mul, (rows, slope)))
        if offset:
            scaled = value
            value = self._made((slope, offset), lambda: call(operator.add, (scaled, offset)))
        return value

    def _choice(self, training: Any, evaluation: Any) -> fx.Node:
        flag = self._made(("training",), lambda: self.graph.create_node("get_attr", "training"))
        key = ("choice", _key(training), _key(evaluation))
        return self._made(key, lambda: self.graph.call_function(by_mode, (flag, training, evaluation)))

    def _made(self, key: Any, make: Callable[[], fx.Node]) -> fx.Node:
        """One node per key, placed after the placeholders and after the nodes made before it."""
        if key not in self.made:
            with self.graph.inserting_after(self.last_made):
                node = make()
            node.meta.update(PLAIN, size=key[0] != "choice" and key[0] != "training")
            self.made[key] = node
            self.last_made = node
        return self.made[key]


def _key(value: Any) -> Any:
    return value if isinstance(value, fx.Node) else (type(value).__name__, repr(value))


def _equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and (bool(a == b) or (a != a and b != b)))
