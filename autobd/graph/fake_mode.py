"""The fake mode of a recording: sees every operator, and makes the fakes of the model's own tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch

from .observer import Observed
from .state import storage_of

_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_DEVICE_OF = torch.ops.prim.device.default


@contextmanager
def errors_unlogged() -> Iterator[None]:
    """Without torch's log entries for operators that fail on fake tensors: the errors are raised, too."""
    thread = threading.get_ident()

    def passes(entry: logging.LogRecord) -> bool:
        return entry.exc_info is None or entry.thread != thread

    _LOG.addFilter(passes)
    try:
        yield
    finally:
        _LOG.removeFilter(passes)


class RecordingMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors that need no memory; `seen` holds what ran on them.

    One mode does both: another one on top, only to watch, costs as much as the fake tensors.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = Observed()
        self._depth = 0
        self._ordinary: dict[torch.device, torch._C.DispatchKeySet] = {}
        self._memories: dict[int, torch.UntypedStorage] = {}  # of meta tensors that share theirs

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OF and isinstance(fake := args[0], FakeTensor):  # asked twice per operator: be quick
            return torch.device("meta") if fake.fake_mode.in_kernel_invocation else fake.fake_device
        self._depth += 1  # operators that an operator is made of are not counted again
        try:
            with torch._C.DisableTorchFunction():  # nor are those of a scripted function recorded one by one
                output = super().dispatch(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        if not self._depth:
            self.seen.add(func, args, kwargs or {}, output)
        return output

    def stand_in(self, tensor: Tensor, alone: bool, instead_of_meta: torch.device) -> Tensor:
        """A fake of a tensor that the model holds.

        An ordinary tensor's is made here, at a tenth of the cost of torch's converter, which knows views, sparse and
        quantized tensors, and the values of scalars.

        Arguments:
            alone: no other tensor of the model shares its memory.
            instead_of_meta: the device that a meta tensor is taken to be on.
        """
        if not (tensor.is_meta or (alone and self._is_ordinary(tensor))):
            return self.from_tensor(tensor)
        with no_dispatch():
            meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            if tensor.is_meta and not alone:
                memory = self._memories.setdefault(storage_of(tensor), meta.new_empty(0).untyped_storage())
                meta = meta.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
            device = instead_of_meta if tensor.is_meta else tensor.device
            fake = FakeTensor(self, meta, device, requires_grad=tensor.requires_grad)
        fake._is_param = isinstance(tensor, nn.Parameter)
        return fake

    def _is_ordinary(self, tensor: Tensor) -> bool:
        device = tensor.device
        if device not in self._ordinary:
            with no_dispatch():
                self._ordinary[device] = torch._C._dispatch_keys(torch.empty(0, device=device))
        return (
            torch._C._dispatch_keys(tensor) == self._ordinary[device]  # not sparse, conjugate, batched, ...
            and tensor.ndim > 0
            and tensor.is_leaf
            and tensor.grad is None
            and not tensor._is_view()
            and not tensor.storage_offset()
        )
