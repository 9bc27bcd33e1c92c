"""`bench`: every strategy runs for real and stands beside its prediction."""

import pytest
import torch
from networks import assert_same, fingerprint, mlp

import autobd
from autobd.cli import main

MODELS = """
from torch import nn

def net(width=8):
    block = lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6))
    return nn.Sequential(block(), block(), block())
"""


@pytest.mark.timeout(120)
def test_all_strategies_run_and_the_models_stay_as_they_were():
    teacher, student = mlp(64, 4), mlp(16, 4, seed=1)
    before = fingerprint(teacher), fingerprint(student)
    cuts = [(str(i), str(i)) for i in range(3)]
    found = autobd.bench(
        teacher, student, torch.randn(16, 6), devices=["cpu"] * 2, rounds=2, steps=8, threads=1, budget=1,
        progress=False, cuts=cuts,
    )  # fmt: skip
    assert_same(before[0], fingerprint(teacher))
    assert_same(before[1], fingerprint(student))
    assert set(found.measured) == set(found.predicted) == {"dp", "ls", "tr", "tr+dpu", "ir", "ahd"}
    for name, seconds in found.measured.items():
        assert len(found.rounds[name]) == 2
        assert min(found.rounds[name]) <= seconds <= max(found.rounds[name])
        assert found.predicted[name] > 0
        assert name in str(found)


@pytest.mark.timeout(120)
def test_from_the_command_line(capsys, tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    arguments = [f"{path}:net,width=16", f"{path}:net", "--input", "6", "--devices", "1", "--rounds", "1"]
    assert main(["bench", *arguments, "--steps", "6", "--quiet"]) == 0
    assert "efficiency" in capsys.readouterr().out
