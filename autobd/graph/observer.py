"""Watches the operators below torch functions: their FLOPs, and whether they draw random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class OperatorObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`flops` and `random` of all that ran since `start()`; FLOPs by torch's own formulas (2 per multiply-add)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.start()

    def start(self) -> None:
        self.flops, self.random = 0, False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # operators of a scripted function are not recorded one by one
            output = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **(kwargs or {}), out_val=output))
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        return output
