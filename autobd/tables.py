"""Text tables and human-readable quantities, in one style for everything autobd prints."""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate


def table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A text table; numbers are aligned to the right and nothing is reinterpreted."""
    numeric = ["right" if rows and all(_is_quantity(row[i]) for row in rows) else "left" for i in range(len(headers))]
    return tabulate(
        [[str(cell) for cell in row] for row in rows],
        headers,
        "simple",
        colalign=numeric if rows else None,
        disable_numparse=True,
    )


def _is_quantity(cell: object) -> bool:
    return str(cell)[:1].isdigit() or str(cell) in ("", "-")


def quantity(value: float, unit: str = "") -> str:
    """`value` with three significant digits and a decimal prefix: `quantity(1.82e9)` is "1.82 G"."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    if unit == "s" and value < 1:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} {unit}".rstrip()


def shape(dims: Sequence[object]) -> str:
    """A shape as text, the batch first: "N x 64 x 8 x 8"."""
    return " x ".join(str(d) for d in dims)
