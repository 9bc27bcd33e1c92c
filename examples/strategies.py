"""Seconds of a step under every strategy on real ranks, side by side: `python examples/strategies.py [--rounds N]`.

Two workloads, two ranks, one thread each: VGG-16 to a depthwise-separable one at 32 pixels, ResNet-50 to ResNet-18 at
224. The strategies take turns on the same ranks. Efficiency is half of what one rank needs for all blocks, measured
while another process does the same on the other core, over the step of the best plan.
"""

import argparse
import statistics
import subprocess
import sys
import time

import torch
import torchvision
from tabulate import tabulate
from torch import nn

import autobd
from autobd import ranks
from autobd.cluster import Cluster

STRATEGIES = ("dp", "ls", "tr", "tr+dpu", "ir", "ahd")
FULL = 4  # steps until the pipeline is full


def vgg():
    """VGG-16 for small images: one linear layer behind the convolutions."""
    model = torchvision.models.vgg16_bn()
    model.avgpool, model.classifier = nn.Identity(), nn.Linear(512, 10)
    return model


def depthwise(model):
    """`model` with every 3x3 convolution but the first as a depthwise and a pointwise one."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Conv2d) and layer.in_channels > 3 and layer.kernel_size == (3, 3):
                a, b = layer.in_channels, layer.out_channels
                parent.add_module(name, nn.Sequential(nn.Conv2d(a, a, 3, padding=1, groups=a), nn.Conv2d(a, b, 1)))
    return model


WORKLOADS = {
    "vgg16 -> depthwise, 32 px, batch 64": (
        vgg,
        lambda: depthwise(vgg()),
        (64, 3, 32, 32),
    ),
    "resnet50 -> resnet18, 224 px, batch 16": (
        torchvision.models.resnet50,
        torchvision.models.resnet18,
        (16, 3, 224, 224),
    ),
}


class Clock:
    """A loader that remembers when it was asked for each batch."""

    def __init__(self, size, steps):
        self.batch, self.steps, self.times = torch.randn(size), steps, []

    def __len__(self):
        return self.steps

    def __iter__(self):
        for _ in range(self.steps):
            self.times.append(time.perf_counter())
            yield self.batch


def step_seconds(workload, steps, devices, strategy="auto"):
    """Mean seconds of a step once the pipeline is full, and the result."""
    torch.manual_seed(0)
    teacher, student, size = WORKLOADS[workload]
    clock = Clock(size, steps)
    result = autobd.distill(teacher(), student(), clock, devices=devices, strategy=strategy, threads=1, progress=False)
    # To the end of the last step on every rank: rank 0 alone runs ahead of the others.
    return (result.history.seconds - (clock.times[FULL] - clock.times[0])) / (steps - FULL), result


def alone(workload, steps):
    """Seconds for all blocks on one rank, while the same runs on the other core: median over two processes."""
    command = [sys.executable, __file__, "--alone", workload, "--steps", str(steps)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    return statistics.mean(float(p.communicate()[0].split()[-1]) for p in processes)


def compare(workload, rounds, steps):
    seconds = {name: [] for name in (*STRATEGIES, "one rank")}
    with ranks.open(Cluster(("cpu", "cpu")), threads=1) as group:
        for _ in range(rounds):
            for name in STRATEGIES:
                median, result = step_seconds(workload, steps, group, name)
                seconds[name].append(median)
            seconds["one rank"].append(alone(workload, steps))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = min(STRATEGIES, key=medians.__getitem__)
    rows = [(n, 1000 * medians[n], medians["dp"] / medians[n], medians["one rank"] / 2 / medians[n]) for n in seconds]
    print(f"\n{workload}: {len(result.split)} blocks, {rounds} rounds of {steps} steps; best: {best}\n")
    print(
        tabulate(rows, ["strategy", "ms a step", "speed-up over dp", "efficiency"], "github", floatfmt=".2f"),
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(step_seconds(options.alone, options.steps, 1)[0])
        return
    for workload in WORKLOADS:
        compare(workload, options.rounds, options.steps)


if __name__ == "__main__":
    main()
