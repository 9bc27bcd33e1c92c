"""Record one forward call on fake tensors as an fx graph over the model's own submodules.

    user's forward  --every torch function-->  call_function / call_method nodes
                    --every leaf module---->   call_module nodes (the user's own submodule)
    anything that a graph would freeze  ->     the smallest submodule around it becomes a leaf, else a CaptureError

Python control flow, shapes, None arguments and dataclasses just happen, on concrete values: `merge` then finds what of
them depends on the batch size or on train / eval mode.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .arguments import Arguments
from .leaves import is_leaf
from .observer import OperatorObserver
from .origin import Opaque, explain, user_line
from .state import Attributes, module_tensors, python_randomness, same_randomness

_CONSTANT_TYPES = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device,
                   torch.layout, torch.memory_format)


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a node's tensor: its shape at the recorded batch size, dtype, and an id of its storage."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: int


@dataclass
class Recording:
    """One recorded call: `graph` (without an output node), `outputs` (the returned structure, nodes for tensors)."""

    graph: fx.Graph
    outputs: Any = None
    objects: dict[str, Any] = field(default_factory=dict)  # get_attr targets that are no attribute of the model
    opaque: dict[str, str] = field(default_factory=dict)  # module path -> why it stays whole


class Recorder(TorchFunctionMode):
    """Records `model(*arguments)` once, in the mode (train or eval) that the model is in.

    Arguments:
        model: any module; nothing of it is changed.
        leaves: paths of further submodules to keep whole, with the reason.
    """

    def __init__(self, model: nn.Module, leaves: Mapping[str, str]) -> None:
        super().__init__()
        self.model = model
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.forced = leaves
        self.attributes = Attributes(model)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.real_tensors = module_tensors(model)
        self.fakes: dict[int, Tensor] = {}
        self.origin = {key: path for key, (path, _) in self.real_tensors.items()}  # id of a real or fake tensor -> path
        self.nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self.journal: list[tuple[int, tuple[Tensor, fx.Node] | None]] = []
        self.recording = Recording(fx.Graph())
        self.observer = OperatorObserver()
        self.stack: list[str] = [""]
        self.inside_leaf = 0
        self.real_run = False
        self.thread = threading.get_ident()
        self.autocast = _autocast_state()

    # ---------------------------------------------------------------- running

    def record(self, arguments: Arguments, names: list[str]) -> Recording:
        """Run the model on fake tensors shaped like `arguments`; `names` name the placeholders.

        Errors: CaptureError if the model fails on these inputs, or if the root's own code would be frozen.
        """
        fake = arguments.map(lambda t: self.fake_mode.from_tensor(t))
        for tensor, name in zip(fake.tensors, names, strict=True):
            node = self.recording.graph.placeholder(name)
            self._bind(tensor, node)
        before = python_randomness()
        try:
            with same_randomness(self.model), self.fake_mode, self.observer, _intercepted_calls(self), self:
                output = self.model(*fake.args, **fake.kwargs)
                if before != python_randomness():
                    raise Opaque("draws from Python's or NumPy's random generator")
                self._check_exit(self.model, output)
            self.recording.outputs = self._argument(output, outputs=True)
        except Exception as error:
            raise explain(error, self.model, self.stack[-1] or None, arguments) from error
        finally:
            self.attributes.restore()
        return self.recording

    def call_module(self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `nn.Module.__call__` while recording."""
        path = self.paths.get(id(module))
        if self.inside_leaf or path is None or path == "" or threading.get_ident() != self.thread:
            return original(module, *args, **kwargs)
        if path in self.recording.opaque or path in self.forced or is_leaf(module):
            return self._leaf(original, path, module, args, kwargs)
        mark, random_before = (len(self.journal), len(self.recording.graph.nodes)), python_randomness()
        self.stack.append(path)
        try:
            output = original(module, *args, **kwargs)
            if random_before != python_randomness():
                raise Opaque("draws from Python's or NumPy's random generator")
            self._check_exit(module, output)
        except Exception as error:
            self._roll_back(*mark)
            self.attributes.restore(within=module)
            self.recording.opaque[path] = f"{_reason(error)} ({user_line(error)})" if user_line(error) else _reason(error)
            try:
                return self._leaf(original, path, module, args, kwargs)
            except Exception:
                del self.recording.opaque[path]
                raise error from None
        finally:
            self.stack.pop()
        if isinstance(output, Tensor) and id(output) in self.nodes:
            self.nodes[id(output)][1].meta.setdefault("exits", []).append(path)
        return output

    def _leaf(self, original: Any, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node_args, node_kwargs = self._argument(args), self._argument(kwargs)
        versions = self._versions((args, kwargs))
        self.observer.start()
        self.inside_leaf += 1
        try:
            output = original(module, *args, **kwargs)
        except Exception as error:
            output = self._run_real(original, module, args, kwargs, error)
        finally:
            self.inside_leaf -= 1
        node = self.recording.graph.create_node("call_module", path, node_args, node_kwargs, name=path.replace(".", "_"))
        self._describe(node, path, versions)
        output = self._bind_output(output, node, from_leaf=True)
        if isinstance(output, Tensor):
            node.meta.setdefault("exits", []).append(path)
        return output

    def _run_real(self, original: Any, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """The output of a leaf that cannot run on fake tensors: run it once on small real ones, then forget the values."""
        if any(t.is_meta for t in (*module.parameters(), *module.buffers())):
            raise error
        differentiable = any(p.requires_grad for p in module.parameters())
        buffers = [(b, b.detach().clone()) for b in module.buffers()]
        with unset_fake_temporarily(), torch.no_grad(), same_randomness(module):
            self.real_run = True
            try:
                output = original(module, *_map(_materialised, args), **_map(_materialised, kwargs))
            except Exception:
                raise error from None
            finally:
                self.real_run = False
                for buffer, value in buffers:
                    buffer.copy_(value)
        def fake(tensor: Tensor) -> Tensor:
            with torch.no_grad():
                made = self.fake_mode.from_tensor(tensor)
            return made.requires_grad_(differentiable and made.is_floating_point())

        return _map(fake, output)

    # ---------------------------------------------------------------- functions

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.real_run or threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        args, kwargs = _map(self._fake, args), _map(self._fake, kwargs)
        if self.inside_leaf:
            return func(*args, **kwargs)
        versions = self._versions((args, kwargs))
        self.observer.start()
        output = func(*args, **kwargs)
        mutated = any(t._version != version for t, version in versions)
        if not mutated and not any(True for _ in _tensors(output)):
            if getattr(func, "__name__", "") == "__set__" and isinstance(args[0], Tensor):
                raise Opaque(f"sets tensor.{_attribute(func)}")
            return output
        node = self._function_node(func, self._argument(args), self._argument(kwargs))
        self._describe(node, self.stack[-1], versions)
        return self._bind_output(output, node)

    def _function_node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(func, "__name__", "function")
        graph = self.recording.graph
        if name == "__get__":
            return graph.call_function(getattr, (args[0], _attribute(func)))
        if getattr(torch.Tensor, name, None) is func and args:
            return graph.call_method(name, args, kwargs)
        return graph.call_function(func, args, kwargs)

    def _describe(self, node: fx.Node, path: str, versions: list[tuple[Tensor, int]]) -> None:
        if _autocast_state() != self.autocast:
            raise Opaque("changes autocast inside its forward")
        node.meta["path"] = path
        node.meta["grad"] = torch.is_grad_enabled()
        node.meta["flops"] = self.observer.flops
        node.meta["random"] = self.observer.random
        node.meta["mutates"] = frozenset(_storage(t) for t, version in versions if t._version != version)

    def _versions(self, value: Any) -> list[tuple[Tensor, int]]:
        with torch._C.DisableTorchFunction():
            return [(t, t._version) for t in _tensors(value)]

    # ---------------------------------------------------------------- tensors and nodes

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) in self.real_tensors:
            if id(tensor) not in self.fakes:
                fake = self.fakes[id(tensor)] = self.fake_mode.from_tensor(tensor)
                self.origin[id(fake)] = self.origin[id(tensor)]
            return self.fakes[id(tensor)]
        if self.inside_leaf:
            return self.fake_mode.from_tensor(tensor)
        raise Opaque("uses a tensor that no torch function made here (from_numpy, torch.Tensor(...), a global)")

    def _node(self, tensor: Tensor) -> fx.Node:
        known = self.nodes.get(id(tensor))
        if known is not None:
            if _from_custom_function(tensor):
                raise Opaque(f"uses the custom autograd function {type(tensor.grad_fn).__name__.removesuffix('Backward')}")
            return known[1]
        path = self.origin.get(id(tensor))
        if path is None:
            raise Opaque("uses a tensor of unknown origin (a scripted function, from_numpy, torch.Tensor(...), a global)")
        fake = self._fake(tensor)
        if id(fake) in self.nodes:
            return self.nodes[id(fake)][1]
        node = self.recording.graph.create_node("get_attr", path, name=path.replace(".", "_"))
        node.meta.update(path=path.rpartition(".")[0], grad=True, flops=0, random=False, mutates=frozenset())
        self._bind(fake, node)
        return node

    def _argument(self, value: Any, outputs: bool = False) -> Any:
        """`value` with nodes for tensors; `outputs`: other objects become calls that make them anew."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            items = [self._argument(v, outputs) for v in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items) if type(value) is list else tuple(items)
        if isinstance(value, slice):
            return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
        if type(value) is dict:
            return {k: self._argument(v, outputs) for k, v in value.items()}
        if isinstance(value, _CONSTANT_TYPES):
            return value
        if outputs and (isinstance(value, Mapping) or dataclasses.is_dataclass(value)):
            fields = dict(value) if isinstance(value, Mapping) else dict(vars(value))
            kwargs = {k: self._argument(v, outputs) for k, v in fields.items() if v is not None}
            return self.recording.graph.call_function(type(value), (), kwargs)
        if hasattr(value, "item") and type(value).__module__ == "numpy" and not getattr(value, "shape", True):
            return value.item()
        if any(True for _ in _tensors(value)) or isinstance(value, torch.Generator) or type(value).__module__ == "numpy":
            raise Opaque(f"passes tensors inside a {type(value).__name__}")
        return self._constant(value)

    def _constant(self, value: Any) -> fx.Node:
        for name, known in self.recording.objects.items():
            if known is value:
                break
        else:
            name = f"_object_{len(self.recording.objects)}"
            self.recording.objects[name] = value
        node = self.recording.graph.create_node("get_attr", name)
        node.meta.update(path=self.stack[-1], grad=True, flops=0, random=False, mutates=frozenset())
        return node

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        self.journal.append((id(tensor), self.nodes.get(id(tensor))))
        self.nodes[id(tensor)] = (tensor, node)
        node.meta["tensor"] = TensorInfo(tuple(tensor.shape), tensor.dtype, _storage(tensor))

    def _bind_output(self, output: Any, node: fx.Node, from_leaf: bool = False) -> Any:
        """Map each tensor of `output` to `node` or to an access below it; returns what the caller is to see."""
        with torch._C.DisableTorchFunction():
            return self._bound(output, node, from_leaf)

    def _bound(self, output: Any, node: fx.Node, from_leaf: bool) -> Any:
        if isinstance(output, Tensor):
            if not isinstance(output, FakeTensor):
                output = self._fake(output)
            known = self.nodes.get(id(output))
            unchanged = known is not None and _storage(output) not in node.meta.get("mutates", ())
            if unchanged or (from_leaf and _from_custom_function(output)):
                # An operation that hands its input back (dropout in eval mode) makes a value of its own in the other mode.
                output = torch.ops.aten.alias(output)
            self._bind(output, node)
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
                if any(True for _ in _tensors(value)):
                    object.__setattr__(output, name, self._below(value, node, "attribute", name, from_leaf))
        return output

    def _below(self, value: Any, node: fx.Node, kind: str, key: Any, from_leaf: bool) -> Any:
        if not any(True for _ in _tensors(value)):
            return value
        access: Any = getattr if kind == "attribute" else _getitem
        child = self.recording.graph.call_function(access, (node, key))
        child.meta.update(path=node.meta["path"], grad=node.meta["grad"], flops=0, random=False,
                          mutates=node.meta["mutates"] & frozenset(_storage(t) for t in _tensors(value)))
        return self._bound(value, child, from_leaf)

    def _check_exit(self, module: nn.Module, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in _tensors(output):
                self._node(tensor)
        names = self.attributes.rewritten(module)
        in_place = {id(f) for f in self.fakes.values()}
        lost = [n for n in names if id(getattr(module, n, None)) not in in_place]
        if lost and (module is not self.model or any(n in module._buffers for n in lost)):
            raise Opaque(f"sets self.{lost[0]} in its forward")

    def _roll_back(self, entries: int, nodes: int) -> None:
        while len(self.journal) > entries:
            key, before = self.journal.pop()
            if before is None:
                self.nodes.pop(key, None)
            else:
                self.nodes[key] = before
        for node in list(self.recording.graph.nodes)[nodes:][::-1]:
            self.recording.graph.erase_node(node)


def _getitem(value: Any, key: Any) -> Any:
    return value[key]


def _attribute(func: Any) -> str:
    return str(func.__self__.__name__)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _from_custom_function(tensor: Tensor) -> bool:
    return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, (Opaque, CaptureError)) else explain(error, None, None, None).problem


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _materialised(tensor: Tensor) -> Tensor:
    """A real tensor like a fake one: normal floats, zeros for integers (valid indices), True for masks."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device=device)


def _map(function: Any, value: Any) -> Any:
    """`value` with `function` applied to the tensors in tuples, lists, dicts and dataclass-like objects."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        items = [_map(function, v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items) if type(value) is not torch.Size else value
    if type(value) is list:
        return [_map(function, v) for v in value]
    if isinstance(value, dict):
        if type(value) is dict:
            return {k: _map(function, v) for k, v in value.items()}
        for key in list(value):
            value[key] = _map(function, value[key])
        return value
    return value


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists, mappings and attributes."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from _tensors(item, depth)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth)
    elif depth < 2 and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        for item in vars(value).values():
            yield from _tensors(item, depth + 1)


@contextmanager
def _intercepted_calls(recorder: Recorder) -> Iterator[None]:
    """Route `nn.Module.__call__` and custom autograd functions through `recorder` (as torch.fx does for modules)."""
    original_call = nn.Module.__call__
    function_class = torch.autograd.Function
    original_apply = function_class.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original_call, module, args, kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.inside_leaf and threading.get_ident() == recorder.thread:
            raise Opaque(f"calls the custom autograd function {cls.__name__}")
        return original_apply.__func__(cls, *args, **kwargs)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    function_class.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        function_class.apply = original_apply
