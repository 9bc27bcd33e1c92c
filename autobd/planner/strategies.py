"""The schedules of the Pipe-BD paper as plans, and the default one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from ..blocks import Split
from ..cluster import Cluster
from ..errors import InputError, nearest
from .plan import Assignment, Plan

STRATEGIES = ("auto", "dp", "ls", "tr", "tr+dpu", "ir", "ahd")
_STUDENT_PASSES = 3  # forward, and a backward of twice its cost
_REPLICAS = 1.1  # what a replicated stage costs beyond its share: smaller shares, all-reduce; until it is measured

Unit = tuple[int, ...]  # consecutive blocks that stay together


def plan(split: Split, cluster: Cluster, strategy: str | Plan = "auto") -> Plan:
    """The plan for `split` on `cluster`, by the blocks' FLOPs.

    Arguments:
        strategy: "dp" (each block in turn, on all ranks, the teacher's prefix repeated), "ls" (blocks packed on ranks,
            prefix repeated), "tr" and "tr+dpu" (stages of consecutive blocks, teacher relaying; without or with
            decoupled parameter update), "ir" (all blocks on every rank, the batch split), "ahd" (stages with
            replicas: Pipe-BD, sec. IV), "auto" (the same), or a plan of one's own.

    Errors: InputError for an unknown strategy or a plan for other devices, PlanError for an impossible plan.
    """
    if isinstance(strategy, Plan):
        if strategy.devices != cluster.devices:
            raise InputError(
                "The plan is for other devices.", given=strategy.devices, expected=f"{cluster.devices} (see devices=)"
            )
        strategy.check(len(split))
        return strategy
    if strategy not in STRATEGIES:
        raise InputError(
            "No such strategy.",
            given=repr(strategy),
            expected=f"one of {', '.join(STRATEGIES)}, or a Plan",
            do=f"perhaps you meant {nearest(str(strategy), STRATEGIES, 1)}",
        )
    rows, ranks, units = split.student.example.rows, len(cluster.devices), _units(split)
    teacher = [p.teacher.flops for p in split.pairs]
    costs = [t + _STUDENT_PASSES * p.student.flops + 1 for t, p in zip(teacher, split.pairs, strict=True)]
    name = "ahd" if strategy == "auto" else strategy
    chosen = Plan(
        "tr+dpu" if name == "ahd" and ranks == 1 else name,
        rows,
        cluster.devices,
        {
            "dp": lambda: _dp(units, ranks, rows),
            "ls": lambda: _ls(units, ranks, rows, costs, teacher),
            "tr": lambda: _stages(units, min(ranks, len(units)), rows, costs, replicas=False),
            "tr+dpu": lambda: _stages(units, min(ranks, len(units)), rows, costs, replicas=False),
            "ir": lambda: _ir(units, ranks, rows),
            "ahd": lambda: _stages(units, ranks, rows, costs, replicas=True),
        }[name](),
    )
    chosen.check(len(split))
    return chosen


def even(rows: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As many of `ranks` as there are rows, and their shares, which differ by at most one row."""
    used = tuple(ranks[: min(len(ranks), rows)])
    return used, tuple(rows // len(used) + (i < rows % len(used)) for i in range(len(used)))


def _units(split: Split) -> list[Unit]:
    """Blocks that a plan may part: all, but those that train a weight together."""
    together = [(min(t.blocks), max(t.blocks)) for t in split.ties if t.together]
    starts = [b for b in range(len(split)) if not any(first < b <= last for first, last in together)]
    return [tuple(range(a, b)) for a, b in zip(starts, [*starts[1:], len(split)], strict=True)]


def _dp(units: list[Unit], ranks: int, rows: int) -> tuple[Assignment, ...]:
    return tuple(Assignment(unit, *even(rows, range(ranks)), "prefix") for unit in units)


def _ir(units: list[Unit], ranks: int, rows: int) -> tuple[Assignment, ...]:
    return (Assignment(tuple(b for unit in units for b in unit), *even(rows, range(ranks)), "store"),)


def _ls(
    units: list[Unit], ranks: int, rows: int, costs: Sequence[float], teacher: Sequence[float]
) -> tuple[Assignment, ...]:
    """Longest task first, each to the rank with the least work; a task includes the teacher's prefix."""
    prefix = [0.0, *accumulate(teacher)]
    work = {unit: sum(costs[b] for b in unit) + prefix[unit[0]] for unit in units}
    loads = [0.0] * ranks
    owner: dict[Unit, int] = {}
    for unit in sorted(units, key=lambda u: (-work[u], u)):
        owner[unit] = min(range(ranks), key=lambda r: (loads[r], r))
        loads[owner[unit]] += work[unit]
    return tuple(Assignment(unit, (owner[unit],), (rows,), "prefix") for unit in units)


def _stages(units: list[Unit], ranks: int, rows: int, costs: Sequence[float], replicas: bool) -> tuple[Assignment, ...]:
    """Consecutive units as stages on consecutive ranks, so that the slowest stage is as fast as can be: exact, by
    dynamic programming over (units done, ranks used)."""
    ends = [0.0, *accumulate(sum(costs[b] for b in unit) for unit in units)]
    most = (lambda n: range(1, min(n, rows) + 1)) if replicas else (lambda n: range(1, 2))
    chain = _best_chain(ends, ranks, rows, most)
    first = 0
    stages = []
    for (start, stop), count in chain:
        own = tuple(range(first, first + count))
        blocks = tuple(b for unit in units[start:stop] for b in unit)
        stages.append(Assignment(blocks, *even(rows, own), "relay"))
        first += count
    return tuple(stages)


def _best_chain(
    ends: list[float], ranks: int, rows: int, most: Callable[[int], range]
) -> list[tuple[tuple[int, int], int]]:
    """Stages as ((first unit, one past the last), ranks), least in (slowest stage, stages, ranks).

    In two passes: the least slowest stage first, then the fewest stages that are no slower; in one pass a part that is
    faster than it need be would win over one with fewer stages.
    """
    slowest, _ = _chain(ends, ranks, rows, most, None)
    return _chain(ends, ranks, rows, most, slowest[0])[1]


def _chain(
    ends: list[float], ranks: int, rows: int, most: Callable[[int], range], limit: float | None
) -> tuple[tuple[float, ...], list[tuple[tuple[int, int], int]]]:
    """The least slowest stage, or with a `limit` on it the fewest stages and ranks; and the stages."""
    best: dict[tuple[int, int], tuple[float, ...]] = {(0, 0): (0.0,) if limit is None else (0.0, 0.0)}
    origin: dict[tuple[int, int], tuple[int, int]] = {}
    for j in range(1, len(ends)):
        for n in range(1, ranks + 1):
            for i in range(j):
                for k in most(n):
                    if (i, n - k) not in best:
                        continue
                    before = best[i, n - k]
                    cost = (ends[j] - ends[i]) * (-(-rows // k) / rows * (_REPLICAS if k > 1 else 1))
                    if limit is not None and cost > limit:
                        continue
                    value = (max(before[0], cost),) if limit is None else (before[0] + 1, before[1] + k)
                    if (j, n) not in best or value < best[j, n]:
                        best[j, n], origin[j, n] = value, (i, k)
    j = len(ends) - 1
    n = min((n for n in range(1, ranks + 1) if (j, n) in best), key=lambda n: best[j, n])
    least = best[j, n]
    chain: list[tuple[tuple[int, int], int]] = []
    while j:
        i, k = origin[j, n]
        chain.insert(0, ((i, j), k))
        j, n = i, n - k
    return least, chain
