"""Which tensor of a recorded call is which node: binds outputs, turns arguments into nodes, undoes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from .fake_mode import RecordingMode
from .liveness import sources, writers_in
from .nested import has_tensor, tensors_in
from .origin import Opaque, calling_line
from .state import storage_of
from .subject import Subject

_CONSTANT_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a node's tensor: its shape at the recorded batch size, dtype, an id of its storage, and `view`:
    strides and offset of one that has gradients (None for others, and for those that are seen negated or conjugate)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int
    view: tuple[Any, Any] | None


class Ledger:
    """The tensors of one recording and the nodes that stand for them.

    Arguments:
        subject: the model, whose parameters, buffers and plain tensor attributes are known by path.
        fake_mode: of the fake tensors that are made.
    """

    def __init__(self, subject: Subject, fake_mode: RecordingMode) -> None:
        self.graph = fx.Graph()
        self.objects: dict[str, Any] = {}
        self.object_names: dict[int, str] = {}
        self.omitted: list[str] = []  # types of returned objects that a graph cannot make
        self.owner = ""  # path of the module whose code is running
        self.inside_leaf = 0
        self.fake_mode = fake_mode
        self.subject = subject
        self.origin = {key: path for key, (path, _) in subject.tensors.items()}  # id of a real or fake tensor -> path
        self.fakes: dict[int, Tensor] = {}
        self.nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self.journal: list[tuple[int, tuple[Tensor, fx.Node] | None]] = []

    def fake(self, tensor: Tensor) -> Tensor:
        """The fake tensor that stands for `tensor`: parameters, buffers and plain attributes have one each."""
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self.fakes.get(id(tensor))
        if known is not None:
            return known
        if id(tensor) in self.subject.tensors:
            with torch._C.DisableTorchFunction():  # what is asked of a tensor to make a fake is not recorded
                alone = self.subject.memories[storage_of(tensor)] == 1
                fake = self.fake_mode.stand_in(tensor, alone, self.subject.instead_of_meta)
            self.fakes[id(tensor)] = fake
            self.origin[id(fake)] = self.origin[id(tensor)]
            return fake
        if self.inside_leaf:
            return self.fake_mode.from_tensor(tensor)
        raise Opaque("uses a tensor that no torch function made here (from_numpy, torch.Tensor(...), a global)")

    def node(self, tensor: Tensor) -> fx.Node:
        """The node of a tensor; an unknown one is read from the model, or ends the recording of its module."""
        known = self.nodes.get(id(tensor))
        if known is not None:
            if from_custom_function(tensor):
                raise Opaque(
                    f"uses the custom autograd function {type(tensor.grad_fn).__name__.removesuffix('Backward')}"
                )
            return known[1]
        path = self.origin.get(id(tensor))
        if path is None:
            raise Opaque(
                "uses a tensor of unknown origin (a scripted function, from_numpy, torch.Tensor(...), a global)"
            )
        fake = self.fake(tensor)
        if id(fake) in self.nodes:
            return self.nodes[id(fake)][1]
        node = self.graph.create_node("get_attr", path, name=path.replace(".", "_"))
        node.meta.update(path=path.rpartition(".")[0], grad=True, flops=0, random=False, mutates=frozenset())
        self.bind(fake, node)
        return node

    def argument(self, value: Any, outputs: bool = False) -> Any:
        """`value` with nodes for tensors.

        With `outputs` it is what the model returns: mappings and dataclasses become calls that make them anew, other
        objects that hold tensors (a key-value cache) are left out.
        """
        if isinstance(value, Tensor):
            return self.node(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            items = [self.argument(v, outputs) for v in value]
            if hasattr(value, "_fields"):
                return type(value)(*items)
            return items if type(value) is list else tuple(items)
        if isinstance(value, slice):
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        if type(value) is dict:
            return {k: self.argument(v, outputs) for k, v in value.items()}
        if isinstance(value, _CONSTANT_TYPES) and type(value).__module__ in ("builtins", "torch"):
            return value
        if outputs and (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
            fields = dict(value) if isinstance(value, Mapping) else dict(vars(value))
            made = {k: self.argument(v, outputs) for k, v in fields.items()}
            return self.graph.call_function(type(value), (), {k: v for k, v in made.items() if v is not None})
        if hasattr(value, "item") and type(value).__module__ == "numpy" and not getattr(value, "shape", True):
            return value.item()
        if outputs and has_tensor(value):
            self.omitted.append(type(value).__name__)
            return None
        if has_tensor(value) or isinstance(value, torch.Generator) or type(value).__module__ == "numpy":
            raise Opaque(f"passes tensors inside a {type(value).__name__}")
        return self._constant(value)

    def _constant(self, value: Any) -> fx.Node:
        name = self.object_names.setdefault(id(value), f"_object_{len(self.objects)}")
        self.objects[name] = value
        node = self.graph.create_node("get_attr", name)
        node.meta.update(path=self.owner, line=calling_line(), grad=True, flops=0, random=False, mutates=frozenset())
        return node

    def bind(self, tensor: Tensor, node: fx.Node) -> None:
        """From now on `tensor` is what `node` gives."""
        self.journal.append((id(tensor), self.nodes.get(id(tensor))))
        self.nodes[id(tensor)] = (tensor, node)
        plain = tensor.requires_grad and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        view = (tensor.stride(), tensor.storage_offset()) if plain else None
        node.meta["tensor"] = TensorInfo(tuple(tensor.shape), tensor.dtype, storage_of(tensor), view)

    def bind_output(self, output: Any, node: fx.Node, from_leaf: bool = False) -> Any:
        """Map each tensor of `output` to `node` or to an access below it; returns what the caller is to see."""
        with torch._C.DisableTorchFunction():
            return self._bound(output, node, from_leaf)

    def _bound(self, output: Any, node: fx.Node, from_leaf: bool) -> Any:
        if isinstance(output, Tensor):
            if not isinstance(output, FakeTensor):
                output = self.fake(output)
            known = self.nodes.get(id(output))
            unchanged = known is not None and storage_of(output) not in node.meta.get("mutates", ())
            if unchanged or (from_leaf and from_custom_function(output)):
                # What hands its input back (dropout in eval mode) makes a value of its own in the other mode.
                output = torch.ops.aten.alias(output)
            self.bind(output, node)
            return output
        if isinstance(output, (tuple, list)):
            items = [self._below(v, node, "item", i, from_leaf) for i, v in enumerate(output)]
            return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
        if isinstance(output, dict):
            for key in list(output):
                output[key] = self._below(output[key], node, "item", key, from_leaf)
            return output
        if output is not None and hasattr(output, "__dict__") and not isinstance(output, type):
            for name, value in list(vars(output).items()):
                if has_tensor(value):
                    object.__setattr__(output, name, self._below(value, node, "attribute", name, from_leaf))
        return output

    def _below(self, value: Any, node: fx.Node, kind: str, key: Any, from_leaf: bool) -> Any:
        if not has_tensor(value):
            return value
        access: Any = getattr if kind == "attribute" else _getitem
        child = self.graph.call_function(access, (node, key))
        child.meta.update(
            path=node.meta["path"],
            grad=node.meta["grad"],
            flops=0,
            random=False,
            mutates=node.meta["mutates"] & frozenset(storage_of(t) for t in tensors_in(value)),
        )
        return self._bound(value, child, from_leaf)

    def mark(self) -> tuple[int, int]:
        """A point to `roll_back` to."""
        return len(self.journal), len(self.graph.nodes)

    def is_random_since(self, mark: tuple[int, int]) -> bool:
        """Whether an operation recorded since `mark` draws random numbers."""
        new = islice(reversed(self.graph.nodes), len(self.graph.nodes) - mark[1])
        return any(node.meta.get("random") for node in new)

    def is_rolled(self, tensor: Tensor) -> bool:
        """Whether a tensor is made of random numbers and of nothing that the model is given or holds."""
        known = self.nodes.get(id(tensor))
        made_by = sources(known[1], writers_in(self.graph)) if known is not None else []
        made_here = all(n.op in ("call_function", "call_method") for n in made_by)
        return made_here and any(n.meta["random"] for n in made_by)

    def roll_back(self, entries: int, nodes: int) -> None:
        """Forget everything since `mark()`."""
        while len(self.journal) > entries:
            key, before = self.journal.pop()
            if before is None:
                self.nodes.pop(key, None)
            else:
                self.nodes[key] = before
        for node in list(islice(reversed(self.graph.nodes), len(self.graph.nodes) - nodes)):
            self.graph.erase_node(node)


def _getitem(value: Any, key: Any) -> Any:
    return value[key]


def from_custom_function(tensor: Tensor) -> bool:
    """Whether a `torch.autograd.Function` of the user's made it."""
    return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)
