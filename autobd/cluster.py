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
        """From `"auto"` (all GPUs; without one, `home`), a number of devices, a name, or names.

        Arguments:
            home: the device that the models are on.

        Errors: InputError for an unknown device, or more GPUs than there are.
        """
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if devices == "auto":
            return cls(tuple(f"cuda:{i}" for i in range(gpus)) if gpus > 1 else (str(home),))
        if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
            if devices == 1:
                return cls((str(home),))
            if gpus and devices > gpus:
                raise InputError(
                    "There are not so many GPUs.",
                    given=f"devices={devices}",
                    expected=f"at most {gpus}",
                    do='pass names to share one, such as devices=["cuda:0"] * 2, or ["cpu"] * 2 for the CPU',
                )
            return cls(tuple(f"cuda:{i}" if gpus else "cpu" for i in range(devices)))
        names = (devices,) if isinstance(devices, str) else devices
        if not isinstance(names, (tuple, list)) or not names:
            raise InputError(
                "devices= is no number of devices and names none.",
                given=f"devices={devices!r}",
                expected='"auto", a number of at least 1, a device name, or a list of names',
            )
        return cls(tuple(_known(name, devices, gpus) for name in names))


def _known(name: object, given: object, gpus: int) -> str:
    try:
        device = torch.device(name)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        raise InputError(
            "No such device.", given=f"devices={given!r}", expected='a name such as "cpu" or "cuda:0"'
        ) from None
    if device.type == "cuda":
        if (device.index or 0) >= gpus:
            raise InputError("No such GPU.", given=f"devices={given!r}", expected=f"one of {gpus} GPUs")
        return f"cuda:{device.index or 0}"
    return str(device)
