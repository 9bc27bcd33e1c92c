"""A profile by analysis: each operation takes what its arithmetic or its bytes take, whichever is more (Williams et al.
2009, the roofline), and no less than it takes to issue it. Nothing in it is fitted to a measurement."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..blocks import Split
from ..blocks.carve import Block
from ..cluster import Cluster
from ..graph import Captured
from ..hardware import DEVICES, LINK_OF, LINKS, Device, Link
from ..parts.recompute import reads_weights_alone, recomputed_bytes
from .curve import Curve
from .profiles import BlockCosts, Kind, Profile

_BACKWARD = 2  # the arithmetic and bytes of a forward
_WORTH = 0.9  # of the activations, for which it is worth to compute them again
_STATE = 2  # numbers that Adam keeps for each weight
_UPDATE = 7  # numbers that its step reads and writes for each


def analytic(split: Split, cluster: Cluster, batch_size: int | None = None) -> Profile:
    """What the blocks of `split` should cost on the devices of `cluster`.

    Arguments:
        batch_size: rows of a whole batch; default: those of the example that the models were split with.
    """
    batch = batch_size or split.student.example.rows
    names = [_name(device) for device in cluster.devices]
    kinds = sorted(set(names))
    examples = [c.example.rows for c in (split.teacher, split.student)]
    weights = _sizes(split.teacher)
    within = between = reduce = Link()
    if len(names) > 1:
        reduce = min((LINKS[LINK_OF.get(n, "PCIe")] for n in kinds), key=lambda link: link.bandwidth)
        between = LINKS["Ethernet"]
        if not cluster.exists:  # of devices that are here it is to be measured; until then relays are free
            within = reduce
    inputs = {id(t): t for c in (split.teacher, split.student) for t in c.example.tensors}.values()

    def costs(block: int, student: Block, of: Captured) -> BlockCosts:
        own = [weights, _sizes(of)]
        teacher, on = split.pairs[block].teacher, [DEVICES[k] for k in kinds]
        whole = any(n.op == "call_module" and n.target in of.opaque for n in student.graph.nodes)
        may_recompute = not whole and reads_weights_alone(student.graph, of.model)
        return _block(teacher, student, examples, own, on, batch, may_recompute)

    return Profile(
        batch,
        tuple(
            costs(b, pair.student, split.student).beside(
                [costs(b, c.student, c.split.student) for c in split.candidates if c.block == b]
            )
            for b, pair in enumerate(split.pairs)
        ),
        cluster.devices,
        tuple(Kind(k, math.inf if cluster.exists else DEVICES[k].memory) for k in kinds),
        tuple(kinds.index(n) for n in names),
        cluster.hosts,
        within,
        between,
        reduce,
        between,
        0.0,
        sum(t.numel() * t.element_size() for t in inputs) / split.student.example.rows,
        units(split),
        "analytic",
    )


def units(split: Split) -> tuple[tuple[int, ...], ...]:
    """Blocks that a plan may part: all, but those that train a weight together."""
    together = [(min(t.blocks), max(t.blocks)) for t in split.ties if t.together]
    starts = [b for b in range(len(split)) if not any(first < b <= last for first, last in together)]
    return tuple(tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], len(split)], strict=True))


def boundary_bytes(block: Block) -> float:
    """Bytes of one row behind a block."""
    return float(sum(torch.Size(b.shape).numel() * b.folded * b.dtype.itemsize for b in block.returns))


def _block(
    teacher: Block,
    student: Block,
    examples: Sequence[int],
    weights: Sequence[Mapping[str, int]],
    devices: list[Device],
    batch: int,
    may_recompute: bool,
) -> BlockCosts:
    rows = sorted({1 << i for i in range(batch.bit_length())} | {batch})
    own = [
        sum(sizes.get(key, 0) for key in block.parameters)
        for block, sizes in zip((teacher, student), weights, strict=True)
    ]

    again = recomputed_bytes(student.graph) if may_recompute else math.inf

    def curve(block: Block, example: int, passes: int, device: Device) -> Curve:
        return Curve(tuple(rows), tuple(passes * _seconds(block.graph, r / example, device) for r in rows))

    return BlockCosts(
        tuple(curve(teacher, examples[0], 1, d) for d in devices),
        tuple(curve(student, examples[1], 1 + _BACKWARD, d) for d in devices),
        tuple(_UPDATE * own[1] / d.bandwidth for d in devices),
        own[0],
        own[1],
        own[1],
        _STATE * own[1],
        Curve((1,), (student.activation_bytes / examples[1],)),
        boundary_bytes(teacher),
        boundary_bytes(student),
        Curve((1,), (again / examples[1],)) if again < _WORTH * student.activation_bytes else None,
        Curve((1,), (_passing(teacher.graph) / examples[0],)),
    )


def _passing(graph: fx.Graph) -> int:
    """Bytes that the largest operation of a forward reads and writes."""
    return max((_bytes(n) + sum(map(_bytes, n.all_input_nodes)) for n in graph.nodes if n.op != "output"), default=0)


def _seconds(graph: fx.Graph, scale: float, device: Device) -> float:
    """Seconds of a forward at `scale` times the rows of the example."""
    seconds = 0.0
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr") or "shape" not in node.meta:
            continue
        moved = scale * (_bytes(node) + sum(_bytes(n) for n in node.all_input_nodes)) + node.meta["parameter_bytes"]
        seconds += max(scale * node.meta["flops"] / device.flops, moved / device.bandwidth, device.launch)
    return seconds


def _bytes(node: fx.Node) -> int:
    if "shape" not in node.meta or node.op == "get_attr":
        return 0
    return int(torch.Size(node.meta["shape"]).numel() * node.meta["dtype"].itemsize)


def _sizes(captured: Captured) -> dict[str, int]:
    return {name: p.numel() * p.element_size() for name, p in captured.model.named_parameters()}


def _name(device: str) -> str:
    """The entry of the table for a device's name."""
    if device in DEVICES:
        return device
    if device.startswith("cuda") and torch.cuda.is_available():
        model = torch.cuda.get_device_name(device).replace(" ", "")
        return next((name for name in DEVICES if name.lower() in model.lower()), "A100")
    return "CPU"
