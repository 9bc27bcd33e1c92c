"""A student block run through `torch.compile`, or as it is where that fails."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

_told: set[type[Exception]] = set()


class Compiled:
    """Calls `module` compiled. The first time that this fails where the module itself does not, it says so once and
    goes on without."""

    def __init__(self, module: nn.Module, block: int) -> None:
        self._plain, self._block = module, block
        self._fast: Any = torch.compile(module)

    def __call__(self, *given: Any) -> Any:
        if self._fast is None:
            return self._plain(*given)
        try:
            return self._fast(*given)
        except Exception as error:
            found = self._plain(*given)  # raises where it was not the compiler's fault
            self._fast = None
            if type(error) not in _told:
                _told.add(type(error))
                reason = (str(error).splitlines() or [""])[0]
                warnings.warn(
                    f"block {self._block} runs as it is, torch.compile has failed: {type(error).__name__}: {reason}",
                    stacklevel=2,
                )
            return found
