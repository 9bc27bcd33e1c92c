"""Seconds of a step under every strategy on real ranks, side by side: `python examples/strategies.py [--rounds N]`.

Two workloads, two ranks, one thread each: VGG-16 to a depthwise-separable one at 32 pixels, ResNet-50 to ResNet-18 at
224. The strategies take turns on the same ranks. First the blocks are timed on one rank, while another process does the
same on the other core. From these times come what each strategy should take, the stages of the last two rows, and the
efficiency: half of all blocks' time over the step.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict

import torch
import torchvision
from tabulate import tabulate
from torch import nn

import autobd
from autobd import ranks
from autobd.cluster import Cluster
from autobd.planner import Assignment, Plan
from autobd.program import Op

STRATEGIES = ("dp", "ls", "tr", "tr+dpu", "ir", "ahd")
MEASURED = ("tr, stages by block times", "tr+dpu, stages by block times")
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


# Models, inputs, and how many blocks: one for each convolution of VGG-16, else what is found.
WORKLOADS = {
    "vgg16 -> depthwise, 32 px, batch 64": (vgg, lambda: depthwise(vgg()), (64, 3, 32, 32), 13),
    "resnet50 -> resnet18, 224 px, batch 16": (
        torchvision.models.resnet50,
        torchvision.models.resnet18,
        (16, 3, 224, 224),
        None,
    ),
}


def run(workload, steps, devices, strategy="auto"):
    """The result, and the mean seconds of a step once the pipeline is full, to its end on the last rank."""
    torch.manual_seed(0)
    teacher, student, size, blocks = WORKLOADS[workload]
    data = [torch.randn(size)] * steps
    result = autobd.distill(
        teacher(), student(), data, devices=devices, strategy=strategy, blocks=blocks, threads=1,
        progress=False,
    )  # fmt: skip
    ends = list(result.trace.finished.values())[FULL:]
    return result, (ends[-1] - ends[0]) / (len(ends) - 1)


def block_times(workload, steps):
    """Seconds of a step of each teacher block and of each student block, on one rank."""
    spent = defaultdict(float)
    for event in run(workload, steps, 1)[0].trace.events:
        if event.step >= FULL and event.instruction.block is not None:
            spent[event.instruction.op is Op.TEACHER_FORWARD, event.instruction.block] += event.seconds / (steps - FULL)
    blocks = range(1 + max(block for _, block in spent))
    return [[spent[teacher, b] for b in blocks] for teacher in (True, False)]


def alone(workload, steps):
    """`block_times`, while the same runs on the other core: the mean of both."""
    command = [sys.executable, __file__, "--alone", workload, "--steps", str(steps)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = torch.tensor([json.loads(p.communicate()[0]) for p in processes])
    return found.mean(0).tolist()


def predicted(plan, times):
    """Seconds of a step, with communication and smaller batches for nothing. Where a barrier ends every step, a stage
    waits in each for the teachers before it."""
    teacher, student = times
    loads, ready = [0.0] * len(plan.devices), 0.0
    for a in plan.assignments:
        before = sum(teacher[b] for b in plan.teacher_blocks(a))
        work = before + sum(student[b] for b in a.blocks)
        for rank, rows in zip(a.ranks, a.rows, strict=True):
            loads[rank] += work * rows / plan.batch_size + (ready if plan.barrier else 0)
        ready += before
    return max(loads)


def by_block_times(strategy, rows, devices, times):
    """The best two stages."""
    blocks = range(len(times[0]))
    plans = [
        Plan(
            strategy.partition(",")[0],
            rows,
            devices,
            (Assignment((*blocks[:k],), (0,), (rows,), "relay"), Assignment((*blocks[k:],), (1,), (rows,), "relay")),
        )
        for k in blocks[1:]
    ]
    return min(plans, key=lambda plan: predicted(plan, times))


def compare(workload, rounds, steps):
    seconds, devices, found = defaultdict(list), ("cpu", "cpu"), []
    with ranks.open(Cluster(devices), threads=1) as group:
        for _ in range(rounds):
            found.append(alone(workload, steps))
            times = torch.tensor(found).median(0).values.tolist()
            plans = {name: by_block_times(name, WORKLOADS[workload][2][0], devices, times) for name in MEASURED}
            for name in (*STRATEGIES, *MEASURED):
                result, mean = run(workload, steps, group, plans.get(name, name))
                plans[name] = result.plan
                seconds[name].append(mean)
    half = sum(map(sum, times)) / 2
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        (n, 1000 * predicted(plans[n], times), 1000 * s, medians["dp"] / s, half / s, *(stages(plans[n], n)))
        for n, s in medians.items()
    ]
    print(f"\n{workload}: {rounds} rounds of {steps} steps; best: {min(medians, key=medians.get)}\n")
    headers = ["strategy", "block times say, ms", "ms a step", "speed-up over dp", "efficiency", "blocks of rank 0"]
    print(tabulate(rows, headers, "github", floatfmt=("", ".0f", ".0f", ".2f", ".2f", "")))
    print()
    table = [[b, 1000 * t, 1000 * s] for b, (t, s) in enumerate(zip(*times, strict=True))]
    print(tabulate(table, ["block", "teacher ms", "student ms"], "github", floatfmt=".0f"), flush=True)


def stages(plan, name):
    own = sorted(b for a in plan.assignments if 0 in a.ranks for b in a.blocks)
    return ["" if name in ("dp", "ir") else ", ".join(map(str, own))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(block_times(options.alone, options.steps)))
        return
    for workload in WORKLOADS:
        compare(workload, options.rounds, options.steps)


if __name__ == "__main__":
    main()
