"""`plot(history)`: the relative loss of every block over the steps, and what the models were worth."""

from __future__ import annotations

from typing import Any

from ..errors import InputError
from ..training import History


def plot(history: History) -> Any:
    """A matplotlib Figure. Errors: InputError without matplotlib, or before the first step."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("matplotlib is not installed.", do="pip install 'autobd[plot]'") from None
    if not history.steps:
        raise InputError("There is nothing to plot.", given="a history without steps")
    metrics = list(dict.fromkeys(name for s in history.scores for name in s.values))
    figure = Figure(figsize=(5 * (1 + len(metrics)), 4), layout="constrained")
    axes = figure.subplots(1, 1 + len(metrics), squeeze=False)[0]
    losses = axes[0]
    for column, label in enumerate(history.labels):
        losses.plot([r[column] for r in history.relative], label=f"block {label}", linewidth=1)
    losses.set(title="relative loss", xlabel="step", yscale="log")
    losses.legend(fontsize="small")
    for axis, name in zip(axes[1:], metrics, strict=True):
        newest = {s.what: s.values[name] for s in history.scores if name in s.values}
        bars = axis.bar(list(newest), list(newest.values()))
        axis.bar_label(bars, fmt="%.3g")
        axis.set(title=name)
    return figure
