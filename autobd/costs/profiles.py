"""What everything costs: blocks by device and rows, links, memory. Made by measuring, by analysis or from numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..errors import InputError
from ..hardware import Link
from ..tables import quantity, table
from .curve import Curve

_VERSION = 1
FORWARD = 1 / 3  # of a student's forward and backward


@dataclass(frozen=True)
class Kind:
    """A kind of device. `memory`: bytes that a rank may use; infinite if unknown."""

    name: str
    memory: float = math.inf


@dataclass(frozen=True)
class BlockCosts:
    """One block pair.

    Attributes:
        teacher: seconds of the teacher's forward by rows, one curve for each kind of device; `student`: likewise, of
            the student's forward and backward; `update`: seconds of the optimizer's step.
        teacher_bytes, student_bytes: parameters and buffers; `gradient_bytes`, `state_bytes`: gradients, and what the
            optimizer keeps.
        saved: bytes that the student's forward and backward need at most, beside weights, gradients and boundaries, by
            rows: activations that are kept for the backward, and what operations need for a while.
        boundary: bytes behind the teacher's block, of one row; `own_boundary`: behind the student's.
        recomputed: like `saved`, where activations are computed again in the backward; None: that saves nothing.
        passing: like `saved`, of the teacher's forward alone; None: as much as `saved`.
    """

    teacher: tuple[Curve, ...]
    student: tuple[Curve, ...]
    update: tuple[float, ...]
    teacher_bytes: float
    student_bytes: float
    gradient_bytes: float
    state_bytes: float
    saved: Curve
    boundary: float
    own_boundary: float
    recomputed: Curve | None = None
    passing: Curve | None = None

    def student_seconds(self, kind: int, rows: int, microbatches: int = 1, recompute: bool = False) -> float:
        """Forward and backward of `rows` rows, in so many parts, with activations kept or computed again."""
        seconds = microbatches * self.student[kind].at(-(-rows // microbatches))
        return seconds * (1 + FORWARD) if recompute and self.recomputed is not None else seconds

    def beside(self, others: Sequence[BlockCosts]) -> BlockCosts:
        """With other students for the same teacher, which are trained one after the other."""
        if not others:
            return self
        every = [self, *others]

        def total(curves: Sequence[Curve]) -> Curve:
            return replace(curves[0], values=tuple(map(sum, zip(*(c.values for c in curves), strict=True))))

        return replace(
            self,
            student=tuple(map(total, zip(*(c.student for c in every), strict=True))),
            update=tuple(map(sum, zip(*(c.update for c in every), strict=True))),
            student_bytes=sum(c.student_bytes for c in every),
            gradient_bytes=sum(c.gradient_bytes for c in every),
            state_bytes=sum(c.state_bytes for c in every),
            saved=max((c.saved for c in every), key=lambda curve: curve.values[-1]),
            recomputed=None,
        )

    def joined(self, more: BlockCosts) -> BlockCosts:
        """With what `more` knows at other numbers of rows."""

        def both(name: str) -> tuple[Curve, ...]:
            return tuple(a.joined(b) for a, b in zip(getattr(self, name), getattr(more, name), strict=True))

        again, more_again = self.recomputed, more.recomputed
        return replace(
            self,
            teacher=both("teacher"),
            student=both("student"),
            saved=self.saved.joined(more.saved),
            recomputed=again.joined(more_again) if again is not None and more_again is not None else None,
            passing=None if self.passing is None or more.passing is None else self.passing.joined(more.passing),
        )

    def needs(self, rows: int, microbatches: int = 1, recompute: bool = False) -> float:
        """Bytes beside weights, gradients and boundaries (see `saved`)."""
        curve = self.recomputed if recompute and self.recomputed is not None else self.saved
        return curve.at(-(-rows // microbatches))


@dataclass(frozen=True)
class Profile:
    """All costs of a pair of models on a cluster.

    Attributes:
        batch_size: rows of a whole batch; `blocks`: one for each block pair.
        devices: names, one rank each; `kind_of`: index into `kinds` of each; `nodes`: number of the host of each.
        within, between: links between ranks of one host, and of two; `reduce_within`, `reduce_between`: the same for a
            ring all-reduce.
        load: seconds of the loader, for a whole batch; `input_bytes`: of one row of the inputs.
        units: consecutive blocks that no plan may part, because they train a weight together; the others alone.
        source: "measured", "analytic" or "given".
        spread: relative spread of the measured times: interquartile range over median, the median of all.
    """

    batch_size: int
    blocks: tuple[BlockCosts, ...]
    devices: tuple[str, ...]
    kinds: tuple[Kind, ...]
    kind_of: tuple[int, ...]
    nodes: tuple[int, ...]
    within: Link = field(default_factory=Link)
    between: Link = field(default_factory=Link)
    reduce_within: Link = field(default_factory=Link)
    reduce_between: Link = field(default_factory=Link)
    load: float = 0.0
    input_bytes: float = 0.0
    units: tuple[tuple[int, ...], ...] = ()
    source: str = "given"
    spread: float = 0.0

    def __post_init__(self) -> None:
        wrong = {
            "batch_size": self.batch_size < 1,
            "blocks": not self.blocks,
            "kind_of": len(self.kind_of) != len(self.devices) or not set(self.kind_of) <= set(range(len(self.kinds))),
            "nodes": len(self.nodes) != len(self.devices),
            "curves": any(
                not len(b.teacher) == len(b.student) == len(b.update) == len(self.kinds) for b in self.blocks
            ),
        }
        if any(wrong.values()):
            raise InputError(
                f"The profile does not fit together: {', '.join(k for k, bad in wrong.items() if bad)}.",
                given=f"{len(self.blocks)} blocks, {len(self.devices)} devices, {len(self.kinds)} kinds",
                expected="a batch, blocks with a curve for each kind of device, a kind and a node for each device",
            )
        if not self.units:
            object.__setattr__(self, "units", tuple((b,) for b in range(len(self.blocks))))

    def knows(self, rows: int) -> bool:
        """Whether the blocks' costs are known at so many rows, or a twentieth more or less."""
        return any(abs(known - rows) <= rows / 20 for known in self.blocks[0].saved.rows)

    @classmethod
    def of(
        cls,
        teacher: Sequence[float | Sequence[float]],
        student: Sequence[float | Sequence[float]],
        batch_size: int,
        devices: int = 1,
        **costs: Any,
    ) -> Profile:
        """A profile from plain numbers, for equal devices.

        Arguments:
            teacher, student: seconds of each block, of its forward and of its forward and backward: one number for a
                whole batch, or numbers for 1, 2, 4, ... rows.
            costs: `update` (seconds of each block), `boundary` (bytes of a row behind each block), `weights` (bytes of
                each student block's parameters, for the all-reduce and memory), `saved` (bytes of a row), `memory`
                (bytes of each device), and fields of the profile (`within=Link(...)`).
        """
        number = len(teacher)
        zeros = [0.0] * number
        update, boundary, weights = (costs.pop(n, zeros) for n in ("update", "boundary", "weights"))
        saved, memory = costs.pop("saved", zeros), costs.pop("memory", math.inf)
        if not len(student) == len(update) == len(boundary) == len(weights) == len(saved) == number:
            raise InputError(
                "The costs are of different numbers of blocks.", given=f"{number} teachers, {len(student)} students"
            )
        blocks = tuple(
            BlockCosts(
                (Curve.of(teacher[b], batch_size),),
                (Curve.of(student[b], batch_size),),
                (update[b],),
                weights[b],
                weights[b],
                weights[b],
                2 * weights[b],
                Curve((1,), (saved[b],)),
                boundary[b],
                boundary[b],
            )
            for b in range(number)
        )
        names = tuple(f"device {i}" for i in range(devices))
        return cls(batch_size, blocks, names, (Kind("device", memory),), (0,) * devices, (0,) * devices, **costs)

    def kind(self, rank: int) -> Kind:
        return self.kinds[self.kind_of[rank]]

    def link(self, a: int, b: int) -> Link:
        """Between two ranks."""
        return self.within if self.nodes[a] == self.nodes[b] else self.between

    def reduce_seconds(self, ranks: Sequence[int], size: float) -> float:
        """A ring all-reduce of `size` bytes over `ranks`: each sends them all twice, but for its own part."""
        k = len(ranks)
        if k < 2 or not size:
            return 0.0
        link = self.reduce_within if len({self.nodes[r] for r in ranks}) == 1 else self.reduce_between
        return 2 * (k - 1) * (link.latency + size / k / link.bandwidth)

    def untrained(self, blocks: Collection[int]) -> Profile:
        """Where the students of these blocks are not trained."""

        def still(costs: BlockCosts) -> BlockCosts:
            return replace(costs, student=tuple(c.times(0.0) for c in costs.student), update=(0.0,) * len(costs.update))

        return replace(self, blocks=tuple(still(b) if i in blocks else b for i, b in enumerate(self.blocks)))

    def on(self, devices: Sequence[str], kind_of: Sequence[int], nodes: Sequence[int]) -> Profile:
        """The same costs on other devices of the same kinds."""
        return replace(self, devices=tuple(devices), kind_of=tuple(kind_of), nodes=tuple(nodes))

    def to_json(self) -> str:
        return json.dumps({"autobd profile": _VERSION, **_finite(asdict(self))}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Errors: InputError for anything but what `to_json` gives."""
        try:
            found = _infinite(json.loads(text))
            if found.pop("autobd profile") != _VERSION:
                raise KeyError("version")
            return cls(
                **{
                    **found,
                    "blocks": tuple(_block(b) for b in found["blocks"]),
                    "kinds": tuple(Kind(**k) for k in found["kinds"]),
                    **{n: Link(**found[n]) for n in ("within", "between", "reduce_within", "reduce_between")},
                    **{n: tuple(found[n]) for n in ("devices", "kind_of", "nodes")},
                    "units": tuple(tuple(u) for u in found["units"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                "This is no profile.",
                given=f"{type(error).__name__}: {error}",
                expected="the text of Profile.to_json()",
            ) from None

    def __str__(self) -> str:
        rows = [
            [
                i,
                *(
                    f"{1000 * curve.at(self.batch_size):.3g}"
                    for k in range(len(self.kinds))
                    for curve in (b.teacher[k], b.student[k])
                ),
                quantity(b.student_bytes, "B"),
                quantity(b.saved.at(self.batch_size), "B"),
                quantity(b.boundary * self.batch_size, "B"),
            ]
            for i, b in enumerate(self.blocks)
        ]
        times = [
            f"{who} ms" + (f" ({k.name})" if len(self.kinds) > 1 else "")
            for k in self.kinds
            for who in ("teacher", "student")
        ]
        spread = f", spread {self.spread:.0%}" if self.source == "measured" else ""
        return f"{self.source} costs of a batch of {self.batch_size}{spread}\n" + table(
            ["block", *times, "weights", "saved", "boundary"], rows
        )


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_finite(v) for v in value]
    return "infinite" if isinstance(value, float) and math.isinf(value) else value


def _infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _infinite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_infinite(v) for v in value]
    return math.inf if value == "infinite" else value


def _block(found: Mapping[str, Any]) -> BlockCosts:
    def curve(c: Mapping[str, Any]) -> Curve:
        return Curve(tuple(c["rows"]), tuple(c["values"]))

    return BlockCosts(
        **{
            **found,
            "teacher": tuple(map(curve, found["teacher"])),
            "student": tuple(map(curve, found["student"])),
            "update": tuple(found["update"]),
            "saved": curve(found["saved"]),
            **{name: curve(found[name]) if found.get(name) else None for name in ("recomputed", "passing")},
        }
    )
