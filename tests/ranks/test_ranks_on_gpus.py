"""Ranks on GPUs; these run where there are some."""

import copy

import pytest
import torch
from networks import assert_same, fingerprint, mlp

import autobd

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICES = {
    "two ranks on one GPU": (1, ["cuda:0", "cuda:0"]),
    "a GPU and the CPU": (1, ["cuda:0", "cpu"]),
    "the CPU and a GPU": (1, ["cpu", "cuda:0"]),
    "two GPUs": (2, ["cuda:0", "cuda:1"]),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("strategy", ["tr", "tr+dpu", "dp", "ls", "ir", "ahd"])
@pytest.mark.parametrize("name", DEVICES)
def test_ranks_on_gpus_give_the_student_of_one_rank(name, strategy):
    needed, devices = DEVICES[name]
    if needed > GPUS:
        pytest.skip(f"needs {needed} CUDA devices")
    teacher, student = mlp(16).double().cuda(), mlp(4, seed=1).double().cuda()
    batches = [torch.randn(rows, 6).double() for rows in (8, 8, 3)]
    before, alone = fingerprint(teacher), copy.deepcopy(student)
    options = {"blocks": 3, "epochs": 2, "progress": False}
    autobd.distill(teacher, alone, batches, devices=1, **options)
    autobd.distill(teacher, student, batches, devices=devices, strategy=strategy, **options)
    assert_same(before, fingerprint(teacher))
    for key, value in student.state_dict().items():
        assert value.device.type == "cuda"
        assert torch.allclose(value, alone.state_dict()[key], rtol=0, atol=1e-10), key
