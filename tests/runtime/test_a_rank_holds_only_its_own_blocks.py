"""Peak memory of a rank other than the caller's, as its own process reads it (Linux)."""

import sys

import pytest
import torch
from torch import nn

import autobd
from autobd import ranks
from autobd.cluster import Cluster
from autobd.planner import Assignment, Plan

BLOCKS, WIDTH = 4, 2400
MEGABYTES = WIDTH * WIDTH * 4 / 2**20  # of one layer
DEVICES = ("cpu", "cpu")


def model(layers, seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))) for _ in range(BLOCKS))
    )


def growth(group, path, strategy):
    """By how many megabytes the peak of rank 1 has grown after a step of `strategy`."""

    def peak(peers):
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        path.write_text(line.split()[1])

    def read():
        group.run(lambda peers: None, {1: peak})
        return int(path.read_text()) / 1024

    before = read()
    cuts = [(str(b), str(b)) for b in range(BLOCKS - 1)]
    recipe = autobd.Recipe(optimizer=torch.optim.SGD)
    autobd.distill(
        model(2, 0), model(1, 1), [torch.randn(2, WIDTH)], cuts=cuts, strategy=strategy, recipe=recipe, devices=group,
        progress=False,
    )  # fmt: skip
    return read() - before


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_holds_only_its_own_blocks(tmp_path):
    one = (Assignment((0, 1, 2), (0,), (2,), "relay"), Assignment((3,), (1,), (2,), "relay"))
    every = (Assignment((0, 1, 2, 3), (1,), (2,), "store"),)
    found = []
    with ranks.open(Cluster(DEVICES), timeout=30, threads=1) as group:  # the smaller first: peaks do not shrink
        for assignments in (one, every):
            found.append(growth(group, tmp_path / "peak", Plan("mine", 2, DEVICES, assignments)))
    own = 3 * MEGABYTES  # of a block: two layers of the teacher, one of the student
    assert found[0] < 4 * own  # the message, the block, and a layer on its way from one to the other
    assert sum(found) > 3 * found[0]
