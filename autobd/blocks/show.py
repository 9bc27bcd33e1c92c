"""A split as a table, and as plain values for machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tables import quantity, shape, table
from .carve import Block

if TYPE_CHECKING:
    from .split import Split

_COUNTS = ("parameter_count", "flops", "activation_bytes")


def to_text(split: Split) -> str:
    """One line per block pair, totals, and notes."""
    teacher, student = [p.teacher for p in split.pairs], [p.student for p in split.pairs]
    rows = [
        [
            i,
            " .. ".join(dict.fromkeys(pair.teacher.modules)),
            " .. ".join(dict.fromkeys(pair.student.modules)),
            " + ".join(shape((b.rows, *b.shape)) for b in pair.teacher.returns),
            "; ".join(str(a) for a in pair.adapters if str(a)) or "-",
            *_quantities([pair.teacher], [pair.student]),
        ]
        for i, pair in enumerate(split.pairs)
    ]
    rows.append(["", "total", "", "", "", *_quantities(teacher, student)])
    heads = ["block", "teacher", "student", "boundary", "adapter", "teacher params", "student params"]
    text = table([*heads, "teacher FLOPs", "student FLOPs", "activations"], rows)
    names = f"{type(split.teacher.model).__name__} -> {type(split.student.model).__name__}"
    head = f"{names}, {len(split)} blocks, FLOPs and activations at batch size {split.student.example.rows}"
    return "\n".join([head, text, *(f"note: {n}" for n in split.notes)])


def _quantities(teacher: list[Block], student: list[Block]) -> list[str]:
    t, s = ([sum(getattr(b, name) for b in side) for name in _COUNTS] for side in (teacher, student))
    return [quantity(t[0]), quantity(s[0]), quantity(t[1]), quantity(s[1]), quantity(s[2], "B")]


def to_dict(split: Split) -> dict[str, Any]:
    """What the table shows, as plain values: sizes in bytes, FLOPs of one forward pass at `batch_size`."""

    def side(block: Block) -> dict[str, Any]:
        return {
            "modules": list(block.modules),
            "returns": [
                {"shape": list(b.shape), "rows_per_sample": b.folded, "dtype": str(b.dtype).removeprefix("torch.")}
                for b in block.returns
            ],
            **{name: getattr(block, name) for name in _COUNTS},
        }

    return {
        "teacher": type(split.teacher.model).__name__,
        "student": type(split.student.model).__name__,
        "batch_size": split.student.example.rows,
        "blocks": [
            {
                "teacher": side(p.teacher),
                "student": side(p.student),
                "adapters": [
                    {"kind": a.kind, "layout": a.changes_layout, "resamples": a.resamples, "folds": list(a.folds)}
                    for a in p.adapters
                ],
            }
            for p in split.pairs
        ],
        "ties": [
            {"parameters": list(t.parameters), "blocks": list(t.blocks), "together": t.together} for t in split.ties
        ],
        "notes": list(split.notes),
    }
