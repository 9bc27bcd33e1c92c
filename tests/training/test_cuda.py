"""The same promises on a GPU; these run where there is one."""

import copy

import pytest
import torch
from networks import assert_same, fingerprint, mlp

import autobd

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_distill_on_a_gpu_takes_batches_from_the_cpu_and_keeps_the_random_state():
    teacher, student = mlp(16).cuda(), mlp(4, seed=1, dropout=0.5).cuda()
    before, weight = fingerprint(teacher), student[0][0].weight.clone()
    state = torch.cuda.get_rng_state()
    result = autobd.distill(teacher, student, [torch.randn(5, 6) for _ in range(4)], blocks=3, progress=False)
    assert result.verification
    assert result.plan.devices == ("cuda:0",)
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert not torch.equal(weight, student[0][0].weight)
    assert_same(before, fingerprint(teacher))


def test_dropout_on_a_gpu_follows_the_seed():
    teacher, batches = mlp(16).cuda(), [torch.randn(5, 6) for _ in range(4)]
    students = [mlp(4, seed=1, dropout=0.5).cuda() for _ in range(2)]
    for student in students:
        autobd.distill(teacher, student, copy.deepcopy(batches), blocks=3, progress=False)
    assert torch.equal(students[0][2][0].weight, students[1][2][0].weight)
