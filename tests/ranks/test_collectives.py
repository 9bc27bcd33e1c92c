"""In steady state ranks exchange messages alone: no collective but the gradients' sum inside a replicated stage."""

from collections import Counter

import pytest
import torch
from networks import mlp

import autobd
from autobd import ranks
from autobd.cluster import Cluster
from autobd.planner import Assignment, Plan
from autobd.ranks import peers

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "barrier", "broadcast", "reduce", "allgather", "_allgather_base"),
    *("gather", "scatter", "reduce_scatter", "alltoall", "alltoall_base"),
)


class Counted:
    """A process group that is used as it is, with its calls counted."""

    def __init__(self, group, name, calls):
        self.group, self.name, self.calls = group, name, calls

    def __getattr__(self, attribute):
        self.calls[self.name, attribute] += 1
        return getattr(self.group, attribute)


@pytest.fixture
def calls(monkeypatch):
    counted, make = Counter(), peers.Groups._make
    monkeypatch.setattr(
        peers.Groups, "_make", lambda self, name, *given: Counted(make(self, name, *given), name, counted)
    )
    return counted


def run(group, plan, steps, epochs=2):
    cuts = [("0", "0"), ("1", "1")]
    batches = [torch.randn(4, 6) for _ in range(steps)]
    recipe = autobd.Recipe(block_input="teacher", logits=False, epochs=epochs)
    return autobd.distill(
        mlp(16), mlp(4, seed=1), batches, cuts=cuts, devices=group, strategy=plan, recipe=recipe, profile="analytic",
        progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["tr+dpu", "ls"])
@pytest.mark.timeout(60)
def test_stages_of_one_rank_have_no_collective(calls, strategy):
    with ranks.open(Cluster(("cpu",) * 3), threads=1) as group:
        run(group, strategy, 5)
    assert calls["all", "send"] > 10
    assert not [call for call in calls if call[1] in COLLECTIVES]


@pytest.mark.timeout(60)
def test_a_replicated_stage_sums_once_per_block_and_step_among_its_replicas_alone(calls):
    stages = (Assignment((0, 1), (0, 1), (2, 2), "relay"), Assignment((2,), (2,), (4,), "relay"))
    plan = Plan("ahd", 4, ("cpu",) * 3, stages)
    with ranks.open(Cluster(("cpu",) * 3), threads=1) as group:
        run(group, plan, 5)
    found = {call: count for call, count in calls.items() if call[1] in COLLECTIVES}
    normalisers = 2  # on the first batch
    assert found == {("0 1", "allreduce"): 2 * 5 * 2 + normalisers}


@pytest.mark.timeout(60)
def test_the_barrier_of_tr_waits_once_per_step(calls):
    with ranks.open(Cluster(("cpu",) * 3), threads=1) as group:
        run(group, "tr", 5)
    found = {call: count for call, count in calls.items() if call[1] in COLLECTIVES}
    assert found == {("0 1 2", "allreduce"): 10}
