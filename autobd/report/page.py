"""A report as one HTML page that needs nothing else: tables, and the schedule drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from ..program import Trace
from ..tables import quantity
from .gantt import idle, letter, steady

_KINDS = {"T": "teacher", "F": "forward", "B": "backward", "U": "update", "A": "all-reduce", "R": "relay"}
_ROW, _LEFT, _WIDTH = 34, 90, 1000
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6675; --paper: #ffffff; --line: #dfe3e8; --well: #f4f6f8;
  --T: #5b7fb8; --F: #2f9e77; --B: #1c6e58; --U: #d69a2d; --A: #9a6bb3; --R: #8b95a3; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #98a2b1; --paper: #14181f; --line: #2c333d;
  --well: #1b2029; --T: #7d9fd4; --F: #45b890; --B: #2b8a70; --U: #e0ad4c; --A: #b48ccb; --R: #76808e; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.2rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; color: var(--soft); } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; white-space: nowrap; }
th, td { text-align: left; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; }
tr.chosen td { font-weight: 700; }
svg { display: block; width: 100%; min-width: 40rem; height: auto; background: var(--well); border-radius: 6px; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); } svg .tick { fill: var(--soft); }
svg .inside { fill: #fff; font-size: 10px; pointer-events: none; }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: 2px;
  vertical-align: -1px; }
details { margin-top: .5rem; }
pre { overflow-x: auto; background: var(--well); padding: .8rem; border-radius: 6px; font-size: .8rem; }
"""


def page(
    title: str,
    lead: Sequence[str],
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[object]], int | None]],
    traces: Mapping[str, Trace],
    code: Mapping[str, str],
) -> str:
    """The page.

    Arguments:
        lead: sentences under the title.
        tables: by heading: column names, rows, and which row is the one that was chosen.
        traces: schedules to draw, by heading; `code`: texts to unfold, by heading.
    """
    parts = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lead)]
    for heading, trace in traces.items():
        parts += [f"<h2>{escape(heading)}</h2>", _legend(), f'<div class="scroll">{drawing(trace)}</div>']
    for heading, (names, rows, chosen) in tables.items():
        parts += [f"<h2>{escape(heading)}</h2>", f'<div class="scroll">{_table(names, rows, chosen)}</div>']
    for heading, text in code.items():
        parts.append(f"<details><summary>{escape(heading)}</summary><pre>{escape(text)}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def drawing(trace: Trace, steps: int = 2) -> str:
    """Two steps once the pipeline is full, as SVG: one row for each rank."""
    begin, end = steady(trace, steps)
    waits = idle(trace, begin, end)
    if end <= begin:
        return "<p>nothing to show</p>"
    scale, height = (_WIDTH - _LEFT - 10) / (end - begin), _ROW * len(waits) + 30
    rows = {rank: 6 + i * _ROW for i, rank in enumerate(waits)}
    found = [
        f'<text x="8" y="{y + 15}">rank {rank}</text>'
        f'<text class="tick" x="8" y="{y + 28}">{waits[rank]:.0%} waiting</text>'
        for rank, y in rows.items()
    ]
    for event in trace.events:
        kind, first, last = letter(event), max(event.start, begin), min(event.end, end)
        if kind == "." or last <= first:
            continue
        x, width, y = _LEFT + (first - begin) * scale, max((last - first) * scale, 0.4), rows[event.rank]
        block = "" if event.instruction.block is None else f" {event.instruction.block}"
        what = f"{_KINDS[kind]}{block}, step {event.step}: {quantity(event.seconds, 's')}"
        found.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 8}" rx="1.5" fill="var(--{kind})">'
            f"<title>{escape(what)}</title></rect>"
        )
        if width > 18 and block:
            found.append(f'<text class="inside" x="{x + 3:.1f}" y="{y + 17}">{kind}{block.strip()}</text>')
    for i in range(5):
        at = _LEFT + i / 4 * (_WIDTH - _LEFT - 10)
        anchor = "end" if i == 4 else "middle" if i else "start"
        label = quantity((end - begin) * i / 4, "s") if i else "0"
        found.append(f'<text class="tick" text-anchor="{anchor}" x="{at:.0f}" y="{height - 6}">{label}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="schedule">{"".join(found)}</svg>'


def _legend() -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span><i style="background:var(--{kind})"></i>{name}</span>' for kind, name in _KINDS.items())
        + "</p>"
    )


def _table(names: Sequence[str], rows: Sequence[Sequence[object]], chosen: int | None) -> str:
    numeric = [
        bool(rows) and all(str(row[i])[:1].isdigit() or str(row[i]) in ("", "-") for row in rows)
        for i in range(len(names))
    ]

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=number' if number else ''}>{escape(str(value))}</{tag}>"
            for value, number in zip(values, numeric, strict=True)
        )

    body = "".join(f"<tr{' class=chosen' if i == chosen else ''}>{cells('td', row)}</tr>" for i, row in enumerate(rows))
    return f"<table><thead><tr>{cells('th', names)}</tr></thead><tbody>{body}</tbody></table>"
