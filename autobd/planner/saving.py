"""Plans for devices that do not hold all activations: computed again, or of a part of the share at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..costs import BlockCosts, Curve, Profile
from .plan import Assignment, Plan
from .predict import RECEIVING, SENDING, rank_bytes, stage_bytes

Way = tuple[int, bool]  # microbatches, and whether activations are computed again
PLAIN: Way = (1, False)


def options(profile: Profile, limits: Sequence[float], microbatches: int) -> Iterator[tuple[Way, ...]]:
    """Sets of ways to train an assignment, of which each takes the first that fits.

    The first set changes no result: plain, or with activations computed again where devices do not hold everything.
    Batch norms see the rows of a part alone, so parts of a share, up to so many `microbatches`, come in only as needed.
    """
    blocks = range(len(profile.blocks))
    everything = stage_bytes(profile, blocks, blocks, profile.batch_size, (False, False))
    everything += (RECEIVING + SENDING) * profile.batch_size * max(b.boundary for b in profile.blocks)
    if everything <= min(limits):
        yield (PLAIN,)
        return
    again = any(b.recomputed is not None for b in profile.blocks)
    found: list[Way] = [PLAIN, (1, True)] if again else [PLAIN]
    yield tuple(found)
    parts = 2
    while parts <= min(microbatches, profile.batch_size):
        found.append((parts, again))
        yield tuple(found)
        parts *= 2


def as_plain(profile: Profile, way: Way) -> Profile:
    """The profile of blocks that are always trained in this way."""
    if way == PLAIN:
        return profile
    batch = profile.batch_size
    shares = {-(-batch // k) for k in range(1, min(batch, len(profile.devices)) + 1)}

    def block(costs: BlockCosts) -> BlockCosts:
        def student(kind: int) -> Curve:
            return _curve({*shares, *costs.student[kind].rows}, lambda rows: costs.student_seconds(kind, rows, *way))

        saved = _curve({*shares, *costs.saved.rows}, lambda rows: costs.needs(rows, *way))
        return replace(costs, student=tuple(map(student, range(len(costs.student)))), saved=saved)

    return replace(profile, blocks=tuple(map(block, profile.blocks)))


def economical(plan: Plan, profile: Profile, ways: Sequence[Way], limits: Sequence[float]) -> Plan | None:
    """`plan` with each assignment in the first way that fits; None if it does not fit in the last one."""

    def trained(a: Assignment, way: Way) -> Assignment:
        return replace(a, microbatches=min(way[0], *a.rows), recompute=way[1])

    found = replace(plan, assignments=tuple(trained(a, ways[-1]) for a in plan.assignments))
    if not fits(found, profile, limits):
        return None
    for number, a in enumerate(found.assignments):
        for way in ways[:-1]:
            others = found.assignments[:number], found.assignments[number + 1 :]
            simpler = replace(found, assignments=(*others[0], trained(a, way), *others[1]))
            if fits(simpler, profile, limits):
                found = simpler
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
