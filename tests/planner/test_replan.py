"""Planning again from measured times."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profiles

from autobd.costs import Profile
from autobd.planner import plan, replan
from autobd.planner.predict import predict
from autobd.planner.replan import compute_seconds

BATCH = 8


def costs(teacher=(1.0, 1.0, 1.0, 1.0), ranks=2, source="given"):
    return replace(Profile.of(teacher, [2 * t for t in teacher], BATCH, devices=ranks), source=source)


def measured(chosen, truth):
    return compute_seconds(chosen, truth)


def rows_of(chosen):
    return {rank: rows for a in chosen.assignments for rank, rows in zip(a.ranks, a.rows, strict=True)}


@given(profiles(devices=4), st.sampled_from(["auto", "tr+dpu", "ahd", "ir"]))
def test_times_as_expected_leave_the_plan(profile, strategy):
    chosen = plan(profile, strategy)
    assert replan(chosen, profile, measured(chosen, profile), strategy) is None


@given(profiles(devices=4), st.floats(1.3, 5.0), st.sampled_from(["auto", "tr+dpu", "ahd"]))
def test_times_that_are_all_as_much_longer_leave_the_stages(profile, factor, strategy):
    blocks = [replace(b, update=(0.0,), boundary=0.0, gradient_bytes=0.0) for b in profile.blocks]
    free = replace(profile, blocks=tuple(blocks), input_bytes=0.0)
    chosen = plan(free, strategy)
    longer = {key: factor * seconds for key, seconds in measured(chosen, free).items()}
    assert replan(chosen, free, longer, strategy) is None


@given(profiles(blocks=st.integers(2, 5), devices=4), st.lists(st.floats(0.2, 5.0), min_size=5, max_size=5))
def test_a_move_is_to_the_plan_that_the_true_times_give(profile, factors):
    truth = replace(
        profile,
        blocks=tuple(
            replace(b, teacher=(b.teacher[0].times(f),), student=(b.student[0].times(f),))
            for b, f in zip(profile.blocks, factors, strict=False)
        ),
    )
    chosen = plan(profile, "tr+dpu")
    found = replan(chosen, profile, measured(chosen, truth), "tr+dpu")
    best, now = plan(truth, "tr+dpu").prediction.step, predict(chosen, truth).step
    if found is None:
        off = [
            abs(sum(t for (r, _), t in measured(chosen, truth).items() if r == rank) / said - 1)
            for rank in range(len(profile.devices))
            if (said := sum(t for (r, _), t in measured(chosen, profile).items() if r == rank))
        ]
        assert best >= 0.95 * now * (1 - 1e-9) or max(off) <= 0.15
    else:
        assert predict(found.plan, truth).step == pytest.approx(best)
        assert found.profile.source == "measured"


def test_a_block_that_takes_longer_than_analysed_gets_a_stage_of_its_own():
    profile = costs()
    chosen = plan(profile, "tr+dpu")
    assert [a.blocks for a in chosen.assignments] == [(0, 1), (2, 3)]
    truth = costs((5.0, 1.0, 1.0, 1.0))
    found = replan(chosen, profile, measured(chosen, truth), "tr+dpu")
    assert [a.blocks for a in found.plan.assignments] == [(0,), (1, 2, 3)]
    assert "rank 0 worked 18 s a step where 6 s were expected" in found.text
    assert "0-1 on 0 (8 rows); 2-3 on 1 (8 rows)" in found.text
    assert "0-0 on 0 (8 rows); 1-3 on 1 (8 rows)" in found.text


def test_a_replica_that_is_slower_gets_fewer_rows():
    profile = costs((1.0,), ranks=2)
    chosen = plan(profile, "ahd")
    assert rows_of(chosen) == {0: 4, 1: 4}
    slower = {key: seconds * (3 if key[0] == 1 else 1) for key, seconds in measured(chosen, profile).items()}
    found = replan(chosen, replace(profile, source="measured"), slower, "ahd")
    assert rows_of(found.plan) == {0: 6, 1: 2}
    again = replan(found.plan, found.profile, measured(found.plan, found.profile), "ahd")
    assert again is None


def test_a_rank_that_has_become_slower_since_blocks_were_measured_gets_less_to_do():
    profile = costs((1.0,) * 6, ranks=2, source="measured")
    chosen = plan(profile, "tr+dpu")
    assert [len(a.blocks) for a in chosen.assignments] == [3, 3]
    slower = {key: seconds * (2 if key[0] == 1 else 1) for key, seconds in measured(chosen, profile).items()}
    found = replan(chosen, profile, slower, "tr+dpu")
    work = {a.ranks[0]: len(a.blocks) for a in found.plan.assignments}
    assert work == {0: 4, 1: 2}
