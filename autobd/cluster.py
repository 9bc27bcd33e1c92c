"""The devices that a run may use, or that a plan is made for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import InputError, nearest
from .hardware import DEVICES

_GROUP = re.compile(r"(\d+)\s*x\s*(\w+)")
_NAMED = re.compile(r"(?P<groups>\d+\s*x\s*\w+(?:\s*\+\s*\d+\s*x\s*\w+)*)(?:\s*/\s*(?P<nodes>\d+)\s*nodes?)?")


@dataclass(frozen=True)
class Cluster:
    """Devices by name, one rank each.

    Attributes:
        nodes: number of the host of each device; () for one host.
    """

    devices: tuple[str, ...]
    nodes: tuple[int, ...] = ()

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each device."""
        return self.nodes or (0,) * len(self.devices)

    @property
    def exists(self) -> bool:
        """Whether ranks can run on it; else it is one to plan for."""
        return all(name not in DEVICES for name in self.devices)

    @classmethod
    def of(cls, devices: str | int | Sequence[str], home: torch.device) -> Cluster:
        """From `"auto"` (all GPUs; without one, `home`), a number of devices, a name, or names; or, to plan for,
        `"4xA6000"`, `"2xA100+2xL4"`, `"8xH100/2 nodes"`.

        Arguments:
            home: the device that the models are on.

        Errors: InputError for an unknown device, or more GPUs than there are.
        """
        if isinstance(devices, str) and (named := _NAMED.fullmatch(devices.strip())):
            return _to_plan_for(devices, named)
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


def _to_plan_for(given: str, named: re.Match[str]) -> Cluster:
    devices = []
    for count, name in _GROUP.findall(named["groups"]):
        found = {known.lower(): known for known in DEVICES}.get(name.lower())
        if found is None or int(count) < 1:
            raise InputError(
                "No such device to plan for.",
                given=f"devices={given!r}",
                expected=f"a number and one of {', '.join(DEVICES)}",
                do=f"perhaps you meant {nearest(name, DEVICES, 1)}",
            )
        devices += [found] * int(count)
    nodes = int(named["nodes"] or 1)
    if not 1 <= nodes <= len(devices) or len(devices) % nodes:
        raise InputError(
            "The devices cannot be spread evenly over the nodes.",
            given=f"devices={given!r}: {len(devices)} on {nodes}",
            expected="as many on each node",
        )
    return Cluster(tuple(devices), tuple(i * nodes // len(devices) for i in range(len(devices))))


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
    try:
        there = not torch.empty(0, device=device).is_meta
    except (RuntimeError, AssertionError, NotImplementedError, ImportError):  # this PyTorch is built without it
        there = False
    if not there:
        raise InputError(
            "No such device on this machine.", given=f"devices={given!r}", expected='a name such as "cpu" or "cuda:0"'
        )
    return str(device)
