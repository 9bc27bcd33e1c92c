"""How long a step of a plan takes and what each rank holds: one function for all strategies."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..costs import Profile
from .plan import Assignment, Plan, Prediction

RECEIVING, SENDING = 3, 2  # buffers of an edge: two posted receives and the one that is read; two that are sent


@dataclass(frozen=True)
class Load:
    """Seconds of one rank's share of an assignment: before its boundary is on its way, after it, and to update."""

    ahead: float
    behind: float
    update: float

    @property
    def total(self) -> float:
        return self.ahead + self.behind + self.update


def predict(plan: Plan, profile: Profile) -> Prediction:
    """The prediction for a plan of the profile's devices and batch."""
    busy = [0.0] * len(plan.devices)
    ready: dict[int, float] = {}  # when the boundary behind a block is there, in a step alone
    end = 0.0
    for a in sorted(plan.assignments, key=lambda a: a.blocks):  # a boundary comes from an earlier block
        before, loads = plan.before(a), loads_of(plan, a, profile)
        start = ready[before.blocks[-1]] if before else 0.0
        if plan.barrier:  # the ranks update when all have come to it, and only then go on
            start = max(start, *(load.update for load in loads))
        ready[a.blocks[-1]] = start + max(load.ahead for load in loads)
        done = start + max(load.ahead + load.behind for load in loads)
        end = max(end, done if plan.barrier else done + max(load.update for load in loads))
        together = max(load.total for load in loads)  # replicas wait for each other
        for rank in a.ranks:
            busy[rank] += together
    scatter = sum(
        profile.link(0, r).seconds(profile.input_bytes * rows)
        for a in plan.assignments
        if plan.before(a) is None
        for r, rows in zip(a.ranks, a.rows, strict=True)
        if r != 0
    )
    busy[0] += scatter + profile.load
    serial = plan.barrier or profile.load > max(busy)
    return Prediction(max(end, *busy) if serial else max(busy), end, tuple(busy), rank_bytes(plan, profile))


def rank_bytes(plan: Plan, profile: Profile) -> tuple[float, ...]:
    """What each rank holds at most: all its weights and buffers, and the work of one assignment at a time."""
    relays = [(plan.before(a) is not None, plan.after(a) is not None) for a in plan.assignments]
    found: dict[tuple[Any, bool], float] = {}  # by assignments and rows, which many ranks have in common
    ranks = [
        tuple((n, a.rows[a.ranks.index(rank)]) for n, a in enumerate(plan.assignments) if rank in a.ranks)
        for rank in range(len(plan.devices))
    ]
    for shares, reads in {(shares, rank == 0) for rank, shares in enumerate(ranks)}:
        own = [(plan.assignments[n], rows) for n, rows in shares]
        teachers = {b for a, _ in own for b in plan.teacher_blocks(a)}
        held = _weights(profile, teachers, [b for a, _ in own for b in a.blocks])
        for n, rows in shares:
            held += _buffers(profile, plan.assignments[n].blocks, rows, relays[n])
        inputs = [_inputs(profile, rows) for n, rows in shares if not relays[n][0]]
        held += max(inputs, default=0.0) if reads else sum(inputs)  # the rank that loads has each batch once
        work = [_work(profile, plan.teacher_blocks(a), a.blocks, rows, a.microbatches, a.recompute) for a, rows in own]
        found[shares, reads] = held + max(work, default=0.0)
    return tuple(found[shares, rank == 0] for rank, shares in enumerate(ranks))


def loads_of(plan: Plan, assignment: Assignment, profile: Profile) -> list[Load]:
    """What each rank of an assignment has to do."""
    before, after = plan.before(assignment), plan.after(assignment)
    came = before.ranks[-1] if before else None
    goes = after.ranks[0] if after else None
    kinds = [(profile.kind_of[rank], rows) for rank, rows in zip(assignment.ranks, assignment.rows, strict=True)]
    found = {
        (kind, rows): load(profile, plan.teacher_blocks(assignment), assignment, kind, rows, came, goes)
        for kind, rows in set(kinds)
    }
    return [found[key] for key in kinds]


def load(
    profile: Profile,
    teacher: Sequence[int],
    assignment: Assignment,
    kind: int,
    rows: int,
    came: int | None,
    goes: int | None,
) -> Load:
    """What one rank has to do.

    Arguments:
        teacher: the blocks of which it runs the teacher; `kind`, `rows`: of the rank, and its share.
        came, goes: the nearest rank of the stage before and behind, if there is one.
    """
    costs, blocks, ranks = profile.blocks, assignment.blocks, assignment.ranks
    relay = 0.0
    if came is not None:
        across = len({profile.nodes[r] for r in (*ranks, came)}) > 1
        link = profile.between if across else profile.within
        relay += link.seconds(costs[blocks[0] - 1].boundary * rows)
    if goes is not None:
        relay += profile.link(ranks[-1], goes).seconds(costs[blocks[-1]].boundary * rows)
    ahead = sum(costs[b].teacher[kind].at(rows) for b in teacher)
    how = assignment.microbatches, assignment.recompute
    behind = sum(costs[b].student_seconds(kind, rows, *how) for b in blocks)
    reduce = sum(profile.reduce_seconds(ranks, costs[b].gradient_bytes) for b in blocks)
    return Load(ahead + relay, behind + reduce, sum(costs[b].update[kind] for b in blocks))


def stage_bytes(
    profile: Profile,
    teacher: Sequence[int],
    blocks: Sequence[int],
    rows: int,
    relays: tuple[bool, bool],
    microbatches: int = 1,
    recompute: bool = False,
) -> float:
    """Bytes of a rank that has one assignment (PipeDream-2BW, sec. 3.3, for blocks that learn alone).

    Arguments:
        teacher, blocks: the blocks of which it runs the teacher, and the student; `rows`: its share.
        relays: whether it receives, and sends, a boundary.
        microbatches, recompute: as in `Assignment`.
    """
    held = _weights(profile, teacher, blocks) + _buffers(profile, blocks, rows, relays)
    held += 0.0 if relays[0] else _inputs(profile, rows)
    return held + _work(profile, teacher, blocks, rows, microbatches, recompute)


def _weights(profile: Profile, teacher: Collection[int], blocks: Collection[int]) -> float:
    """Of both models' blocks, with gradients and what the optimizer keeps."""
    costs = profile.blocks
    held = sum(costs[b].teacher_bytes for b in teacher)
    return held + sum(costs[b].student_bytes + costs[b].gradient_bytes + costs[b].state_bytes for b in blocks)


def _buffers(profile: Profile, blocks: Sequence[int], rows: int, relays: tuple[bool, bool]) -> float:
    """Of an assignment's edges."""
    received = RECEIVING * profile.blocks[blocks[0] - 1].boundary if relays[0] else 0.0
    return rows * (received + (SENDING * profile.blocks[blocks[-1]].boundary if relays[1] else 0.0))


def _inputs(profile: Profile, rows: int) -> float:
    """Of the next batches' inputs, which wait to be read; a first stage takes them as others take boundaries."""
    return (RECEIVING - 1) * rows * profile.input_bytes


def _work(
    profile: Profile, teacher: Sequence[int], blocks: Sequence[int], rows: int, microbatches: int, recompute: bool
) -> float:
    """While an assignment runs: inputs, boundaries, and the most that any of its students needs."""
    costs = profile.blocks
    prefix = [b for b in teacher if b < blocks[0]]
    kept = [*prefix[-1:], *blocks]  # boundaries; those further back are forgotten on the way
    held = rows * sum(costs[b].boundary for b in kept)
    most = held + max(costs[b].needs(rows, microbatches, recompute) for b in blocks)
    for b in prefix:
        passing = (costs[b].passing or costs[b].saved).at(rows)
        most = max(most, passing + rows * (costs[b].boundary + (costs[b - 1].boundary if b else 0.0)))
    return rows * profile.input_bytes + most
