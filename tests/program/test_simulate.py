"""The simulator against the closed form, and against a real run."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import mlp
from profiles import profiles
from torch import nn

import autobd
from autobd.planner import plan
from autobd.planner.predict import predict
from autobd.program import Op, build, simulate

BLOCKS, STEPS = 4, 40
SPLIT = autobd.split(
    mlp(16, BLOCKS), mlp(4, BLOCKS, seed=1), torch.randn(4, 6), cuts=[(str(i), str(i)) for i in range(BLOCKS - 1)]
)
MANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def step_seconds(trace):
    ends = list(trace.finished.values())
    return (ends[-1] - ends[STEPS // 2]) / (len(ends) - 1 - STEPS // 2)


def simulated(data, strategy):
    """Random costs, the plan of a strategy by them, and what a step of it takes in the simulation."""
    profile = replace(data.draw(profiles(st.just(BLOCKS))), input_bytes=0.0)
    chosen = plan(profile, strategy)
    trace = simulate(build(chosen, SPLIT), profile, STEPS)
    assert len(trace.finished) == STEPS
    return profile, chosen, step_seconds(trace)


@MANY
@given(st.data(), st.sampled_from(["tr", "tr+dpu", "ls"]))
def test_without_replicas_a_step_takes_what_the_closed_form_says(data, strategy):
    profile, chosen, seconds = simulated(data, strategy)
    assert seconds == pytest.approx(predict(chosen, profile).step, rel=1e-6)


@MANY
@given(st.data(), st.sampled_from(["dp", "ir", "ahd"]))
def test_with_replicas_it_takes_no_longer_and_no_less_than_the_work(data, strategy):
    """The closed form counts the all-reduce as if nothing went on beside it."""
    profile, chosen, seconds = simulated(data, strategy)
    assert seconds <= predict(chosen, profile).step * (1 + 1e-6)
    work = [0.0] * len(profile.devices)
    for a in chosen.assignments:
        for rank, rows in zip(a.ranks, a.rows, strict=True):
            costs = [(b, profile.blocks[b]) for b in chosen.teacher_blocks(a)]
            work[rank] += sum(c.teacher[0].at(rows) for _, c in costs)
            work[rank] += sum(c.student[0].at(rows) + c.update[0] for b, c in costs if b in a.blocks)
    assert seconds >= max(work) * (1 - 1e-6)


@MANY
@given(st.data(), st.sampled_from(["dp", "ls", "tr", "tr+dpu", "ir", "ahd"]))
def test_instructions_keep_their_order_and_messages_their_slots(data, strategy):
    profile = data.draw(profiles(st.just(BLOCKS)))
    program = build(plan(profile, strategy), SPLIT)
    trace = simulate(program, profile, 6)
    for rank, own in enumerate(program.ranks):
        events = [e for e in trace.events if e.rank == rank]
        assert sorted((e.step, e.index) for e in events) == [(s, i) for s in range(6) for i in range(len(own))]
        for a, b in pairwise(events):
            assert a.end <= b.start + 1e-9
    taken = {
        (edge, e.step): e.end for e in trace.events for edge in e.instruction.edges
        if program.edges[edge].target == e.rank
    }  # fmt: skip
    for message in trace.messages:
        assert message.sent <= message.arrived <= taken[message.edge, message.step] + 1e-9
        full = message.step - program.edges[message.edge].slots - 2
        assert full < 0 or taken[message.edge, full] <= message.sent + 1e-9


@pytest.mark.timeout(120)
def test_a_real_run_goes_as_it_was_simulated():
    """The order in which the two ranks begin what they do, by the blocks' measured times."""

    def images(depth):
        parts = (nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(depth)), nn.ReLU()) for _ in range(3))
        return nn.Sequential(nn.Conv2d(3, 16, 1), *parts)

    batch = torch.randn(16, 3, 64, 64)
    result = autobd.distill(
        images(1), images(3), [batch] * 12, devices=2, strategy="tr+dpu", threads=1, progress=False,
        recipe=autobd.Recipe(block_input="teacher"),  # one program from first to last
    )  # fmt: skip
    expected = simulate(result.program, result.profile, 12)

    def order(trace, step):
        """Teachers and students of rank 1 against those of rank 0, which began first."""
        found = {
            (e.rank, e.instruction.op, e.instruction.block): e.start for e in trace.events if e.step == step
            and e.instruction.op in (Op.TEACHER_FORWARD, Op.STUDENT_FORWARD)
        }  # fmt: skip
        first = [k for k in found if k[0] == 0]
        return {(a, b): found[a] < found[b] for a in first for b in found if b[0] == 1}

    same = total = 0
    for step in range(4, 10):
        real, simulated = order(result.trace, step), order(expected, step)
        same += sum(real[pair] == simulated[pair] for pair in simulated)
        total += len(simulated)
    assert same >= 0.8 * total
