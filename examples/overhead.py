"""What a step costs beside the blocks' own work: `python examples/overhead.py [--steps N]`.

Programs of four blocks run as they always do, with instructions, messages, losses on their way and bookkeeping, but on
ranks whose blocks compute nothing. Also: from `distill` to the end of the first step, with two ranks and with one.
"""

import argparse
import statistics
import time
from dataclasses import fields
from functools import partial
from itertools import pairwise

import torch
from tabulate import tabulate
from torch import nn

import autobd
from autobd import ranks
from autobd.cluster import Cluster
from autobd.costs import analytic
from autobd.parts import parts_of
from autobd.planner import plan
from autobd.program import build
from autobd.runtime import Rank
from autobd.training import Batches
from autobd.training.bars import bars
from autobd.training.jobs import Job, follow, jobs
from autobd.training.loop import Loop
from autobd.training.pair import ToPair
from autobd.training.task import Task

BATCH = torch.randn(8, 16)


class EmptyBlocks(Rank):
    """Blocks hand on what they are given and learn nothing."""

    def teacher_forward(self, block, inputs, boundary):
        return boundary or (inputs.teacher[0],)

    def student_forward(self, block, *given, **options):
        self.students[block].begin()

    def student_backward(self, block, *given, **options):
        pass

    def update(self, block, *given, **options):
        pass


class EmptyJob(Job):
    def start(self, peers):
        return EmptyBlocks(self.rank, self.program, self.parts, self.seed, peers)


class Clock:
    """A loader that remembers when it was asked for each batch."""

    def __init__(self, steps):
        self.steps, self.times = steps, []

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            self.times.append(time.perf_counter())
            yield BATCH


def network():
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)))


def empty_step(group, strategy, steps):
    """Median seconds of a step with empty blocks."""
    teacher, student = network(), network()
    split = autobd.split(teacher, student, BATCH, blocks=4)
    recipe, clock = autobd.Recipe(logits=False, block_input="teacher"), Clock(steps)
    program = build(plan(analytic(split, group.cluster), strategy), split)
    given = jobs(program, parts_of(split, student, recipe), seed=0)
    given = {r: EmptyJob(**{f.name: getattr(job, f.name) for f in fields(job)}) for r, job in given.items()}
    task = Task(split, recipe, Batches(clock, None, 0), ToPair.of(teacher, student, None, None, BATCH, wanted=False))
    with bars(False, steps, "run", program.plan) as shown:
        loop = Loop(task, program, shown)
        own = given.pop(0)
        group.run(partial(loop.run, own), {r: partial(follow, job) for r, job in given.items()}, loop.what)
    return statistics.median(b - a for a, b in pairwise(clock.times[len(clock.times) // 10 :]))


def first_step(devices):
    """Seconds from the call of `distill` to the end of its first step."""
    clock, began = Clock(2), time.perf_counter()
    autobd.distill(network(), network(), clock, devices=devices, blocks=4, threads=1, progress=False)
    return clock.times[1] - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    steps = parser.parse_args().steps
    rows = []
    for devices, strategies in ((("cpu",), ("tr+dpu",)), (("cpu", "cpu"), ("tr+dpu", "tr", "dp", "ls", "ir"))):
        with ranks.open(Cluster(devices), threads=1) as group:
            rows += [(len(devices), name, 1000 * empty_step(group, name, steps)) for name in strategies]
    print(tabulate(rows, ["ranks", "strategy", "ms a step with empty blocks"], "github", floatfmt=".3f"))
    print(f"\nfirst step after {first_step(1):.1f} s on one rank, {first_step(2):.1f} s on two")


if __name__ == "__main__":
    main()
