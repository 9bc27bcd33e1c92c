"""Run a leaf that fake tensors cannot go through once on small real ones; only shapes and in-place changes are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from .fake_mode import RecordingMode
from .nested import map_tensors, tensors_in
from .observer import RealOperators
from .randomness import same_randomness
from .state import module_tensors


def run_real(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any, fake_mode: RecordingMode) -> Any:
    """What `call(module, *args, **kwargs)` returns for fake arguments, as fake tensors.

    Every tensor of the module is put back; arguments that the call changes in place are marked as changed.
    """
    fakes = list(tensors_in((args, kwargs)))
    with unset_fake_temporarily(), torch.no_grad(), same_randomness(module):
        own = [(t, t.detach().clone()) for _, t in module_tensors(module).values()]
        real_args, real_kwargs = map_tensors(_materialised, args), map_tensors(_materialised, kwargs)
        reals = list(tensors_in((real_args, real_kwargs)))
        versions = [t._version for t in reals]
        try:
            with RealOperators(fake_mode.seen):
                output = call(module, *real_args, **real_kwargs)
        finally:
            for tensor, value in own:
                tensor.copy_(value)
    with torch._C.DisableTorchFunction(), torch.no_grad():
        for real, fake, version in zip(reals, fakes, versions, strict=True):
            if real._version != version:
                torch.autograd.graph.increment_version(fake)
    known = {id(real): fake for real, fake in zip(reals, fakes, strict=True)}
    differentiable = any(t.requires_grad for t in (*module.parameters(), *fakes))

    def fake_of(tensor: Tensor) -> Tensor:
        if id(tensor) in known:
            return known[id(tensor)]
        made = fake_mode.from_tensor(tensor.detach())
        return made.requires_grad_(differentiable and made.is_floating_point())

    return map_tensors(fake_of, output)


def _materialised(tensor: Tensor) -> Tensor:
    """A real tensor like a fake one: normal floats, zeros for integers (valid indices), True for masks."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    shape, dtype, device = tuple(tensor.shape), tensor.dtype, tensor.device
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.full(shape, dtype == torch.bool, dtype=dtype, device=device)
