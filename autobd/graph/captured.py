"""`capture(model, example) -> Captured`: a whole model as an fx graph over its own submodules."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import CaptureError, InputError
from ..tables import quantity, shape, table
from .arguments import Arguments
from .blame import alike
from .gradients import with_gradient_regions
from .merge import PLAIN, Differs, Merger
from .passes import Calls, KeptWhole
from .recorder import Recording
from .state import untouched, unwrapped

_ATTEMPTS = 50


@dataclass(frozen=True)
class Captured:
    """A recorded model.

    Attributes:
        model: the user's module (unwrapped from DataParallel and the like).
        example: the arguments it was recorded with.
        graph: the recorded operations.
        module: `graph` as an `fx.GraphModule` over the user's own submodules and parameters; called with the tensors of
            `Arguments.tensors`, in order. Node `meta`: `shape` (at the example's batch size), `dims` (each size as
            `(a, c)`: a * rows + c), `dtype`, `flops`, `parameter_bytes`, `path` (module), `exits` (modules whose
            output it is), `mutates`, `random`.
        outputs: the tensors that the model returns, by name ("output" for a single one, "0", "logits", ...).
        opaque: submodules kept whole because a graph would freeze what they do, with the reason.
        notes: what the user should know.
        same_in_train: False if train mode adds nodes (auxiliary heads); the eval graph is then used in both modes.
    """

    model: nn.Module
    example: Arguments
    graph: fx.Graph
    outputs: dict[str, fx.Node]
    opaque: dict[str, str]
    notes: tuple[str, ...]
    same_in_train: bool
    objects: dict[str, Any] = field(repr=False)
    module: fx.GraphModule = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "module", self.bind(self.graph, self.model))

    @property
    def flops(self) -> int:
        """FLOPs of one forward pass at the example's batch size."""
        return sum(n.meta["flops"] for n in self.graph.nodes)

    def bind(self, graph: fx.Graph, model: nn.Module, frozen: Mapping[str, Tensor] | None = None) -> fx.GraphModule:
        """`graph` (this one or a part of it) over the submodules and parameters of `model`, a copy of `self.model`.

        Arguments:
            frozen: tensors that take the place of the parameters of these names.
        """
        graph = with_gradient_regions(graph)
        bound = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        targets: dict[str, Any] = {}
        instead = {id(model.get_parameter(name)): value for name, value in (frozen or {}).items()}
        for node in graph.nodes:
            copies[node] = twin = bound.node_copy(node, lambda n: copies[n])
            if node.op == "call_module":
                targets[node.target] = _with_tensors(model.get_submodule(node.target), instead)
            elif node.op == "get_attr" and node.target == "training":
                targets["training"] = model.training
            elif node.op == "get_attr":  # a path below a module of the user's would register the tensor there anew
                known = node.target in self.objects
                twin.target = f"_{len(targets)}_{node.target.replace('.', '_')}"
                value = self.objects[node.target] if known else _get(model, node.target)
                targets[twin.target] = instead.get(id(value), value)
        return fx.GraphModule(targets, bound, type(self.model).__name__)

    def __str__(self) -> str:
        rows = [
            (
                n.name,
                n.op,
                n.meta["path"],
                shape(n.meta["shape"]) if "shape" in n.meta else "",
                quantity(n.meta["flops"]),
                quantity(n.meta["parameter_bytes"], "B"),
            )
            for n in self.graph.nodes
            if n.op != "output"
        ]
        text = table(["node", "kind", "module", "shape", "FLOPs", "parameters"], rows)
        return "\n".join([text, *(f"note: {note}" for note in self.notes)])


def capture(model: nn.Module, example: Any, *, train: bool = True) -> Captured:
    """Record `model` on fake tensors (no memory, no computation), at two batch sizes and in eval and train mode.

    Arguments:
        model: any module; it is left exactly as it was.
        example: a tensor, a tuple of positional arguments, or a dict of keyword arguments; only shapes and dtypes
            matter. Tensors whose first size equals the batch size scale with the batch.
        train: False records what a frozen teacher does: eval mode alone, without gradients.

    Errors: CaptureError names the module and source line that a graph would freeze or that fails; InputError for
    arguments without a batch or a model with uninitialised (lazy) parameters.
    """
    model = unwrapped(model)
    _check(model)
    arguments = Arguments.of(example, model)
    rows = arguments.rows
    if rows < 1:
        raise InputError("The example has no rows.", given=arguments.describe(), expected="at least one row")
    sizes = _sizes(rows)
    names = arguments.names(model)
    leaves: dict[str, str] = {}
    calls = Calls(model, arguments, names, sizes, leaves)
    with torch.inference_mode(False), torch.set_grad_enabled(train), untouched(model):
        for _ in range(_ATTEMPTS):
            try:
                merger, recording, outputs = _attempt(calls, train)
                break
            except KeptWhole as found:
                leaves.update(found.reasons)
        else:
            raise CaptureError(
                f"{type(model).__name__} did not settle after {_ATTEMPTS} recordings.",
                given=f"modules kept whole so far: {', '.join(leaves)}",
            )
    with _collector_paused():
        return _finished(model, arguments, merger, recording, outputs, leaves, sizes[0])


def _attempt(calls: Calls, train: bool) -> tuple[Merger, Recording, Any]:
    """Record and merge; the first recording holds the merged graph. Errors: KeptWhole to try again; CaptureError."""
    known = set(calls.leaves)
    with _collector_paused():
        training = calls.record(True) if train else None  # first: it keeps more modules whole than eval mode
        evaluation = calls.record(False)
        if set(calls.leaves) - known - set((training or evaluation)[0].opaque):
            raise KeptWhole({})  # by a later recording, and the first one had opened it
        merger = Merger(evaluation, training, calls.sizes)
        try:
            return merger, evaluation[0], merger.merge()
        except Differs as difference:
            path = difference.path
            while path in calls.leaves:  # it is whole, and what is around it differs
                path = path.rpartition(".")[0]
            if path:
                nodes = [list(r.graph.nodes) for r in merger.recordings]
                paths = alike(calls.model, path, nodes)
                raise KeptWhole(dict.fromkeys(paths, str(difference))) from None
            raise CaptureError(
                f"{type(calls.model).__name__}.forward {difference} in its own code; one graph cannot serve both.",
                given=difference.line,
                expected="the same operations for every batch size and mode",
                do="move these lines into a submodule of their own: it is then kept whole",
            ) from None


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Without Python's cyclic garbage collector, which would look through the many new objects again and again."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _sizes(rows: int) -> tuple[int, int]:
    """Two batch sizes of unlike parity, the example's first if it can be used (batch statistics need two rows)."""
    first = max(rows, 2)
    return first, 2 * first + 1 + first % 2


def _finished(
    model: nn.Module,
    arguments: Arguments,
    merger: Merger,
    recording: Recording,
    outputs: Any,
    leaves: dict[str, str],
    recorded_rows: int,
) -> Captured:
    graph = recording.graph
    output_names = _named(outputs)
    if not output_names:
        raise CaptureError(
            f"{type(model).__name__} returns no tensor.", given=repr(outputs), expected="at least one tensor"
        )
    graph.output(outputs).meta.update(PLAIN, parameter_bytes=0)
    modules = dict(model.named_modules())
    rows = arguments.rows
    for node in reversed(graph.nodes):
        unused = not node.users and node.op not in ("placeholder", "output")
        unused = unused and not (
            node.op == "call_method" and re.search(r"[^_]_$", node.target)
        )  # detach_, requires_grad_
        if unused and not node.meta["random"] and not node.meta["mutates"] and "flops" in node.meta:
            graph.erase_node(node)
            continue
        if "dims" in node.meta:
            node.meta["shape"] = tuple(a * rows + c for a, c in node.meta["dims"])
            node.meta["dtype"] = node.meta["tensor"].dtype
        node.meta["flops"] = node.meta["flops"] * rows // recorded_rows
        node.meta["parameter_bytes"] = 0
        if node.op == "call_module":
            node.meta["parameter_bytes"] = sum(p.nbytes for p in modules[node.target].parameters())
        elif node.op == "get_attr" and isinstance(value := _get(model, node.target), nn.Parameter):
            node.meta["parameter_bytes"] = value.nbytes
    notes = [f"module '{p}' is kept whole: it {reason}" for p, reason in leaves.items() if modules[p]._modules]
    notes += [f"a {name} that the model returns is left out of the graph's outputs" for name in recording.omitted]
    if merger.train_only:
        aux = sorted({n.meta["path"].split(".")[0] for n in merger.train_only if n.meta.get("path")})
        notes.append(
            f"train mode computes more than eval mode ({', '.join(aux)}): the eval graph is used, these are not trained"
        )
    return Captured(
        model, arguments, graph, output_names, dict(leaves), tuple(notes), not merger.train_only, recording.objects
    )


def _named(outputs: Any, prefix: str = "") -> dict[str, fx.Node]:
    """The tensors of an output structure by name."""
    if isinstance(outputs, fx.Node):
        if outputs.op == "call_function" and not outputs.args and isinstance(outputs.target, type):
            return _named(dict(outputs.kwargs), prefix)
        return {prefix.rstrip(".") or "output": outputs}
    items: Any = ()
    if isinstance(outputs, Mapping):
        items = outputs.items()
    elif isinstance(outputs, (tuple, list)):
        items = enumerate(outputs)
    return {name: node for key, value in items for name, node in _named(value, f"{prefix}{key}.").items()}


def _with_tensors(module: nn.Module, instead: dict[int, Tensor]) -> nn.Module:
    """`module`, or a copy that shares all but the parameters whose ids are in `instead`."""
    if not any(id(p) in instead for p in module.parameters()):
        return module
    kept = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, {**kept, **instead})


def _get(model: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(model.get_submodule(path), name, None) if path or hasattr(model, name) else None


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("Not a model.", given=type(model).__name__, expected="a torch.nn.Module")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise InputError(
                f"Parameter '{name}' of {type(model).__name__} has no shape yet (a lazy module).",
                do="call the model once on an example before handing it over",
            )
