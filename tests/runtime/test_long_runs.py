"""Long runs hold no more than short ones: memory, files and threads of every process stay as they are."""

import gc
import os
import resource
import time
from pathlib import Path

import pytest
import torch
from processes import workers
from torch import nn

import autobd

pytestmark = pytest.mark.usefixtures("nothing_open")  # it looks at the processes that there are
STEPS, EVERY = 2000, 200  # the first of these are for what is made once
MEGABYTES = 4  # of growth, in each process


def net(width, seed):
    torch.manual_seed(seed)

    def stage(channels):
        return nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 1)
        )

    return nn.Sequential(stage(3), stage(8), stage(8), nn.Flatten(), nn.Linear(8 * 256, 5))


def held(pid):
    """Resident megabytes, open files and threads of a process."""
    gc.collect()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    files, threads = (len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task"))
    return pages * resource.getpagesize() / 1e6, files, threads


class Watches(autobd.Callback):
    """What every process holds, every so many steps."""

    def __init__(self):
        self.found = []

    def on_step(self, run):
        if run.step and run.step % EVERY == 0:
            time.sleep(0.3)  # a checkpoint may be on its way
            self.found.append([held(pid) for pid in (os.getpid(), *workers())])


def assert_flat(found, what):
    """The later half against the first."""
    for number, of_process in enumerate(zip(*found, strict=True)):
        memory, files, threads = zip(*of_process, strict=True)
        half = len(memory) // 2
        grown = sorted(memory[half:])[half // 2] - sorted(memory[1:half])[half // 2]
        print(f"process {number}: {memory[0]:.1f} MB after the first {what}, {memory[-1]:.1f} after the last")
        print("  ", *(f"{m:.1f}" for m in memory), "files", files, "threads", threads)
        assert grown < MEGABYTES, memory
        assert max(files[half:]) <= max(files[:half]), files
        assert max(threads[half:]) <= max(threads[:half]) + 2, threads  # two may be writing a checkpoint


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("devices", "strategy"), [(1, "tr"), (2, "tr+dpu"), (2, "ir")])
def test_two_thousand_steps(tmp_path, devices, strategy):
    images = torch.randn(40, 8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    watches = Watches()
    autobd.distill(
        net(16, 0), net(4, 1), [(x, torch.zeros(8).long()) for x in images], devices=devices,
        recipe=autobd.Recipe(logits=True, epochs=STEPS // 40 + 1), blocks=3, strategy=strategy, profile="analytic",
        threads=1, progress=False, callbacks=[watches],
        validate=[(images[0], torch.zeros(8).long())], checkpoint=autobd.Checkpoint(tmp_path, "100 steps", keep=2),
    )  # fmt: skip
    assert len(watches.found) == STEPS // EVERY
    assert len(watches.found[0]) == devices
    assert_flat(watches.found, f"{EVERY} steps")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("devices", [1, 2])
def test_ten_calls_in_one_process(devices):
    images, found = torch.randn(40, 8, 3, 16, 16, generator=torch.Generator().manual_seed(1)), []
    for _ in range(10):
        autobd.distill(
            net(16, 0), net(4, 1), list(images), devices=devices, blocks=3, strategy="tr+dpu", profile="analytic",
            threads=1, progress=False, finish=1, recalibrate=2,
        )  # fmt: skip
        assert not workers()
        time.sleep(0.3)
        found.append([held(os.getpid())])
    assert_flat(found, "call")
