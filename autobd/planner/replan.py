"""Plan again from what a run has measured, where the profile was wrong or a device has become slower.

Shares follow measured speed, as in BPT-CNN's incremental allocation (1810.07742, sec. 4.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from ..costs import BlockCosts, Kind, Profile
from ..tables import quantity
from .plan import Plan
from .predict import predict
from .strategies import plan as make

_DEVIATES = 0.15  # of a rank's seconds from what the profile says
_GAINS = 0.05  # of a step, for a move to be worth it
_ALIKE = 0.1  # speeds that are taken for the same


@dataclass(frozen=True)
class Replanned:
    """A better plan: `profile`: what it was made by; `text`: why, for the user."""

    plan: Plan
    profile: Profile
    text: str


def replan(
    current: Plan, profile: Profile, seconds: Mapping[tuple[int, int], float], strategy: str = "auto"
) -> Replanned | None:
    """A plan that is faster by what was measured; None if the profile was right, or the plan the best all the same.

    A deviation is the rank's where the blocks were measured before, or where another replica does not have it; else the
    block's.

    Arguments:
        seconds: that ranks work on blocks in a step, teacher and student, by (rank, block).
        strategy: as for `plan`.
    """
    expected = compute_seconds(current, profile)
    known = [key for key, value in expected.items() if value > 0 and key in seconds]
    ranks = sorted({rank for rank, _ in known})
    own = {r: [key for key in known if key[0] == r] for r in ranks}
    sums = {r: (sum(seconds[k] for k in own[r]), sum(expected[k] for k in own[r])) for r in ranks}
    off = {r: measured / said - 1 for r, (measured, said) in sums.items()}
    if not off or max(map(abs, off.values())) <= _DEVIATES:
        return None
    factors = {
        block: 1.0 if profile.source == "measured" else median(seconds[k] / expected[k] for k in known if k[1] == block)
        for block in {b for _, b in known}
    }
    slowness = {r: sums[r][0] / sum(factors[b] * expected[r, b] for _, b in own[r]) for r in ranks}
    found = _retimed(profile, factors, slowness)
    new = make(found, strategy)
    before, after = predict(current, found).step, predict(new, found).step
    if new.assignments == current.assignments or after > before * (1 - _GAINS):
        return None
    rank = max(off, key=lambda r: abs(off[r]))
    text = (
        f"rank {rank} worked {quantity(sums[rank][0], 's')} a step where {quantity(sums[rank][1], 's')} were expected: "
        f"moved from {_stages(current)} to {_stages(new)}, {quantity(after, 's')} a step instead of "
        f"{quantity(before, 's')} by the measured times"
    )
    return Replanned(new, found, text)


def compute_seconds(plan: Plan, profile: Profile) -> dict[tuple[int, int], float]:
    """Seconds that every rank should work on each block in a step, teacher and student without update and messages."""
    found: dict[tuple[int, int], float] = {}
    for a in plan.assignments:
        for rank, rows in zip(a.ranks, a.rows, strict=True):
            kind = profile.kind_of[rank]
            for block in plan.teacher_blocks(a):
                key = rank, block
                found[key] = found.get(key, 0.0) + profile.blocks[block].teacher[kind].at(rows)
                if block in a.blocks:
                    found[key] += profile.blocks[block].student_seconds(kind, rows, a.microbatches, a.recompute)
    return found


def _retimed(profile: Profile, factors: Mapping[int, float], slowness: Mapping[int, float]) -> Profile:
    """The profile with blocks that take `factors` as long, on ranks that take `slowness` as long as others of their
    kind."""
    kinds: list[tuple[int, float]] = []  # kind as it was, and how much slower
    kind_of = [0] * len(profile.devices)
    for kind in range(len(profile.kinds)):
        ranks = [r for r, k in enumerate(profile.kind_of) if k == kind]
        usual = median([slowness[r] for r in ranks if r in slowness] or [1.0])  # of ranks that have nothing to do
        ranks.sort(key=lambda r: slowness.get(r, usual))
        while ranks:
            least = slowness.get(ranks[0], usual)
            alike = [r for r in ranks if slowness.get(r, usual) <= least * (1 + _ALIKE)]
            for r in alike:
                kind_of[r] = len(kinds)
            kinds.append((kind, median(slowness.get(r, usual) for r in alike)))
            ranks = ranks[len(alike) :]

    def block(number: int, costs: BlockCosts) -> BlockCosts:
        factor = factors.get(number, 1.0)
        return replace(
            costs,
            teacher=tuple(costs.teacher[k].times(factor * slow) for k, slow in kinds),
            student=tuple(costs.student[k].times(factor * slow) for k, slow in kinds),
            update=tuple(costs.update[k] * slow for k, slow in kinds),
        )

    return replace(
        profile,
        blocks=tuple(block(i, b) for i, b in enumerate(profile.blocks)),
        kinds=tuple(Kind(f"{profile.kinds[k].name}, {slow:.2f} as long", profile.kinds[k].memory) for k, slow in kinds),
        kind_of=tuple(kind_of),
        source="measured",
    )


def _stages(plan: Plan) -> str:
    """The plan in a line."""
    return "; ".join(
        f"{a.blocks[0]}-{a.blocks[-1]} on {', '.join(f'{r} ({n} rows)' for r, n in zip(a.ranks, a.rows, strict=True))}"
        for a in plan.assignments
    )
