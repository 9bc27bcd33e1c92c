"""Route module calls and custom autograd functions through a recorder while it records."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .origin import Opaque

if TYPE_CHECKING:
    from .recorder import Recorder


@contextmanager
def intercepted_calls(recorder: Recorder) -> Iterator[None]:
    """Route `nn.Module.__call__` and custom autograd functions through `recorder` (as torch.fx does for modules)."""
    original_call = nn.Module.__call__
    function_class = torch.autograd.Function
    original_apply = function_class.__dict__["apply"]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(original_call, module, args, kwargs)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.ledger.inside_leaf and threading.get_ident() == recorder.thread:
            raise Opaque(f"calls the custom autograd function {cls.__name__}")
        return original_apply.__get__(None, cls)(*args, **kwargs)

    def refusing(name: str, original: Any) -> Any:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if not recorder.ledger.inside_leaf and threading.get_ident() == recorder.thread:
                raise Opaque(f"calls torch.{name}")
            return original(*args, **kwargs)

        return seed

    seeding = {name: getattr(torch, name) for name in ("manual_seed", "seed", "set_rng_state")}
    for name, original in seeding.items():
        for module in (torch, torch.random):
            setattr(module, name, refusing(name, original))
    nn.Module.__call__ = call  # type: ignore[method-assign]
    function_class.apply = classmethod(apply)
    try:
        yield
    finally:
        for name, original in seeding.items():
            for module in (torch, torch.random):
                setattr(module, name, original)
        nn.Module.__call__ = original_call  # type: ignore[method-assign]
        function_class.apply = original_apply
