"""What ran below torch functions: the FLOPs of the operators, and whether they drew random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_RANDOM = torch.Tag.nondeterministic_seeded


class Observed:
    """`flops` (by torch's own formulas, 2 per multiply-add) and `random` of all that was added since `start()`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.flops, self.random = 0, False

    def add(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += int(formula(*args, **kwargs, out_val=output))
        self.random = self.random or _RANDOM in func.tags


class RealOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds the operators that run on real tensors to `seen`."""

    def __init__(self, seen: Observed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            output = func(*args, **(kwargs or {}))
        self.seen.add(func, args, kwargs or {}, output)
        return output
