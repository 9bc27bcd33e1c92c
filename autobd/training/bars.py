"""What the user sees while training runs: one bar for the steps, one line for each stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from ..planner import Plan
from .history import History


class Bars:
    """Arguments: `shown`: whether there are any; `total`: steps, where known; `what`: the first word."""

    def __init__(self, shown: bool, total: int | None, what: str, plan: Plan) -> None:
        self.total, self._shown = total, shown
        self._steps = self._bar(desc=what, total=total, unit="step", position=0)
        self._stages: list[Any] = []
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Show the stages of another plan."""
        for bar in self._stages:
            bar.close()
        self._plan = plan
        self._stages = []
        if len({a.ranks for a in plan.assignments}) > 1:
            self._stages = [
                self._bar(position=1 + i, bar_format="{desc}", leave=False) for i in range(len(plan.assignments))
            ]

    def show(self, history: History) -> None:
        """The steps that are done, and the newest relative losses."""
        if not self._shown:
            return
        if history.steps:
            newest = history.relative[-1]
            for bar, a in zip(self._stages, self._plan.assignments, strict=False):
                losses = "  ".join(f"{b}: {newest[b]:.3f}" for b in a.blocks)
                ranks = ", ".join(map(str, a.ranks))
                bar.set_description_str(f"  rank {ranks}  relative loss of block {losses}", refresh=False)
            if not self._stages:
                own = newest[: len(newest) - len(history.candidates)]
                losses = " ".join(f"{value:.3f}" for value in own)
                self._steps.set_postfix_str(f"relative loss {losses}", refresh=False)
        if self._steps.update(history.steps - self._steps.n):  # it was drawn
            for bar in self._stages:
                bar.refresh()

    def close(self) -> None:
        for bar in (*reversed(self._stages), self._steps):
            bar.close()

    def _bar(self, **options: Any) -> Any:
        return tqdm(disable=not self._shown, dynamic_ncols=True, **options)


@contextmanager
def bars(shown: bool, total: int | None, what: str, plan: Plan) -> Iterator[Bars]:
    """Bars that are closed at the end."""
    made = Bars(shown, total, what, plan)
    try:
        yield made
    finally:
        made.close()
