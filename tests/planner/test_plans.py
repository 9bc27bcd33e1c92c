"""Plans: shares of any batch, hand-overs, the best stages, and the plans that are refused. Oracles are brute force."""

import math
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import mlp

import autobd
from autobd.cluster import Cluster
from autobd.costs import analytic
from autobd.errors import InputError, PlanError
from autobd.planner import STRATEGIES, Assignment, Plan, plan
from autobd.planner.plan import intervals, overlapping
from autobd.planner.strategies import even

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6)


# ------------------------------------------------------------------ shares


@given(SHARES, st.integers(0, 200))
def test_shares_are_the_batch_in_order_without_gaps(rows, batch):
    found = intervals(rows, batch)
    assert len(found) == len(rows)
    assert [row for first, last in found for row in range(first, last)] == list(range(batch))
    assert all(first <= last for first, last in found)
    assert all(end == other for (_, end), (other, _) in pairwise(found))
    assert batch == 0 or found[0][0] < found[0][1]


@given(SHARES)
def test_shares_of_a_whole_batch_are_exact(rows):
    assert [last - first for first, last in intervals(rows, sum(rows))] == rows


@given(SHARES, st.integers(0, 200))
def test_shares_are_within_a_row_of_their_proportion_and_grow_with_the_batch(rows, batch):
    now, larger = intervals(rows, batch), intervals(rows, batch + 1)
    for share, (first, last) in zip(rows, now, strict=True):
        assert abs((last - first) - share * batch / sum(rows)) < 1
    assert all(a <= b and c <= d for (a, c), (b, d) in zip(now, larger, strict=True))


@settings(max_examples=60, deadline=None)
@given(*[st.lists(st.integers(1, 5), min_size=1, max_size=5)] * 2)
def test_a_hand_over_names_the_pairs_that_have_rows_in_common_for_some_batch(source, target):
    wanted = set()
    for batch in range(1, sum(source) * sum(target) + 1):
        ends = enumerate(intervals(source, batch)), enumerate(intervals(target, batch))
        for (i, (a, b)), (j, (c, d)) in product(*ends):
            if set(range(a, b)) & set(range(c, d)):
                wanted.add((i, j))
    assert set(overlapping(source, target)) == wanted
    assert len(overlapping(source, target)) == len(wanted)


@given(st.integers(1, 12), st.integers(1, 12))
def test_even_shares_are_handed_over_in_as_few_messages_as_can_be(k, more):
    assert len(overlapping([1] * k, [1] * more)) == k + more - math.gcd(k, more)
    assert len(overlapping([more] * k, [k] * more)) == k + more - math.gcd(k, more)


@given(st.integers(1, 40), st.integers(1, 12))
def test_even_shares_use_as_many_ranks_as_there_are_rows(rows, ranks):
    used, own = even(rows, range(ranks))
    assert used == tuple(range(min(rows, ranks)))
    assert sum(own) == rows
    assert max(own) - min(own) <= 1
    assert min(own) >= 1


# ------------------------------------------------------------------ strategies


def split(blocks, rows=4):
    names = [str(i) for i in range(blocks - 1)]
    return autobd.split(mlp(16, blocks), mlp(4, blocks, seed=1), torch.randn(rows, 6), cuts=[(n, n) for n in names])


def costs(of, ranks):
    return analytic(of, Cluster(("cpu",) * ranks))


SPLITS = {(blocks, rows): split(blocks, rows) for blocks in (1, 3, 4) for rows in (1, 5)}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("of", SPLITS)
def test_every_strategy_gives_a_plan_that_can_be_run(strategy, ranks, of):
    found = plan(costs(SPLITS[of], ranks), strategy)
    found.check(of[0])
    assert found.batch_size == of[1]
    assert found.devices == ("cpu",) * ranks
    sources = {a.source for a in found.assignments if a.blocks[0]}
    assert sources <= {"dp": {"prefix"}, "ls": {"prefix"}, "ir": {"store"}}.get(strategy, {"relay"})
    if strategy in ("ls", "tr", "tr+dpu"):
        assert not any(a.replicated for a in found.assignments)
    if strategy in ("dp", "ir"):
        assert all(len(a.ranks) == min(ranks, of[1]) for a in found.assignments)
    assert found.barrier == (strategy == "tr" and ranks > 1)
    assert all(str(rank) in str(found) for rank in range(ranks))


def test_unknown_strategies_and_plans_for_other_devices_are_refused():
    with pytest.raises(InputError, match="No such strategy"):
        plan(costs(SPLITS[3, 5], 1), "tr-dpu")
    good = plan(costs(SPLITS[3, 5], 2), "tr")
    with pytest.raises(InputError, match="other devices"):
        plan(costs(SPLITS[3, 5], 3), good)
    assert plan(costs(SPLITS[3, 5], 2), good) == good
    with pytest.raises(PlanError):
        plan(costs(SPLITS[4, 5], 2), good)


# ------------------------------------------------------------------ what is refused


def made(*assignments, batch=4, devices=3):
    return Plan("mine", batch, ("cpu",) * devices, tuple(Assignment(*a) for a in assignments))


GOOD = made(((0,), (0,), (4,), "relay"), ((1, 2), (1, 2), (3, 1), "relay"))
BAD = {
    "trained twice": made(((0, 1), (0,), (4,), "relay"), ((1, 2), (1,), (4,), "relay")),
    "never trained": made(((0,), (0,), (4,), "relay"), ((2,), (1,), (4,), "prefix")),
    "nothing at all": made(),
    "no blocks": made(((0, 1, 2), (0,), (4,), "relay"), ((), (1,), (4,), "relay")),
    "unknown block": made(((0, 1, 2, 3), (0,), (4,), "relay")),
    "negative block": made(((-1, 0, 1, 2), (0,), (4,), "relay")),
    "gaps": made(((0, 2), (0,), (4,), "prefix"), ((1,), (1,), (4,), "prefix")),
    "backwards": made(((2, 1, 0), (0,), (4,), "prefix")),
    "unknown rank": made(((0, 1, 2), (3,), (4,), "relay")),
    "negative rank": made(((0, 1, 2), (-1,), (4,), "relay")),
    "the same rank twice": made(((0, 1, 2), (1, 1), (2, 2), "relay")),
    "no rank": made(((0, 1, 2), (), (), "relay")),
    "too few rows": made(((0, 1, 2), (0, 1), (2, 1), "relay")),
    "too many rows": made(((0, 1, 2), (0, 1), (2, 3), "relay")),
    "an empty share": made(((0, 1, 2), (0, 1), (4, 0), "relay")),
    "a negative share": made(((0, 1, 2), (0, 1), (5, -1), "relay")),
    "a share too few": made(((0, 1, 2), (0, 1), (4,), "relay")),
    "an empty batch": made(((0, 1, 2), (0,), (0,), "relay"), batch=0),
    "unknown source": made(((0, 1, 2), (0,), (4,), "ring")),
    "a store that does not start at the data": made(((0,), (0,), (4,), "relay"), ((1, 2), (1,), (4,), "store")),
    "relay to itself": made(((0,), (0,), (4,), "relay"), ((1, 2), (0,), (4,), "relay")),
    "relay to some of its own ranks": made(((0,), (0, 1), (2, 2), "relay"), ((1, 2), (1, 2), (2, 2), "relay")),
}


def test_a_good_plan_is_accepted():
    GOOD.check(3)
    assert GOOD.before(GOOD.assignments[1]) is GOOD.assignments[0]
    assert GOOD.before(GOOD.assignments[0]) is None
    assert GOOD.idle == ()
    assert replace(GOOD, devices=("cpu",) * 5).idle == (3, 4)


@pytest.mark.parametrize("name", BAD)
def test_a_malformed_plan_is_refused(name):
    with pytest.raises(PlanError):
        BAD[name].check(3)


@given(st.data())
def test_a_plan_that_one_change_spoils_is_refused(data):
    number = data.draw(st.integers(0, 1))
    a = GOOD.assignments[number]
    change = data.draw(
        st.sampled_from(
            [
                {"blocks": (*a.blocks, a.blocks[-1] + 1)},
                {"blocks": a.blocks[:-1]},
                {"ranks": (*a.ranks, 0, 1, 2)},
                {"ranks": a.ranks[1:]},
                {"rows": (*a.rows, 1)},
                {"rows": tuple(r + 1 for r in a.rows)},
                {"source": "else"},
            ]
        )
    )
    others = [b for b in GOOD.assignments if b is not a]
    with pytest.raises(PlanError):
        replace(GOOD, assignments=(replace(a, **change), *others)).check(3)


def test_a_students_boundary_goes_to_the_same_shares_or_to_other_ranks():
    same = made(((0,), (0, 1), (3, 1), "prefix"), ((1, 2), (0, 1), (3, 1), "prefix"))
    assert same.student_before(same.assignments[1]) is same.assignments[0]
    other = made(((0,), (0,), (4,), "prefix"), ((1, 2), (1, 2), (3, 1), "prefix"))
    assert other.student_before(other.assignments[1]) is other.assignments[0]
    assert other.student_before(other.assignments[0]) is None
    for ranks, rows in [((1, 0), (3, 1)), ((0, 1), (2, 2)), ((1, 2), (3, 1)), ((1,), (4,))]:
        mixed = made(((0,), (0, 1), (3, 1), "prefix"), ((1, 2), ranks, rows, "prefix"))
        with pytest.raises(PlanError, match="cannot be handed over"):
            mixed.student_before(mixed.assignments[1])
