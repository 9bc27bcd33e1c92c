"""Activations that are computed again: the same numbers to the bit, and less memory."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import SIZE, networks
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import autobd
from autobd.parts.recompute import Segment, recomputed_bytes, recomputing
from autobd.planner import Assignment, Plan


def deep(layers=12, channels=8):
    torch.manual_seed(0)
    block = [
        (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(layers)
    ]
    return nn.Sequential(*(layer for own in block for layer in own))


def most_saved(function):
    """Bytes kept for backwards at a time, of all storages."""
    alive, most = {}, [0]

    class Kept:
        def __init__(self, tensor):
            self.tensor, storage = tensor, tensor.untyped_storage()
            self.key = storage.data_ptr()
            count, size = alive.get(self.key, (0, storage.nbytes()))
            alive[self.key] = count + 1, size
            most[0] = max(most[0], sum(size for _, size in alive.values()))

        def __del__(self):
            count, size = alive.pop(self.key)
            if count > 1:
                alive[self.key] = count - 1, size

    with saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        function()
    return most[0]


def trained(model, given, run, seed=3):
    torch.manual_seed(seed)
    run(given).square().sum().backward()
    return [p.grad for p in model.parameters()], dict(model.named_buffers())


def test_a_deep_block_holds_less_and_gives_the_same():
    model, x = deep(), torch.randn(4, 8, 16, 16)
    captured = autobd.capture(model, x)
    plain, again = captured.bind(captured.graph, model), copy.deepcopy(model)
    parted = recomputing(captured.bind(captured.graph, again), captured.graph)
    assert sum(isinstance(m, Segment) for m in parted.modules()) >= 2
    a = trained(model, x, lambda t: plain(t)[0])
    b = trained(again, x, lambda t: parted(t)[0])
    assert all(torch.equal(x, y) for x, y in zip(a[0], b[0], strict=True))
    assert all(torch.equal(v, b[1][n]) for n, v in a[1].items())
    held = [most_saved(lambda run=run: run(x)[0].square().sum().backward()) for run in (plain, parted)]
    assert held[1] < 0.6 * held[0]
    assert recomputed_bytes(captured.graph) < 0.6 * 12 * 4 * x.numel() * 4


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(networks(), st.integers(0, 9))
def test_any_network_gives_the_same_with_its_blocks_computed_again(teacher, seed):
    student = copy.deepcopy(teacher)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in student.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    data = [torch.randn(3, 3, SIZE, SIZE) for _ in range(2)]
    results = []
    for again in (False, True):
        mine = copy.deepcopy(student)
        try:
            split = autobd.split(teacher, mine, data[0])
        except autobd.AutobdError:
            return
        blocks = tuple(range(len(split)))
        plan = Plan("mine", 3, ("cpu",), (Assignment(blocks, (0,), (3,), "store", 1, again),))
        try:
            result = autobd.distill(teacher, mine, data, strategy=plan, devices=["cpu"], seed=seed, progress=False)
        except autobd.AutobdError as error:
            results.append(str(error))
            continue
        results.append((result.history.losses, mine.state_dict()))
    if isinstance(results[0], str):
        assert results[0] == results[1]
        return
    assert results[0][0] == results[1][0]
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name


@pytest.mark.timeout(60)
def test_a_run_holds_less_where_its_plan_computes_again():
    """On a rank of its own, whose peak its own process reads; memory is given back at once."""
    held = []
    for again in (False, True):
        script = f"""
import torch
import autobd
from autobd.planner import Assignment, Plan
from test_recompute import deep

plan = Plan("mine", 16, ("cpu",), (Assignment((0, 1), (0,), (16,), "store", 1, {again}),))
data = [torch.randn(16, 8, 64, 64)] * 2
result = autobd.distill(deep(4), deep(24), data, cuts=[("3", "3")], strategy=plan, devices=["cpu"], progress=False)
print(result.trace.memory[0])
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        held.append(float(done.stdout.split()[-1]))
    assert held[1] < 0.6 * held[0]


def test_a_plan_is_made_where_activations_do_not_fit():
    model, student = deep(), deep(12, 8)
    split = autobd.split(model, student, torch.randn(32, 8, 16, 16), cuts=[("23", "23")])
    profile = autobd.profile(split, "2xA6000")
    plain = autobd.plan(profile, "tr+dpu")
    needed = max(plain.prediction.memory)
    less = autobd.plan(profile, "tr+dpu", memory=0.8 * needed)
    assert any(a.recompute for a in less.assignments)
    assert max(less.prediction.memory) <= 0.8 * needed
    assert less.prediction.step > plain.prediction.step
    least = autobd.plan(profile, "tr+dpu", memory=0.45 * needed)
    assert any(a.microbatches > 1 for a in least.assignments)
    with pytest.raises(autobd.AutobdError, match="at 16 rows in 8 microbatches"):
        autobd.plan(profile, "tr+dpu", memory=1000)
    with pytest.raises(autobd.AutobdError, match="not fit"):
        autobd.plan(profile, "tr+dpu", memory=0.45 * needed, microbatches=1)
    assert Plan.from_json(least.to_json()) == least
    assert "microbatches" in str(least)
