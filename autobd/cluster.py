"""The devices that a run may use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import InputError


@dataclass(frozen=True)
class Cluster:
    """Devices by name, one rank each."""

    devices: tuple[str, ...]

    @classmethod
    def of(cls, devices: str | int | Sequence[str], home: torch.device) -> Cluster:
        """From `"auto"` or 1 (the device that the models are on), a device name, or a list of one.

        Errors: InputError for more than one device, an unknown one, or one that the models are not on.
        """
        if devices in ("auto", 1):
            return cls((str(home),))
        names = (devices,) if isinstance(devices, str) else devices
        if isinstance(names, int) or not isinstance(names, (tuple, list)) or len(names) != 1:
            raise InputError(
                "This version runs on one rank.", given=f"devices={devices!r}", expected='"auto", 1 or one device name'
            )
        try:
            device = torch.device(names[0])
        except (RuntimeError, TypeError):
            raise InputError(
                "No such device.", given=f"devices={devices!r}", expected='a name such as "cpu" or "cuda:0"'
            ) from None
        if device.type != home.type or (device.index or 0) != (home.index or 0):
            raise InputError(
                "The models are on another device.",
                given=f"devices={devices!r}, models on {home}",
                expected="the device that both models are on",
                do=f"move both with .to('{device}') first",
            )
        return cls((str(device),))
