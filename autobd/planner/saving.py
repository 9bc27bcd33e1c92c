"""Plans for devices that do not hold all activations: computed again, or of a part of the share at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..costs import BlockCosts, Curve, Profile
from .plan import Plan
from .predict import rank_bytes

Way = tuple[int, bool]  # microbatches, and whether activations are computed again


def ways(profile: Profile, microbatches: int) -> Iterator[Way]:
    """The plain way, then those that hold less and less for more and more time; up to so many `microbatches`."""
    yield 1, False
    again = any(b.recomputed is not None for b in profile.blocks)
    if again:  # it changes no result, unlike parts of a share, whose batch norms see fewer rows
        yield 1, True
    parts = 2
    while parts <= min(microbatches, profile.batch_size):
        yield parts, again
        parts *= 2


def as_plain(profile: Profile, way: Way) -> Profile:
    """The profile of blocks that are always trained in this way."""
    if way == (1, False):
        return profile
    batch = profile.batch_size
    shares = {-(-batch // k) for k in range(1, min(batch, len(profile.devices)) + 1)}

    def block(costs: BlockCosts) -> BlockCosts:
        def student(kind: int) -> Curve:
            return _curve({*shares, *costs.student[kind].rows}, lambda rows: costs.student_seconds(kind, rows, *way))

        saved = _curve({*shares, *costs.saved.rows}, lambda rows: costs.needs(rows, *way))
        return replace(costs, student=tuple(map(student, range(len(costs.student)))), saved=saved)

    return replace(profile, blocks=tuple(map(block, profile.blocks)))


def only_where_needed(plan: Plan, profile: Profile, way: Way, limits: Sequence[float]) -> Plan:
    """`plan` in this way, but for the assignments that fit without it."""
    found = replace(
        plan,
        assignments=tuple(replace(a, microbatches=min(way[0], *a.rows), recompute=way[1]) for a in plan.assignments),
    )
    if way == (1, False) or not fits(found, profile, limits):
        return found
    for number, a in enumerate(found.assignments):
        for simpler in ((1, False), (1, way[1])):
            own = replace(a, microbatches=simpler[0], recompute=simpler[1])
            tried = replace(found, assignments=(*found.assignments[:number], own, *found.assignments[number + 1 :]))
            if fits(tried, profile, limits):
                found = tried
                break
    return found


def fits(plan: Plan, profile: Profile, limits: Sequence[float]) -> bool:
    """Whether every rank's bytes are within its limit."""
    return all(
        math.isfinite(held) and held <= most for held, most in zip(rank_bytes(plan, profile), limits, strict=True)
    )


def _curve(rows: set[int], value: Callable[[int], float]) -> Curve:
    known = tuple(sorted(rows))
    return Curve(known, tuple(map(value, known)))
