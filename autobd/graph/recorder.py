"""Record one forward call on fake tensors as an fx graph over the model's own submodules.

    user's forward  --every torch function-->  call_function / call_method nodes
                    --every leaf module---->   call_module nodes (the user's own submodule)
    anything that a graph would freeze  ->     the smallest submodule around it becomes a leaf, else a CaptureError

Python control flow, shapes, None arguments and dataclasses just happen, on concrete values: `merge` then finds what of
them depends on the batch size or on train / eval mode.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from .arguments import Arguments
from .fake_mode import RecordingMode, errors_unlogged
from .interception import intercepted_calls
from .leaves import is_leaf
from .ledger import Ledger
from .liveness import prune
from .nested import has_tensor, map_tensors, tensors_in
from .origin import Opaque, Rolled, by_dice, calling_line, explain, on_meta, reason_of
from .randomness import Dice, same_python_randomness
from .real_run import run_real
from .state import storage_of
from .subject import Bindings, Subject


@dataclass
class Recording:
    """One recorded call: `graph` (without an output node), `outputs` (the returned structure, nodes for tensors)."""

    graph: fx.Graph
    outputs: Any = None
    objects: dict[str, Any] = field(default_factory=dict)  # get_attr targets that are no attribute of the model
    omitted: list[str] = field(default_factory=list)  # types of objects left out of the outputs
    opaque: dict[str, str] = field(default_factory=dict)  # module path -> why it stays whole


class Recorder(TorchFunctionMode):
    """Records `model(*arguments)` once, in the mode (train or eval) that the model is in.

    Arguments:
        subject: any model; nothing of it is changed.
        leaves: paths of further submodules to keep whole, with the reason.
        fake_mode: that of an earlier call, where attributes hold tensors of it.
    """

    def __init__(self, subject: Subject, leaves: Mapping[str, str], fake_mode: RecordingMode) -> None:
        super().__init__()
        self.subject, self.model, self.paths = subject, subject.model, subject.paths
        self.forced = leaves
        self.attributes = subject.attributes
        self.ledger = Ledger(subject, fake_mode)
        self.recording = Recording(self.ledger.graph, objects=self.ledger.objects, omitted=self.ledger.omitted)
        self.seen = self.ledger.fake_mode.seen
        self.left_as = dict(subject.bindings)  # of each module, at the start or after its last call
        self.failed_in: str | None = None  # where an exception came from, innermost module
        self.remembers = False  # whether a leaf has changed attributes of its own
        self.real_run = False
        self.called = {""}  # paths of the modules that were reached by a call
        self.thread = threading.get_ident()
        self.autocast = _autocast_state()
        self.gradients = torch.is_grad_enabled()

    # ---------------------------------------------------------------- running

    def record(self, arguments: Arguments, names: list[str], rows: int) -> Recording:
        """Run the model on fake tensors shaped like `arguments`, with `rows` rows; `names` name the placeholders.

        What the forward does to attributes is undone only if it fails.

        Errors: CaptureError if the model fails on these inputs, or if the root's own code would be frozen.
        """
        with self.subject.off_meta(), self.ledger.fake_mode:
            fake = arguments.resized(rows, self.subject.instead_of_meta)
        for tensor, name in zip(fake.tensors, names, strict=True):
            node = self.ledger.graph.placeholder(name)
            self.ledger.bind(tensor, node)
        try:
            with (
                same_python_randomness(),
                torch.random.fork_rng(devices=self.subject.devices),
                errors_unlogged(),
                self.subject.off_meta(),
                self.ledger.fake_mode,
                intercepted_calls(self),
                self,
            ):
                self.dice = Dice()
                try:
                    output = self.model(*fake.args, **fake.kwargs)
                    self._check_dice()
                    self._check_exit(output)
                except Exception as error:
                    raise self._cause(error) from None
            self.recording.outputs = self.ledger.argument(output, outputs=True)
        except Exception as error:
            self.attributes.restore()
            raise explain(error, self.model, self.failed_in, arguments) from error
        except BaseException:
            self.attributes.restore()
            raise
        prune(self.ledger.graph, self.recording.outputs)
        return self.recording

    def call_module(self, original: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for `nn.Module.__call__` while recording."""
        path = self.paths.get(id(module))
        if self.ledger.inside_leaf or path is None or path == "" or threading.get_ident() != self.thread:
            return original(module, *args, **kwargs)
        if path in self.recording.opaque or path in self.forced or is_leaf(module):
            return self._leaf(original, path, module, args, kwargs)
        self.called.add(path)
        self._check_dice()  # of the caller
        mark, caller = self.ledger.mark(), self.ledger.owner
        self.ledger.owner = path
        try:
            output = original(module, *args, **kwargs)
            self._check_dice()
            self._check_exit(output)
            if not module._modules and self.ledger.is_random_since(mark):
                raise Opaque("draws random numbers")  # a leaf without parameters: another one in eval mode
        except Exception as failure:
            error = self._cause(failure)
            self.ledger.roll_back(*mark)
            self.failed_in = path if self.failed_in is None else self.failed_in
            self.attributes.restore(within=module)
            self.dice.put_back()  # what a module draws is not drawn by the modules around it
            self.recording.opaque[path] = reason_of(error)
            try:
                output = self._leaf(original, path, module, args, kwargs)
            except Exception as again:
                del self.recording.opaque[path]
                raise next((e for e in (error, again) if isinstance(e, CaptureError)), error) from None
            self.failed_in = None
            return output
        finally:
            self.ledger.owner = caller
        if isinstance(output, Tensor) and id(output) in self.ledger.nodes:
            self.ledger.nodes[id(output)][1].meta.setdefault("exits", []).append(path)
        return output

    def _check_dice(self) -> None:
        if self.dice.moved():
            raise Rolled("draws random numbers in Python, or seeds its generators")

    def _cause(self, error: Exception) -> Exception:
        return by_dice(error) if self.dice.moved() else error

    def _leaf(self, original: Any, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_dice()  # of the caller
        args, kwargs = map_tensors(self.ledger.fake, args), map_tensors(self.ledger.fake, kwargs)  # parameters
        node_args, node_kwargs = self.ledger.argument(args), self.ledger.argument(kwargs)
        parts = list(module.modules())
        if not all(Bindings(m).same(self.left_as[m]) for m in parts if m in self.left_as):
            raise Opaque(f"changes attributes of '{path}' before calling it")
        versions, buffers = self._versions((args, kwargs)), self._buffer_versions(module)
        self.seen.start()
        self.ledger.inside_leaf += 1
        changes_itself = False
        try:
            output = original(module, *args, **kwargs)
            changes_itself = self.dice.moved()
        except Exception as error:
            output = self._really(original, path, module, args, kwargs, error)
            changes_itself = True  # what it did is not known
        finally:
            self.ledger.inside_leaf -= 1
            if changes_itself:
                self.dice.put_back()
        node = self.ledger.graph.create_node("call_module", path, node_args, node_kwargs, name=path.replace(".", "_"))
        self._describe(node, path, versions)
        node.meta["whole"] = path in self.recording.opaque or path in self.forced
        changes_itself = changes_itself or buffers != self._buffer_versions(module)
        left = {m: Bindings(m) for m in parts}
        rebinds = not all(m in self.left_as and b.same(self.left_as[m]) for m, b in left.items())
        self.remembers = self.remembers or rebinds
        node.meta["stateful"] = changes_itself or rebinds
        self.left_as.update(left)
        output = self.ledger.bind_output(output, node, from_leaf=True)
        if isinstance(output, Tensor):
            node.meta.setdefault("exits", []).append(path)
        return output

    def _really(self, original: Any, path: str, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """The output of a leaf that fails on fake tensors with `error`, which is raised if real ones fail as well."""
        with torch._C.DisableTorchFunction():
            meta = any(t.is_meta for t in (*module.parameters(), *module.buffers()))
        if meta:
            raise on_meta(path, error) from error
        self.real_run = True
        try:
            return run_real(original, module, args, kwargs, self.ledger.fake_mode)
        except Exception:
            raise error from None
        finally:
            self.real_run = False

    # ---------------------------------------------------------------- functions

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.real_run or threading.get_ident() != self.thread:
            return func(*args, **kwargs)
        args, kwargs = map_tensors(self.ledger.fake, args), map_tensors(self.ledger.fake, kwargs)
        if self.subject.on_meta and "device" in kwargs and torch.device(kwargs["device"] or "cpu").type == "meta":
            kwargs["device"] = self.subject.instead_of_meta
        if self.ledger.inside_leaf:
            return func(*args, **kwargs)
        versions = self._versions((args, kwargs))
        self.seen.start()
        if getattr(func, "__name__", "") in ("register_hook", "register_post_accumulate_grad_hook", "retain_grad"):
            raise Opaque(f"calls tensor.{func.__name__}")
        try:
            output = func(*args, **kwargs)
        except DataDependentOutputException:
            if any(self.ledger.is_rolled(t) for t in tensors_in((args, kwargs))):
                raise Rolled("draws random numbers and uses their value in Python") from None
            raise
        mutated = any(t._version != version for t, version in versions)
        if not mutated and not has_tensor(output):
            if getattr(func, "__name__", "") == "__set__" and isinstance(args[0], Tensor):
                raise Opaque(f"sets tensor.{_attribute(func)}")
            return output
        node = self._function_node(func, self.ledger.argument(args), self.ledger.argument(kwargs))
        self._describe(node, self.ledger.owner, versions)
        return self.ledger.bind_output(output, node)

    def _function_node(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        name = getattr(func, "__name__", "function")
        graph = self.ledger.graph
        if name == "__get__":
            return graph.call_function(getattr, (args[0], _attribute(func)))
        name = name if getattr(torch.Tensor, name, None) is func else _METHODS.get(func, "")
        if name and args:
            return graph.call_method(name, args, kwargs)
        return graph.call_function(func, args, kwargs)

    def _describe(self, node: fx.Node, path: str, versions: list[tuple[Tensor, int]]) -> None:
        if _autocast_state() != self.autocast:
            raise Opaque("changes autocast inside its forward")
        node.meta["path"] = path
        node.meta["line"] = calling_line()
        if torch.is_grad_enabled() and not self.gradients:
            raise Opaque("switches gradients on inside its forward")
        node.meta["grad"] = torch.is_grad_enabled() or not self.gradients
        node.meta["flops"] = self.seen.flops
        node.meta["random"] = self.seen.random
        with torch._C.DisableTorchFunction():
            node.meta["mutates"] = frozenset(storage_of(t) for t, version in versions if t._version != version)

    def _buffer_versions(self, module: nn.Module) -> list[int]:
        fakes = (self.ledger.fakes.get(id(b)) for b in module.buffers())
        with torch._C.DisableTorchFunction():
            return [0 if fake is None else fake._version for fake in fakes]

    def _versions(self, value: Any) -> list[tuple[Tensor, int]]:
        with torch._C.DisableTorchFunction():
            return [(t, t._version) for t in tensors_in(value)]

    def _check_exit(self, output: Any) -> None:
        with torch._C.DisableTorchFunction():
            for tensor in tensors_in(output):
                self.ledger.node(tensor)


# Methods that torch wraps under another name: the power operator's calls itself "pow".
_METHODS = {getattr(torch.Tensor, name): name for name in ("__pow__", "__ipow__")}


def _attribute(func: Any) -> str:
    return str(func.__self__.__name__)


def _autocast_state() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
