"""`inspect(split, profile)`: what would run, how fast it should be, and what it is compared with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ..blocks import Split
from ..costs import Profile
from ..errors import PlanError
from ..planner import NAMED, Plan, plan
from ..planner.predict import predict
from ..program import Program, Trace, build, simulate
from ..tables import quantity, table
from .chrome import chrome_trace
from .gantt import gantt
from .page import page

_STEPS = 16


@dataclass(frozen=True)
class Strategy:
    """What a strategy should cost: seconds of a step, rows per second, and bytes of the rank that holds the most."""

    name: str
    step: float
    throughput: float
    memory: float


@dataclass(frozen=True)
class Report:
    """A pair of models, planned.

    Attributes:
        split, profile, plan, program: what it is made from; `timeline`: the simulated first steps.
        strategies: the chosen plan and the paper's strategies, each by the same function.
        run: what really ran, if something has.
    """

    split: Split
    profile: Profile
    plan: Plan
    program: Program
    timeline: Trace
    strategies: tuple[Strategy, ...]
    run: Trace | None = None

    def to_json(self) -> str:
        """Plain values for machines."""
        prediction = self.plan.prediction
        values: dict[str, Any] = {
            "split": self.split.to_dict(),
            "profile": json.loads(self.profile.to_json()),
            "plan": json.loads(self.plan.to_json()),
            "predicted": None if prediction is None else asdict(prediction),
            "bound": self.plan.bound,
            "simulated": self.timeline.seconds_per_step,
            "strategies": [asdict(s) for s in self.strategies],
            "measured": None if self.run is None else self.run.seconds_per_step,
        }
        return json.dumps(values, indent=2)

    def chrome_trace(self) -> str:
        """For chrome://tracing and Perfetto."""
        return chrome_trace({"plan": self.timeline} if self.run is None else {"plan": self.timeline, "run": self.run})

    def html(self) -> str:
        """One self-contained page."""
        names = [type(c.model).__name__ for c in (self.split.teacher, self.split.student)]
        return page(
            f"{names[0]} to {names[1]}",
            self._lead(),
            {
                "Strategies": (_STRATEGY_COLUMNS, self._strategy_rows(), 0),
                "Plan": (_PLAN_COLUMNS, self._plan_rows(), None),
                "Blocks": (*self._blocks(), None),
            },
            self._drawn(),
            {f"Program of rank {r}": self.program.code(r) for r, own in enumerate(self.program.ranks) if own},
        )

    def __str__(self) -> str:
        return "\n\n".join(
            [
                str(self.profile),
                str(self.plan),
                *(f"{name}\n{gantt(trace)}" for name, trace in self._drawn().items()),
                "\n".join([*self._lead(), table(_STRATEGY_COLUMNS, self._strategy_rows())]),
            ]
        )

    def _lead(self) -> list[str]:
        own, profile = self.strategies[0], self.profile
        run = self.run if self.run is not None and self.run.finished else None  # a training that was done took no step
        took = [] if run is None else [f"It took {quantity(run.seconds_per_step, 's')}."]
        gap = f", {own.step / self.plan.bound - 1:.1%} above a bound for any plan" if self.plan.bound else ""
        return [
            f"{len(self.split)} blocks on {len(profile.devices)} devices ({', '.join(k.name for k in profile.kinds)}), "
            f"batch {profile.batch_size}, {profile.source} costs.",
            f"Predicted: {quantity(own.step, 's')} a step ({own.throughput:.4g} rows/s){gap}; "
            f"simulated: {quantity(self.timeline.seconds_per_step, 's')}.",
            *took,
        ]

    def _drawn(self) -> dict[str, Trace]:
        """Schedules by heading."""
        if self.run is None:
            return {"Schedule: two steps, pipeline full": self.timeline}
        return {"As planned: two steps, pipeline full": self.timeline, "As it ran": self.run}

    def _strategy_rows(self) -> list[list[object]]:
        dp = next((s.step for s in self.strategies if s.name == "dp"), None)
        return [
            [
                s.name,
                quantity(s.step, "s"),
                f"{s.throughput:.4g}",
                f"{dp / s.step:.2f}" if dp else "-",
                quantity(s.memory, "B"),
            ]
            for s in self.strategies
        ]

    def _plan_rows(self) -> list[list[object]]:
        prediction = self.plan.prediction or predict(self.plan, self.profile)
        return [
            [
                rank,
                device,
                self.plan.blocks_of(rank).removeprefix("blocks ") or "-",
                ", ".join(str(a.rows[a.ranks.index(rank)]) for a in self.plan.assignments if rank in a.ranks) or "-",
                quantity(prediction.busy[rank], "s"),
                quantity(prediction.memory[rank], "B"),
            ]
            for rank, device in enumerate(self.plan.devices)
        ]

    def _blocks(self) -> tuple[list[str], list[list[object]]]:
        batch, rows = self.profile.batch_size, []
        for i, (pair, costs) in enumerate(zip(self.split.pairs, self.profile.blocks, strict=True)):
            times = [quantity(c.at(batch), "s") for side in (costs.teacher, costs.student) for c in side]
            modules = [" .. ".join(dict.fromkeys(side.modules)) for side in (pair.teacher, pair.student)]
            rows.append([i, *modules, *times, quantity(costs.boundary * batch, "B")])
        several = len(self.profile.kinds) > 1
        heads = [
            f"{who} time" + (f" ({k.name})" if several else "")
            for who in ("teacher", "student")
            for k in self.profile.kinds
        ]
        return ["block", "teacher", "student", *heads, "boundary"], rows


_STRATEGY_COLUMNS = ("strategy", "a step", "rows/s", "over dp", "memory of a rank")
_PLAN_COLUMNS = ("rank", "device", "blocks", "rows", "busy in a step", "memory")


def inspect(
    split: Split,
    profile: Profile,
    strategy: str | Plan = "auto",
    memory: float | None = None,
    own_input: bool = False,
    run: Trace | None = None,
) -> Report:
    """Plan, simulate, and compare with the paper's strategies, before anything runs.

    Arguments: as for `plan`; `own_input`: as for `build`; `run`: what really ran, to be shown beside the plan.

    Errors: as for `plan`.
    """
    chosen = plan(profile, strategy, memory)
    program = build(chosen, split, own_input)
    found = [_scored(chosen.strategy, chosen, profile)]
    for name in NAMED:
        try:
            other = plan(profile, name, memory)
        except PlanError:  # it does not fit
            continue
        if name != chosen.strategy:
            found.append(_scored(name, other, profile))
    return Report(split, profile, chosen, program, simulate(program, profile, _STEPS), tuple(found), run)


def _scored(name: str, of: Plan, profile: Profile) -> Strategy:
    prediction = predict(of, profile)
    return Strategy(name, prediction.step, profile.batch_size / prediction.step, max(prediction.memory))
