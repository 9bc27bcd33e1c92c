"""`plan(profile, strategy)`: the schedules of the Pipe-BD paper as plans, and the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from ..costs import Profile
from ..errors import InputError, PlanError, nearest
from ..tables import quantity
from .plan import Assignment, Plan
from .predict import predict, stage_bytes
from .saving import Way, as_plain, economical, options
from .stages import Stages
from .unequal import UnequalStages, filled

NAMED = ("dp", "ls", "tr", "tr+dpu", "ir", "ahd")
STRATEGIES = ("auto", *NAMED)
_BY_PREFERENCE = ("tr+dpu", "ahd", "ir", "ls", "dp")  # where "auto" finds two equally fast

Unit = tuple[int, ...]  # consecutive blocks that stay together
Maker = Callable[[Profile, Sequence[float], Sequence[Way]], Plan | None]


def plan(profile: Profile, strategy: str | Plan = "auto", memory: float | None = None, microbatches: int = 8) -> Plan:
    """The plan for the devices of `profile`.

    Arguments:
        strategy: "dp" (each block in turn, on all ranks, the teacher's prefix repeated), "ls" (blocks packed on ranks,
            prefix repeated), "tr" and "tr+dpu" (stages of consecutive blocks, teacher relaying; without or with
            decoupled parameter update), "ir" (all blocks on every rank, the batch split), "ahd" (stages with
            replicas: Pipe-BD, sec. IV), "auto" (the fastest of these by `predict`, that fits), or a plan of one's own.
        memory: bytes that each rank may hold; default: what the profile says of its devices. Where nothing fits,
            activations are computed again in the backward; where that is not enough, ranks take their shares in parts.
        microbatches: how many parts at most. Batch norms then see the rows of a part.

    Returns: the plan, with what it should cost (`Plan.prediction`), a bound below which no plan can be, and the other
    strategies' predictions.

    Errors: InputError for an unknown strategy or a plan for other devices, PlanError for an impossible plan, or where
    nothing fits into memory.
    """
    if isinstance(strategy, Plan):
        if strategy.devices != profile.devices:
            raise InputError(
                "The plan is for other devices.", given=strategy.devices, expected=f"{profile.devices} (see devices=)"
            )
        strategy.check(len(profile.blocks))
        return _described(strategy, profile, {})
    if strategy not in STRATEGIES:
        raise InputError(
            "No such strategy.",
            given=repr(strategy),
            expected=f"one of {', '.join(STRATEGIES)}, or a Plan",
            do=f"perhaps you meant {nearest(str(strategy), STRATEGIES, 1)}",
        )
    limits = [memory if memory is not None else profile.kind(r).memory for r in range(len(profile.devices))]
    names = _BY_PREFERENCE if strategy == "auto" else (strategy,)
    for ways in options(profile, limits, microbatches):
        fitting = {name: p for name in names if (p := _MAKE[name](profile, limits, ways)) is not None}
        if fitting:
            others = {name: predict(p, profile).step for name, p in fitting.items()}
            best = min(fitting, key=lambda name: others[name])
            return _described(fitting[best], profile, others)
    raise _too_large(profile, limits, microbatches)


def _described(found: Plan, profile: Profile, others: dict[str, float]) -> Plan:
    bound = min_seconds(profile)
    rest = tuple(sorted(((n, s) for n, s in others.items() if n != found.strategy), key=lambda pair: pair[1]))
    return replace(found, prediction=predict(found, profile), bound=bound, others=rest)


def min_seconds(profile: Profile) -> float:
    """Seconds of a step below which no plan can be."""
    kinds = set(profile.kind_of)
    return Stages([profile], math.inf).bound() if len(kinds) == 1 else UnequalStages(profile, [math.inf]).bound()


def even(rows: int, ranks: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """As many of `ranks` as there are rows, and their shares, which differ by at most one row."""
    used = tuple(ranks[: min(len(ranks), rows)])
    return used, tuple(rows // len(used) + (i < rows % len(used)) for i in range(len(used)))


def _made(
    strategy: str, assignments: Sequence[Assignment], profile: Profile, limits: Sequence[float], ways: Sequence[Way]
) -> Plan | None:
    """The plan of these; None if it does not fit into memory."""
    made = Plan(strategy, profile.batch_size, profile.devices, tuple(assignments))
    made.check(len(profile.blocks))
    return economical(made, profile, ways, limits)


def _dp(profile: Profile, limits: Sequence[float], ways: Sequence[Way]) -> Plan | None:
    shares = even(profile.batch_size, range(len(profile.devices)))
    return _made("dp", [Assignment(u, *shares, "prefix") for u in profile.units], profile, limits, ways)


def _ir(profile: Profile, limits: Sequence[float], ways: Sequence[Way]) -> Plan | None:
    shares = even(profile.batch_size, range(len(profile.devices)))
    blocks = tuple(range(len(profile.blocks)))
    return _made("ir", [Assignment(blocks, *shares, "store")], profile, limits, ways)


def _ls(profile: Profile, limits: Sequence[float], ways: Sequence[Way]) -> Plan | None:
    """Longest task first, each to the rank that is done with it first; a task includes the teacher's prefix."""
    rows, costs, units, ranks = profile.batch_size, profile.blocks, profile.units, range(len(profile.devices))
    alone: list[dict[Unit, float]] = []  # by kind
    for kind in range(len(profile.kinds)):
        prefix = list(accumulate(b.teacher[kind].at(rows) for b in costs))
        own = [b.student[kind].at(rows) + b.update[kind] for b in costs]
        alone.append({u: prefix[u[-1]] + sum(own[b] for b in u) for u in units})

    def work(unit: Unit, rank: int) -> float:
        return alone[profile.kind_of[rank]][unit]

    loads = [0.0 for _ in ranks]
    owner: dict[Unit, int] = {}
    for unit in sorted(units, key=lambda u: (-max(work(u, r) for r in ranks), u)):
        owner[unit] = min(ranks, key=lambda r: (loads[r] + work(unit, r), r))
        loads[owner[unit]] += work(unit, owner[unit])
    return _made("ls", [Assignment(u, (owner[u],), (rows,), "prefix") for u in units], profile, limits, ways)


def _stages(strategy: str, replicas: bool) -> Maker:
    def make(profile: Profile, limits: Sequence[float], ways: Sequence[Way]) -> Plan | None:
        costs = [as_plain(profile, way) for way in ways]
        if len(set(profile.kind_of)) == 1 and len(set(limits)) == 1:
            found = _on_equal(costs, limits[0], replicas)
            return None if found is None else _made(strategy, found, profile, limits, ways)
        plans = []
        for number, of_way in enumerate(costs, start=1):
            found = _on_unequal(of_way, limits, replicas)
            made = None if found is None else _made(strategy, found, profile, limits, ways[:number])
            if made is not None:
                plans.append(made)
        return min(plans, key=lambda p: predict(p, profile).step, default=None)

    return make


def _on_equal(costs: Sequence[Profile], memory: float, replicas: bool) -> list[Assignment] | None:
    chain, first, assignments = Stages(costs, memory, replicas).best(), 0, []
    if chain is None:
        return None
    for (start, stop), count in chain:
        shares = even(costs[0].batch_size, range(first, first + count))
        assignments.append(Assignment(_blocks(costs[0].units[start:stop]), *shares, "relay"))
        first += count
    return assignments


def _on_unequal(costs: Profile, limits: Sequence[float], replicas: bool) -> list[Assignment] | None:
    groups = UnequalStages(costs, limits, replicas).best()
    if groups is None:
        return None
    stages = [(_blocks(costs.units[start:stop]), group) for (start, stop), group in groups]
    return [Assignment(blocks, *filled(costs, blocks, group, limits), "relay") for blocks, group in stages]


def _blocks(units: Sequence[Unit]) -> Unit:
    return tuple(b for unit in units for b in unit)


_MAKE: dict[str, Maker] = {
    "dp": _dp,
    "ls": _ls,
    "ir": _ir,
    "tr": _stages("tr", replicas=False),
    "tr+dpu": _stages("tr+dpu", replicas=False),
    "ahd": _stages("ahd", replicas=True),
}


def _too_large(profile: Profile, limits: Sequence[float], microbatches: int) -> PlanError:
    """What is missing for the unit that needs the most, alone on as many devices as there are rows and devices."""
    rows = -(-profile.batch_size // min(len(profile.devices), profile.batch_size))
    parts = min(rows, microbatches)
    needs = {
        unit: stage_bytes(profile, unit, unit, rows, (unit[0] > 0, unit[-1] + 1 < len(profile.blocks)), parts, True)
        for unit in profile.units
    }
    unit = max(needs, key=lambda u: needs[u])
    missing = needs[unit] - max(limits)
    what = f"Block {unit[0]} does" if len(unit) == 1 else f"Blocks {unit[0]} to {unit[-1]} do"
    if missing <= 0:
        return PlanError(
            "The plan does not fit into the devices' memory, though each block alone would.",
            given=f"{len(profile.blocks)} blocks, {len(limits)} devices of {quantity(max(limits), 'B')}",
            expected="room for all of them at once",
            do="use another strategy, more devices or a smaller batch",
        )
    return PlanError(
        f"{what} not fit into any device, even with the batch split over all: {quantity(missing, 'B')} too much.",
        given=f"{quantity(needs[unit], 'B')} at {rows} rows" + (f" in {parts} microbatches" if parts > 1 else ""),
        expected=f"at most {quantity(max(limits), 'B')}",
        do="use a smaller batch, or split the models into more blocks",
    )
