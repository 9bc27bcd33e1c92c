"""A cost by rows of the batch, known at some numbers of rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import InputError


@dataclass(frozen=True)
class Curve:
    """Seconds or bytes by rows: straight lines between what is known, and on along the last one.

    Attributes:
        rows: ascending, from 1; `values`: at these; infinite from where it does not fit.

    Errors: InputError if they are not that.
    """

    rows: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if not self.rows or len(self.rows) != len(self.values) or not ascending or self.rows[0] < 1:
            raise InputError(
                "This is no curve.",
                given=f"rows {self.rows}, values {self.values}",
                expected="ascending numbers of rows from 1, and as many values",
            )
        if any(math.isnan(v) or v < 0 for v in self.values):
            raise InputError("A cost is below zero or no number.", given=self.values, expected="values of at least 0")

    @classmethod
    def of(cls, value: float | Sequence[float] | Curve, batch: int) -> Curve:
        """From plain numbers: one of a whole batch (in proportion to the rows), or those at 1, 2, 4, ... rows."""
        if isinstance(value, Curve):
            return value
        if isinstance(value, (int, float)):
            return cls((batch,), (float(value),))
        return cls(tuple(1 << i for i in range(len(value))), tuple(map(float, value)))

    def times(self, factor: float) -> Curve:
        return replace(self, values=tuple(v * factor for v in self.values))

    def joined(self, more: Curve) -> Curve:
        """With the points of `more`."""
        known = {**dict(zip(self.rows, self.values, strict=True)), **dict(zip(more.rows, more.values, strict=True))}
        return Curve(tuple(sorted(known)), tuple(known[r] for r in sorted(known)))

    def extended(self) -> Curve:
        """With values in proportion to the rows behind the last finite one: what they would be if it fitted."""
        finite = [(r, v) for r, v in zip(self.rows, self.values, strict=True) if math.isfinite(v)]
        if not finite:
            return self
        most, value = finite[-1]
        filled = (v if r <= most else value * r / most for r, v in zip(self.rows, self.values, strict=True))
        return replace(self, values=tuple(filled))

    def at(self, rows: int) -> float:
        """The cost of `rows` rows; nothing for none. A single known value is in proportion to the rows."""
        if rows <= 0:
            return 0.0
        if len(self.rows) == 1:
            return self.values[0] * rows / self.rows[0]
        i = min(max(bisect_left(self.rows, rows), 1), len(self.rows) - 1)
        (r0, r1), (v0, v1) = self.rows[i - 1 : i + 1], self.values[i - 1 : i + 1]
        if math.isinf(v1) and rows > r0:
            return math.inf
        if math.isinf(v0):  # too few rows for a batch norm, say
            return math.inf if rows < r1 else v1
        if rows < r0:  # below what is known: no less than in proportion
            return max(v0 + (v1 - v0) * (rows - r0) / (r1 - r0) if math.isfinite(v1) else 0.0, v0 * rows / r0)
        return max(v0 + (v1 - v0) * (rows - r0) / (r1 - r0) if math.isfinite(v1) else v0, 0.0)


def at_rows(curves: Sequence[Curve], rows: Sequence[int]) -> Tensor:
    """`Curve.at` of every curve (first axis) at every number of rows (second axis), in double precision."""
    found = torch.empty(len(curves), len(rows), dtype=torch.float64)
    wanted = torch.tensor(rows, dtype=torch.float64)
    for known in {c.rows for c in curves}:
        where = [i for i, c in enumerate(curves) if c.rows == known]
        values = torch.tensor([curves[i].values for i in where], dtype=torch.float64)
        ends = torch.tensor(known, dtype=torch.float64)
        if len(known) == 1:
            own = values * wanted / ends
        else:
            i = torch.searchsorted(ends, wanted).clamp(1, len(known) - 1)
            (r0, r1), (v0, v1) = (ends[i - 1], ends[i]), (values[:, i - 1], values[:, i])
            line = torch.where(v1.isfinite(), v0 + (v1 - v0) * (wanted - r0) / (r1 - r0), v0)
            own = torch.where(v1.isinf() & (wanted > r0), torch.inf, line.clamp(min=0.0))
            below = torch.maximum(torch.where(v1.isfinite(), line, 0.0), v0 * wanted / r0)
            own = torch.where(wanted < r0, below, own)
            own = torch.where(v0.isinf(), torch.where(wanted < r1, torch.inf, v1), own)
        found[where] = torch.where(wanted > 0, own, 0.0)
    return found
