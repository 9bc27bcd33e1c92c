"""Devices and links by name, from their makers' data sheets: for plans for machines that one does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass

GIGA = 1e9


@dataclass(frozen=True)
class Device:
    """What a device can do at most.

    Attributes:
        flops: floating-point operations per second, in float32 (on tensor cores, TF32, where PyTorch uses them for
            convolutions by default).
        bandwidth: bytes per second of its memory; `memory`: bytes.
        launch: seconds from one operation to the next, however small.
    """

    flops: float
    bandwidth: float
    memory: float
    launch: float


_GPU_LAUNCH = 6e-6  # what PyTorch in eager mode needs to issue one kernel
DEVICES = {
    "2080Ti": Device(13.4e12, 616 * GIGA, 11 * GIGA, _GPU_LAUNCH),
    "V100": Device(15.7e12, 900 * GIGA, 32 * GIGA, _GPU_LAUNCH),
    "A6000": Device(77.4e12, 768 * GIGA, 48 * GIGA, _GPU_LAUNCH),
    "A100": Device(156e12, 2039 * GIGA, 80 * GIGA, _GPU_LAUNCH),
    "H100": Device(494e12, 3350 * GIGA, 80 * GIGA, _GPU_LAUNCH),
    "H200": Device(494e12, 4800 * GIGA, 141 * GIGA, _GPU_LAUNCH),
    "L4": Device(60e12, 300 * GIGA, 24 * GIGA, _GPU_LAUNCH),
    "CPU": Device(64 * GIGA, 12 * GIGA, 16 * GIGA, 4e-6),  # one core with AVX2: 2 x 8 multiply-adds at 2 GHz
}


@dataclass(frozen=True)
class Link:
    """What it costs to move bytes from one rank to another. `latency`: seconds; `bandwidth`: bytes per second."""

    latency: float = 0.0
    bandwidth: float = math.inf

    def seconds(self, size: float) -> float:
        return self.latency + size / self.bandwidth if size else 0.0


LINKS = {
    "PCIe": Link(10e-6, 25 * GIGA),  # 4.0 x16, of 32
    "NVLink": Link(5e-6, 250 * GIGA),
    "memory": Link(100e-6, 1.5 * GIGA),  # gloo over loopback
    "Ethernet": Link(50e-6, 1.2 * GIGA),  # 10 Gbit/s
}
LINK_OF = {"A100": "NVLink", "H100": "NVLink", "H200": "NVLink", "CPU": "memory"}  # the others: PCIe
