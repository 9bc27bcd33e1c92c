"""A small training with all that a checkpoint has to hold, here or in a process of its own."""

import os
import random
import subprocess
import sys
from pathlib import Path

import torch
from opened import open_ranks
from plain import assert_equal_state
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autobd
from autobd import Recipe
from autobd.errors import CallbackError

CUTS = [("0", "0"), ("1", "1"), ("2", "2")]
STEPS, EPOCHS = 5, 3


def net(width, seed):
    torch.manual_seed(seed)

    def stage(channels):
        layers = [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Conv2d(width, 4, 1))

    return nn.Sequential(stage(3), stage(4), stage(4), nn.Sequential(nn.Flatten(), nn.Linear(4 * 36, 5)))


class Shaken(Dataset):
    """Images that are never the same twice: both Python's and torch's generators are drawn from."""

    def __init__(self):
        self.images = torch.randn(38, 3, 6, 6, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i] + 0.1 * torch.randn(3, 6, 6)
        return image.flip(-1) if random.random() < 0.5 else image, i % 5


RECIPE = Recipe(logits=True, epochs=EPOCHS, lr=autobd.Schedule(3e-3, warmup=0.2), ema={1: 0.9}, clip=1.0)


def distilled(student=None, recipe=RECIPE, **options):
    """The student that comes out, and the result; None for it where the training died."""
    student = student or net(6, 1)
    random.seed(4)
    loader = DataLoader(Shaken(), 8, shuffle=True, generator=torch.Generator().manual_seed(2))
    defaults = {"devices": 1, "strategy": "tr+dpu", "profile": "analytic", "threads": 1, "progress": False}
    options = {"cuts": CUTS, "data": loader, **defaults, **options}
    options["devices"] = open_ranks(options["devices"])
    try:
        return student, autobd.distill(net(12, 0), student, options.pop("data"), recipe=recipe, **options)
    except CallbackError:
        return student, None


def assert_same_run(a, b):
    assert_equal_state(a[0], b[0])
    assert a[1].history.losses == b[1].history.losses
    assert a[1].history.epoch_ends == b[1].history.epoch_ends
    assert a[1].history.scores == b[1].history.scores
    if a[1].history.finish is not None:
        assert a[1].history.finish.losses == b[1].history.finish.losses


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import autobd
from autobd import Checkpoint
from small_training import distilled

class Slow(autobd.Callback):
    def on_step(self, run):
        print(run.step, flush=True)
        time.sleep({sleep})

{before}
checkpoint = Checkpoint({directory!r}, {every!r})
student, result = distilled(devices={devices}, checkpoint=checkpoint, callbacks=[Slow()], resume="auto")
print("done", flush=True)
"""


def started(directory, devices=1, every="1 epoch", sleep=0.2, before=""):
    given = {"devices": devices, "directory": str(directory), "every": every, "sleep": sleep, "before": before}
    script = SCRIPT.format(tests=str(Path(__file__).parent), **given)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    return subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
