"""`result.trace`: what really ran, and when."""

import pytest
import torch
from opened import open_ranks
from torch import nn

import autobd
from autobd.planner import Assignment, Plan
from autobd.program import Op

pytestmark = pytest.mark.timeout(120)
STUDENT = (Op.STUDENT_FORWARD, Op.STUDENT_BACKWARD, Op.UPDATE)


def images(depth):
    """`depth` convolutions in each of four parts."""
    parts = (nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(depth)), nn.ReLU()) for _ in range(3))
    return nn.Sequential(nn.Conv2d(3, 16, 1), *parts)


def run(strategy, devices=2, steps=8, size=32):
    batch = torch.randn(16, 3, size, size)
    return autobd.distill(
        images(1), images(3), [batch] * steps, devices=open_ranks(devices), strategy=strategy, progress=False,
        recipe=autobd.Recipe(block_input="teacher"),
    )  # fmt: skip


def test_the_relay_overlaps_the_students_work():
    plan = Plan(
        "tr+dpu",
        16,
        ("cpu", "cpu"),
        (Assignment((0, 1, 2), (0,), (16,), "relay"), Assignment((3,), (1,), (16,), "relay")),
    )
    trace = run(plan, size=64).trace
    (relay,) = [i for i, e in enumerate(trace.program.edges) if e.kind == "teacher"]
    sent = {m.step: m for m in trace.messages if m.edge == relay}
    overlaps = 0
    for step in range(1, 8):
        own = [e for e in trace.events if e.rank == 0 and e.step == step and e.instruction.op in STUDENT]
        teacher = [e for e in trace.events if (e.rank, e.step, e.instruction.op) == (1, step, Op.TEACHER_FORWARD)]
        # There before rank 0's students are done, and rank 1 computes with it meanwhile.
        overlaps += sent[step].arrived < own[-1].end and teacher[0].start < own[-1].end
        assert sent[step].sent <= own[0].start
    assert overlaps >= 5  # of seven: the machine may be busy with something else


@pytest.mark.parametrize("strategy", ["dp", "ls", "tr", "tr+dpu", "ir"])
def test_every_instruction_and_message_is_there_in_order(strategy):
    result = run(strategy, steps=4)
    trace, program = result.trace, result.program
    assert list(trace.finished) == [0, 1, 2, 3]
    assert len(trace.events) == 4 * sum(len(own) for own in program.ranks)
    assert {(m.edge, m.step) for m in trace.messages} == {(e, s) for e in range(len(program.edges)) for s in range(4)}
    ran = {(e.rank, e.step, e.index): e for e in trace.events}
    for event in trace.events:
        assert 0 <= event.start <= event.end
        assert event.instruction == program.ranks[event.rank][event.index]
        for index in event.instruction.after:
            assert ran[event.rank, event.step, index].end <= event.start
    for message in trace.messages:
        edge = program.edges[message.edge]
        assert message.sent <= message.arrived + 1e-3  # two processes' clocks
        taken = next(
            e for e in trace.events
            if e.rank == edge.target and e.step == message.step and message.edge in e.instruction.edges
        )  # fmt: skip
        assert message.arrived <= taken.end
    ends = list(trace.finished.values())
    assert ends == sorted(ends)
    assert trace.seconds_per_step == pytest.approx((ends[-1] - ends[0]) / 3)
    assert "4 steps" in str(trace)
    assert all(str(rank) in str(trace) for rank in range(2))


def test_a_long_run_keeps_its_last_steps():
    trace = run("auto", devices=1, steps=70, size=4).trace
    assert list(trace.finished) == list(range(6, 70))
