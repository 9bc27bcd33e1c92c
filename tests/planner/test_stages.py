"""The planner against brute force: every chain of stages, scored by `predict`, which knows nothing of the search."""

import math
from dataclasses import replace
from itertools import combinations, pairwise, permutations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import profiles

from autobd.costs import Curve, Link, Profile
from autobd.errors import InputError, PlanError
from autobd.planner import Assignment, Plan, plan
from autobd.planner.predict import loads_of, predict, rank_bytes
from autobd.planner.strategies import even, min_seconds
from autobd.planner.unequal import filled

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def fits(found, profile):
    return all(held <= profile.kind(r).memory for r, held in enumerate(predict(found, profile).memory))


def chains(profile, replicas):
    """Every chain of stages on the first devices in order, with even shares."""
    blocks, ranks, rows = len(profile.blocks), len(profile.devices), profile.batch_size
    for stages in range(1, min(blocks, ranks) + 1):
        for inner in combinations(range(1, blocks), stages - 1):
            bounds = [0, *inner, blocks]
            for counts in product(range(1, (min(ranks, rows) if replicas else 1) + 1), repeat=stages):
                if sum(counts) > ranks:
                    continue
                starts = [sum(counts[:i]) for i in range(stages)]
                yield Plan("ahd" if replicas else "tr+dpu", rows, profile.devices, tuple(
                    Assignment(tuple(range(a, b)), *even(rows, range(s, s + k)), "relay")
                    for a, b, s, k in zip(bounds, bounds[1:], starts, counts, strict=False)
                ))  # fmt: skip


def recomputed(chain):
    """The chain with activations computed again in any of its stages."""
    for again in product((False, True), repeat=len(chain.assignments)):
        yield replace(chain, assignments=tuple(
            replace(a, recompute=r) for a, r in zip(chain.assignments, again, strict=True)
        ))  # fmt: skip


@MANY
@given(st.data(), st.booleans())
def test_no_chain_of_stages_is_faster_and_none_as_fast_fills_sooner(data, replicas):
    profile = data.draw(profiles(nodes=2, limited=data.draw(st.booleans())))
    every = [p for chain in chains(profile, replicas) for p in recomputed(chain) if fits(p, profile)]
    if not every:
        with pytest.raises(PlanError, match="fit"):
            plan(profile, "ahd" if replicas else "tr+dpu", microbatches=1)
        return
    found = plan(profile, "ahd" if replicas else "tr+dpu", microbatches=1)
    scores = [slowest(p, profile) for p in every]
    assert slowest(found, profile) == pytest.approx(min(scores))
    assert fits(found, profile)
    equal = [filling(p, profile) for p, s in zip(every, scores, strict=True) if s <= min(scores) * (1 + 1e-9)]
    assert filling(found, profile) == pytest.approx(min(equal), rel=1e-6)


def slowest(found, profile):
    """The slowest stage: without what rank 0 does beside, to load and to scatter."""
    return predict(found, replace(profile, load=0.0, input_bytes=0.0)).step


def filling(found, profile):
    """Until the last stage is done with the first step."""
    loads = [loads_of(found, a, profile) for a in found.assignments]
    return sum(max(w.ahead for w in stage) for stage in loads[:-1]) + max(w.total for w in loads[-1])


@MANY
@given(st.data(), st.booleans())
def test_unequal_devices_no_choice_of_groups_and_shares_is_faster(data, replicas):
    profile = data.draw(profiles(blocks=st.integers(1, 3), devices=3, kinds=3, limited=data.draw(st.booleans())))
    profile = replace(profile, blocks=tuple(replace(b, recomputed=None) for b in profile.blocks))
    if len(set(profile.kind_of)) == 1:
        return
    blocks, ranks, rows = len(profile.blocks), len(profile.devices), profile.batch_size
    best = math.inf
    for order in permutations(range(ranks)):
        for stages in range(1, min(blocks, ranks) + 1):
            for inner in combinations(range(1, blocks), stages - 1):
                for counts in product(range(1, (ranks if replicas else 1) + 1), repeat=stages):
                    if sum(counts) <= ranks:
                        best = min(best, best_shares(profile, [0, *inner, blocks], counts, order, rows))
    if best == math.inf:
        with pytest.raises(PlanError, match="fit"):
            plan(profile, "ahd" if replicas else "tr+dpu", microbatches=1)
        return
    found = plan(profile, "ahd" if replicas else "tr+dpu", microbatches=1)
    assert fits(found, profile)
    assert slowest(found, profile) == pytest.approx(best)


def best_shares(profile, bounds, counts, order, rows):
    """The slowest stage, each with the best of all its shares."""
    starts, worst = [sum(counts[:i]) for i in range(len(counts))], 0.0
    groups = [order[s : s + k] for s, k in zip(starts, counts, strict=True)]
    stages = [tuple(range(a, b)) for a, b in pairwise(bounds)]
    for number, (group, k) in enumerate(zip(groups, counts, strict=True)):
        if k > rows:
            return math.inf
        seconds = math.inf
        for shares in product(range(1, rows + 1), repeat=k):
            if sum(shares) == rows:
                others = [even(rows, g) for g in groups]
                others[number] = group, shares
                whole = Plan("ahd", rows, profile.devices, tuple(
                    Assignment(b, *r, "relay") for b, r in zip(stages, others, strict=True)
                ))  # fmt: skip
                loads, held = loads_of(whole, whole.assignments[number], profile), rank_bytes(whole, profile)
                if any(held[r] > profile.kind(r).memory for r in group):
                    continue
                seconds = min(seconds, max(w.total for w in loads))
        worst = max(worst, seconds)
    return worst


@MANY
@given(st.data())
def test_auto_is_no_slower_than_any_strategy_and_no_faster_than_the_bound(data):
    profile = data.draw(profiles(kinds=data.draw(st.sampled_from([1, 2]))))
    chosen = plan(profile)
    for name in ("dp", "ls", "tr", "tr+dpu", "ir", "ahd"):
        assert chosen.prediction.step <= plan(profile, name).prediction.step * (1 + 1e-9)
    assert min_seconds(profile) <= slowest(chosen, profile) * (1 + 1e-9)
    assert {name for name, _ in chosen.others} | {chosen.strategy} == {"dp", "ls", "tr+dpu", "ir", "ahd"}


@MANY
@given(st.data())
def test_more_devices_or_more_memory_is_never_slower(data):
    profile = data.draw(profiles(limited=True))
    one_less = len(profile.devices) - 1
    free = replace(profile, kinds=tuple(replace(k, memory=math.inf) for k in profile.kinds))
    if one_less:
        less = free.on(free.devices[:one_less], free.kind_of[:one_less], free.nodes[:one_less])
        assert slowest(plan(free, "ahd"), free) <= slowest(plan(less, "ahd"), less) * (1 + 1e-9)
    try:
        tight = plan(profile, "ahd", microbatches=1)
    except PlanError:
        return
    assert slowest(plan(free, "ahd"), free) <= slowest(tight, profile) * (1 + 1e-9)
    looser = plan(profile, "ahd", memory=2 * profile.kinds[0].memory, microbatches=1)
    assert slowest(looser, profile) <= slowest(tight, profile) * (1 + 1e-9)


@MANY
@given(st.data())
def test_a_plan_is_the_same_after_json(data):
    found = plan(data.draw(profiles()), data.draw(st.sampled_from(["dp", "ls", "tr", "ir", "ahd"])))
    assert Plan.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"strategy": 1}', '{"assignments": [{}]}'])
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(InputError, match="no plan"):
        Plan.from_json(text)


@MANY
@given(st.data())
def test_water_filling_finds_the_best_shares(data):
    profile = data.draw(profiles(blocks=st.just(1), devices=3, kinds=3))
    ranks, rows = list(range(len(profile.devices))), profile.batch_size
    if len(ranks) > rows:
        return
    _, shares = filled(profile, (0,), ranks, [math.inf] * len(ranks))
    assert sum(shares) == rows

    def seconds(shares):
        cost = profile.blocks[0]
        return max(
            cost.teacher[profile.kind_of[r]].at(x) + cost.student[profile.kind_of[r]].at(x)
            + cost.update[profile.kind_of[r]] for r, x in zip(ranks, shares, strict=True)
        )  # fmt: skip

    every = [s for s in product(range(1, rows + 1), repeat=len(ranks)) if sum(s) == rows]
    assert seconds(shares) == pytest.approx(min(map(seconds, every)))


# The paper's two schedules (Pipe-BD, Fig. 5): block 0 is dominant, on the A6000 more so.
PAPER = {
    "A6000": ([8.0, 1.5, 1.5, 1.2, 1.1, 1.0], [((0, 1, 2), (0, 1, 2)), ((3, 4, 5), (3,))]),
    "2080Ti": ([5.4, 1.4, 1.4, 1.0, 0.9, 0.8], [((0,), (0, 1)), ((1, 2), (2,)), ((3, 4, 5), (3,))]),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_schedules_come_out_for_costs_like_the_papers(name):
    work, expected = PAPER[name]
    profile = Profile.of(
        [w / 4 for w in work], [w * 3 / 4 for w in work], 256, 4, weights=[1.0] * 6, reduce_within=Link(0.02)
    )
    found = plan(profile, "ahd")
    assert [(a.blocks, a.ranks) for a in found.assignments] == expected


def test_what_does_not_fit_names_the_block_and_what_is_missing():
    profile = Profile.of([1.0, 1.0], [2.0, 2.0], 8, 2, weights=[10.0, 1000.0], memory=200.0)
    with pytest.raises(PlanError, match=r"Block 1 does not fit .* 4\.8 kB too much"):
        plan(profile)


def test_devices_that_are_of_no_use_stay_idle():
    profile = Profile.of([1.0], [2.0], 1, 4)
    assert plan(profile).idle == (1, 2, 3)
    assert "nothing to do for rank 1, 2, 3" in str(plan(profile))


def test_a_plan_is_scored_in_whatever_order_its_assignments_are_written():
    profile = Profile.of([1.0, 2.0], [2.0, 3.0], 4, 2, boundary=[5.0, 0.0], within=Link(0.1, 10.0))
    stages = (Assignment((0,), (1,), (4,), "relay"), Assignment((1,), (0,), (4,), "relay"))
    for strategy in ("tr", "tr+dpu"):
        found = [predict(Plan(strategy, 4, profile.devices, s), profile) for s in (stages, stages[::-1])]
        assert found[0] == found[1]


@pytest.mark.parametrize("strategy", ["dp", "ls", "ir", "tr", "tr+dpu", "ahd"])
def test_a_strategy_that_is_asked_for_and_does_not_fit_is_refused(strategy):
    profile = Profile.of([1.0, 1.0], [2.0, 2.0], 8, 2, weights=[10.0, 1000.0])
    assert plan(profile, strategy).strategy == strategy
    with pytest.raises(PlanError, match="not fit"):
        plan(profile, strategy, memory=200.0)


def test_a_teachers_prefix_needs_its_largest_forward_and_forgets_boundaries_on_the_way():
    profile = Profile.of([1.0] * 3, [1.0] * 3, 4, boundary=[10.0, 20.0, 30.0], saved=[1.0] * 3)
    passing = [100.0, 5.0, 0.0]
    blocks = [replace(b, passing=Curve((1,), (p,))) for b, p in zip(profile.blocks, passing, strict=True)]
    profile = replace(profile, blocks=tuple(blocks), input_bytes=7.0)

    def held(*trained):
        return rank_bytes(
            Plan("mine", 4, profile.devices, tuple(Assignment((b,), (0,), (4,), "prefix") for b in trained)), profile
        )[0]

    waiting = 2 * 7  # inputs of the next batches
    assert held(0) == 4 * (waiting + 7 + 10 + 1)
    assert held(1) == 4 * (waiting + 7 + 100 + 10)  # while the teacher's block 0 runs
    assert held(0, 1, 2) == held(2) == 4 * (waiting + 7 + 100 + 10)
    profile = replace(profile, blocks=tuple(replace(b, passing=Curve((1,), (0.0,))) for b in profile.blocks))
    assert held(2) == 4 * (waiting + 7 + 20 + 30 + 1)


def test_inputs_of_the_next_batches_wait_at_every_assignment_that_reads_them_but_where_they_are_loaded():
    profile = replace(Profile.of([1.0] * 3, [1.0] * 3, 4, 2), input_bytes=7.0)
    half = 2 * 7.0  # of a batch, for one of two replicas
    assert rank_bytes(plan(profile, "dp"), profile) == (3 * half, (1 + 3 * 2) * half)
    assert rank_bytes(plan(profile, "ir"), profile) == (3 * half, 3 * half)
