"""Which values of a captured graph cross a position, and what each node needs: the facts that cuts are found from.

floating    depends on inputs alone, or on parameters alone: made anew in every block that uses it
pinned      draws random numbers or changes the module's state: runs once, where it stands
activation  depends on inputs and parameters: computed once, crosses a cut if it is used later
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from functools import cached_property
from itertools import accumulate

from torch import fx, nn

from ..graph import Captured
from ..graph.leaves import is_leaf
from .layout import Layouts


class Dataflow:
    """Data flow of `captured` towards one of its outputs.

    Arguments:
        captured: the model.
        output: the name of the output that is distilled.
        trained: True for a student: it is also asked which weights are tied.
        common: keys of the inputs that the other model gets as well (see `Arguments.keys`).
    """

    def __init__(self, captured: Captured, output: str, trained: bool, common: Collection[str] = ()) -> None:
        self.captured, self.output, self.trained = captured, captured.outputs[output], trained
        self.nodes = [n for n in captured.graph.nodes if n.op != "output"]
        self.position = {n: i for i, n in enumerate(self.nodes)}
        self.common = common
        self.modules = dict(captured.model.named_modules())
        self.needs = self._needs()
        self._floats: dict[fx.Node, set[fx.Node]] = {}
        self._classify()
        self.order = [n for n in self.nodes if n in self.on_path and n not in self.floating]
        self.index = {n: i for i, n in enumerate(self.order)}

    def storage(self, node: fx.Node) -> int | None:
        info = node.meta.get("tensor")
        return None if info is None else info.storage

    def _needs(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node what must run before it: its arguments, and the last in-place change of their storage."""
        changed_by: dict[int, fx.Node] = {}
        needs = {}
        for node in self.nodes:
            arguments = list(node.all_input_nodes)
            effects = [changed_by[s] for a in arguments if (s := self.storage(a)) in changed_by and s is not None]
            needs[node] = list(dict.fromkeys(arguments + effects))
            for storage in node.meta["mutates"]:
                changed_by[storage] = node
        return needs

    def _classify(self) -> None:
        state = {self.storage(n) for n in self.nodes if n.op == "get_attr"} - {None}
        changing = [f"{n.target}." for n in self.nodes if n.op == "call_module" and n.meta["stateful"]]
        beside = {n for n in self.nodes if n.op == "get_attr" and str(n.target).startswith(tuple(changing))}
        inputs: set[fx.Node] = set()
        weighted: set[fx.Node] = set()
        pinned: set[fx.Node] = set()
        self.floating: set[fx.Node] = set()
        for node in self.nodes:
            needs = self.needs[node]
            if node.op == "placeholder" or (not node.meta.get("size") and not inputs.isdisjoint(needs)):
                inputs.add(node)
            if self.own_parameters(node) or not weighted.isdisjoint(needs):
                weighted.add(node)
            opaque = node.op == "call_module" and (node.target in self.captured.opaque or node.meta["stateful"])
            if (
                node in beside
                or node.meta["random"]
                or opaque
                or not state.isdisjoint(node.meta["mutates"])
                or not pinned.isdisjoint(needs)
            ):
                pinned.add(node)
            if node not in pinned and not (node in inputs and node in weighted):
                self.floating.add(node)
        self._sink_written()
        self.on_path = self._ancestors([self.output])
        for node in self.nodes:  # updates of the module's own state happen although nothing reads them
            if not state.isdisjoint(node.meta["mutates"]) and all(
                n in self.floating or n in self.on_path for n in self.needs[node]
            ):
                self.on_path |= self._ancestors([node])
        self.state = state

    def _sink_written(self) -> None:
        """What an activation or a pinned node writes in place is not made anew: all of that storage stops floating,
        and so does what is made from it."""
        while True:
            written = frozenset().union(*(n.meta["mutates"] for n in self.nodes if n not in self.floating))
            sunk = {
                n
                for n in self.floating
                if n.op not in ("placeholder", "get_attr")
                and (self.storage(n) in written or not self.floating.issuperset(self.needs[n]))
            }
            if not sunk:
                return
            self.floating -= sunk

    def _ancestors(self, nodes: list[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self.needs[node]
        return found

    def own_parameters(self, node: fx.Node) -> list[nn.Parameter]:
        """The parameters that a node itself reads."""
        if node.op == "call_module":
            return list(self.modules[str(node.target)].parameters())
        if node.op == "get_attr":
            path, _, name = str(node.target).rpartition(".")
            value = getattr(self.modules[path], name, None) if path in self.modules else None
            return [value] if isinstance(value, nn.Parameter) else []
        return []

    def floats(self, node: fx.Node) -> set[fx.Node]:
        """The floating nodes that must be made anew for `node`."""
        if node not in self._floats:
            self._floats[node] = self._floating_needs(node)
        return self._floats[node]

    def _floating_needs(self, node: fx.Node) -> set[fx.Node]:
        found: set[fx.Node] = set()
        todo = [n for n in self.needs[node] if n in self.floating]
        while todo:
            current = todo.pop()
            if current not in found:
                found.add(current)
                todo += [n for n in self.needs[current] if n in self.floating]
        return found

    @cached_property
    def _changes(self) -> dict[int | None, list[int]]:
        """Where in `order` each storage is changed in place."""
        found: dict[int | None, list[int]] = defaultdict(list)
        for i, node in enumerate(self.order):
            for storage in node.meta["mutates"]:
                found[storage].append(i)
        return dict(found)

    def changes_after(self, node: fx.Node, position: int) -> bool:
        """Whether the tensor is changed in place behind a position."""
        return any(at > position for at in self._changes.get(self.storage(node), ()))

    def version(self, node: fx.Node, position: int) -> int:
        """How many weights had been used when the tensor was last changed in place, up to a position; 0: never."""
        return max(
            (self.weights_until[at] for at in self._changes.get(self.storage(node), ()) if at <= position), default=0
        )

    @cached_property
    def crossing(self) -> list[set[fx.Node]]:
        """For each position in `order`: the activations made up to it that are used after it."""
        last_use: dict[fx.Node, int] = {}
        for i, node in enumerate(self.order):
            for argument in node.all_input_nodes:  # an in-place change is carried by the tensor it changed
                if argument in self.index:
                    last_use[argument] = i
        last_use[self.output] = len(self.order)
        live: set[fx.Node] = set()
        result = []
        for i, node in enumerate(self.order):
            if node in last_use:
                live.add(node)
            live = {n for n in live if last_use[n] > i}
            result.append(set(live))
        return result

    @cached_property
    def layouts(self) -> Layouts:
        return Layouts(self.nodes, self.modules)

    @cached_property
    def made_of(self) -> dict[fx.Node, frozenset[str]]:
        """The keys of those inputs, common to both models, that each value is made of."""
        keys = iter(self.captured.example.keys)
        found: dict[fx.Node, frozenset[str]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                found[node] = frozenset([next(keys)]) & frozenset(self.common)
            elif node.meta.get("size"):
                found[node] = frozenset()
            else:
                found[node] = frozenset().union(*(found[n] for n in self.needs[node]))
        return found

    @cached_property
    def reads_images(self) -> bool:
        """Whether an input has rows, columns and channels."""
        return any(n.op == "placeholder" and len(n.meta["dims"]) == 4 for n in self.nodes)

    @cached_property
    def borders(self) -> dict[int, list[str]]:
        """Positions in `order` behind a stage (see `is_stage`), with the stages that end there, outermost last."""
        found: dict[int, list[str]] = defaultdict(list)
        for path in sorted(self.extent, key=len, reverse=True):
            if self.is_stage(path):
                found[self.extent[path][1]].append(path)
        return dict(found)

    @cached_property
    def extent(self) -> dict[str, tuple[int, int]]:
        """First and last position in `order` of each module's operations."""
        found: dict[str, tuple[int, int]] = {}
        for i, node in enumerate(self.order):
            path = str(node.meta["path"])
            while path:
                found[path] = found.get(path, (i, i))[0], i
                path = path.rpartition(".")[0]
        return found

    def is_stage(self, path: str) -> bool:
        """Whether `path` is a stage or layer: a module with submodules and weights, in the root or in a container."""
        module, parent = self.modules[path], self.modules[path.rpartition(".")[0]]
        in_container = parent is self.captured.model or isinstance(
            parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        )
        return in_container and not is_leaf(module) and any(p.ndim >= 2 for p in module.parameters())

    @cached_property
    def tied_weights(self) -> dict[str, list[int]]:
        """Trainable weights of a student that several nodes use: key in the model -> where in `order`."""
        if not self.trained:
            return {}
        names = {id(p): n for n, p in self.captured.model.named_parameters()}
        used: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.order):
            weights = (p for part in {node} | self.floats(node) for p in self.own_parameters(part) if p.requires_grad)
            for name in {names[id(p)] for p in weights}:
                used[name].append(i)
        return {name: at for name, at in used.items() if len(at) > 1}

    @cached_property
    def tied_state(self) -> dict[str, range]:
        """State that the forward changes and several nodes share, such as the statistics of a norm that is called more
        than once: key in the model -> positions in `order` where no cut may be."""
        model = self.captured.model
        names = {id(b): n for n, b in (*model.named_parameters(), *model.named_buffers())}
        calls = Counter(node.target for node in self.order if node.op == "call_module")
        in_leaves = {
            names[id(b)]
            for node in self.order
            if node.op == "call_module" and node.meta["stateful"]
            for b in self.modules[str(node.target)].buffers()
        }
        touched: dict[str, list[int]] = defaultdict(list)
        for i, node in enumerate(self.order):
            for used in {node} | self.floats(node):
                if used.op == "get_attr" and (used.target in in_leaves or self.storage(used) in self._changed_state):
                    touched[str(used.target)].append(i)
                if used.op == "call_module" and (used.meta["stateful"] or (self.trained and calls[used.target] > 1)):
                    for buffer in self.modules[str(used.target)].buffers():
                        touched[names[id(buffer)]].append(i)
        return {name: range(min(at), max(at)) for name, at in touched.items() if min(at) < max(at)}

    @cached_property
    def forbidden(self) -> set[int]:
        """Positions in `order` with changing state on both sides."""
        return {i for places in self.tied_state.values() for i in places}

    @cached_property
    def _changed_state(self) -> set[int | None]:
        return self.state & {storage for n in self.nodes for storage in n.meta["mutates"]}

    @cached_property
    def flops_until(self) -> list[int]:
        """FLOPs of `order` up to and including each position; floating nodes count where they are first used."""
        counted: set[fx.Node] = set()
        totals = []
        for node in self.order:
            new = ({node} | self.floats(node)) - counted
            counted |= new
            totals.append(sum(n.meta["flops"] for n in new))
        return list(accumulate(totals))

    @cached_property
    def weights_until(self) -> list[int]:
        """How many nodes up to each position use a weight with at least two dimensions."""

        def weighs(node: fx.Node) -> bool:
            return any(p.ndim >= 2 for used in {node} | self.floats(node) for p in self.own_parameters(used))

        return list(accumulate(int(weighs(node)) for node in self.order))


def flows_of(teacher: Captured, student: Captured, outputs: tuple[str, str]) -> tuple[Dataflow, Dataflow]:
    """The data flow of both models of a pair towards the outputs of these names."""
    common = set(teacher.example.keys) & set(student.example.keys)
    return Dataflow(teacher, outputs[0], False, common), Dataflow(student, outputs[1], True, common)
