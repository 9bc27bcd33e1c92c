"""`bench(teacher, student, ...)`: every strategy for real, side by side with what was predicted."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from torch import nn
from tqdm import tqdm

from .api import distill
from .blocks import split
from .cluster import Cluster
from .costs import Profile, profile
from .errors import PlanError
from .graph import Arguments
from .planner import NAMED, Plan, plan, predict
from .ranks import open as open_ranks
from .recipe import Recipe
from .tables import quantity, table

_WARM = 3  # steps until the pipeline is full


@dataclass(frozen=True)
class Bench:
    """What every strategy took.

    Attributes:
        profile: measured before the first round; `plans`: by strategy, made from it.
        predicted, measured: seconds of a step, by strategy, the medians of all rounds; each round measures the blocks,
            predicts, and then runs, so that both see the machine at the same speed.
        rounds: all measured seconds.
        memory: the most bytes that each rank has held, by strategy.
    """

    profile: Profile
    plans: Mapping[str, Plan]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    rounds: Mapping[str, tuple[float, ...]]
    memory: Mapping[str, tuple[float, ...]]

    def __str__(self) -> str:
        ranks, batch = len(self.profile.devices), self.profile.batch_size
        work = sum(b.teacher[0].at(batch) + b.student[0].at(batch) + b.update[0] for b in self.profile.blocks) / ranks
        rows = [
            [
                name,
                quantity(self.predicted[name], "s"),
                quantity(seconds, "s"),
                f"{seconds / self.predicted[name] - 1:+.1%}",
                f"{self.measured['dp'] / seconds:.2f}" if "dp" in self.measured else "-",
                f"{work / seconds:.2f}",
                _bytes(p.memory) if (p := self.plans[name].prediction) is not None else "-",
                _bytes(self.memory[name]),
            ]
            for name, seconds in self.measured.items()
        ]
        heads = ["strategy", "predicted", "measured", "off by", "over dp", "efficiency", "memory predicted", "measured"]
        return f"{self.profile}\n\n{table(heads, rows)}"


def bench(
    teacher: nn.Module,
    student: nn.Module,
    example: Any,
    *,
    devices: str | int | Sequence[str] = "auto",
    strategies: Sequence[str] = NAMED,
    rounds: int = 3,
    steps: int = 16,
    recipe: Recipe | None = None,
    threads: int | None = None,
    budget: float = 20.0,
    progress: bool = True,
    **options: Any,
) -> Bench:
    """In rounds: measure the blocks, predict, then train copies of `student` with every strategy in turn.

    Arguments:
        example: one batch of inputs; every step trains on it.
        strategies: which; those that do not fit are left out.
        rounds: see `Bench`; `steps`: of each run, of which the first few are not counted.
        devices, recipe, threads: as for `distill`, but blocks are given the teacher's boundary from first to last;
            `options`: as for `split`.
        budget: as for `profile`, in every round.

    Errors: as for `distill`.
    """
    recipe = replace(recipe or Recipe(), block_input="teacher")
    found = split(teacher, student, example, logits=recipe.logits, **options)
    batch, home = found.student.example.rows, next(student.parameters()).device
    seconds: dict[str, list[float]] = defaultdict(list)
    memory: dict[str, list[Mapping[int, float]]] = defaultdict(list)
    predicted: dict[str, list[float]] = defaultdict(list)
    costs: list[Profile] = []
    plans: dict[str, Plan] = {}
    data = [Arguments.of(example, teacher)] * steps
    bar = tqdm(total=rounds * (1 + len(strategies)), desc="bench", disable=not progress, dynamic_ncols=True)
    with bar, open_ranks(Cluster.of(devices, home), threads=threads) as group:
        for number in range(rounds):
            costs.append(profile(found, group, batch, recipe, budget=budget, cached=False, progress=False))
            plans = plans or _plans(strategies, costs[0])
            bar.update(1 + len(strategies) - len(plans))
            for name, p in plans.items():
                predicted[name].append(predict(p, costs[number]).step)
            for name, p in plans.items():
                result = distill(
                    teacher,
                    copy.deepcopy(student),
                    data,
                    devices=group,
                    strategy=p,
                    recipe=recipe,
                    profile=costs[number],
                    progress=False,
                    **options,
                )
                ends = list(result.trace.finished.values())[_WARM:]
                seconds[name].append((ends[-1] - ends[0]) / (len(ends) - 1))
                memory[name].append(result.trace.memory)
                bar.update()
    ranks = range(len(costs[0].devices))
    return Bench(
        costs[0],
        plans,
        {name: median(found) for name, found in predicted.items()},
        {name: median(found) for name, found in seconds.items()},
        {name: tuple(found) for name, found in seconds.items()},
        {name: tuple(max(m.get(r, 0.0) for m in found) for r in ranks) for name, found in memory.items()},
    )


def _plans(strategies: Sequence[str], costs: Profile) -> dict[str, Plan]:
    """Those that fit."""
    found = {}
    for name in strategies:
        with suppress(PlanError):
            found[name] = plan(costs, name)
    return found


def _bytes(ranks: Sequence[float]) -> str:
    return ", ".join(quantity(b, "B") for b in ranks)
