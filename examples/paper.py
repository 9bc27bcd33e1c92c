"""The four workloads of the Pipe-BD paper, planned for its machine: `python examples/paper.py [--images-per-second N]`.

Speed-ups over DP on 4 A6000 at batch 256, by what the costs are made of: arithmetic alone; with memory traffic and the
time to start kernels (the roofline); with a loader that gives so many images a second; and over a DP that, as the
paper's, trains block after block and so loads all data for each. Beside them the bars of the paper's figure. Nothing is
fitted to these, and nothing runs: the models have no weights.

What is not as in the paper: its supernet trains in two rounds a step (one path for the weights, two for the
architecture), here three paths are run at once.
"""

import argparse
from dataclasses import replace

import torch
import torchvision
from models import depthwise, vgg
from tabulate import tabulate
from torch import nn
from torchvision.models.mobilenetv2 import InvertedResidual

import autobd
from autobd.cluster import Cluster
from autobd.costs import analytic
from autobd.hardware import DEVICES
from autobd.planner import plan
from autobd.planner.predict import loads_of

BATCH, DEVICE, NUMBER = 256, "A6000", 4
STRATEGIES = ("dp", "ls", "tr", "tr+dpu", "ahd")
PAPER = {  # speed-ups over DP of LS, TR, TR+DPU and TR+DPU+AHD, read from the bars
    "NAS, CIFAR-10": (1.93, 2.41, 3.08, 3.08),
    "NAS, ImageNet": (0.49, 3.03, 3.14, 4.37),
    "compression, CIFAR-10": (2.04, 5.62, 5.83, 7.38),
    "compression, ImageNet": (0.50, 3.98, 4.22, 7.56),
}


class Mixed(nn.Module):
    """Candidates for one layer of a supernet, weighted by what is searched for."""

    def __init__(self, block, kernels=(3, 5, 7)):
        super().__init__()
        convolutions = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
        inner, outer = convolutions[0].in_channels, convolutions[-1].out_channels
        self.stride, self.shortcut = block.stride, block.use_res_connect
        wide = 6 * inner

        def convolution(*shape, **options):
            return nn.Sequential(nn.Conv2d(*shape, bias=False, **options), nn.BatchNorm2d(shape[1]))

        self.paths = nn.ModuleList(
            nn.Sequential(
                convolution(inner, wide, 1), nn.ReLU6(), convolution(wide, wide, k, self.stride, k // 2, groups=wide),
                nn.ReLU6(), convolution(wide, outer, 1),
            )
            for k in kernels
        )  # fmt: skip
        self.weights = nn.Parameter(torch.zeros(len(kernels)))

    def forward(self, x):
        weights = self.weights.softmax(0)
        y = sum(w * path(x) for w, path in zip(weights, self.paths, strict=True))
        return x + y if self.shortcut else y


def mobilenet(small):
    """MobileNetV2; for small images without its first two strides."""
    model = torchvision.models.mobilenet_v2(num_classes=10 if small else 1000)
    if small:
        model.features[0][0].stride = (1, 1)
        model.features[2].conv[1][0].stride = (1, 1)
    return model


def supernet(small):
    model = mobilenet(small)
    for i, layer in enumerate(model.features):
        if isinstance(layer, InvertedResidual) and i > 1:
            model.features[i] = Mixed(layer)
            if small and i == 2:
                for path in model.features[i].paths:
                    path[2][0].stride = (1, 1)
    return model


def teacher_vgg(small):
    return vgg(10 if small else 1000, small)


def student_vgg(small):
    return depthwise(teacher_vgg(small))


WORKLOADS = {  # teacher, student, pixels, blocks
    "NAS, CIFAR-10": (mobilenet, supernet, 32, 6),
    "NAS, ImageNet": (mobilenet, supernet, 224, 6),
    "compression, CIFAR-10": (teacher_vgg, student_vgg, 32, 6),
    "compression, ImageNet": (teacher_vgg, student_vgg, 224, 6),
}


def arithmetic(split, full):
    """The costs if nothing took time but arithmetic at the device's peak."""
    rows, rate = split.student.example.rows, DEVICES[DEVICE].flops

    def seconds(block, passes):
        return passes * sum(n.meta.get("flops", 0) for n in block.graph.nodes) * BATCH / rows / rate

    free = autobd.Profile.of(
        [seconds(p.teacher, 1) for p in split.pairs], [seconds(p.student, 3) for p in split.pairs], BATCH, NUMBER
    )
    return replace(free, devices=full.devices, units=full.units)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images-per-second", type=float, default=3000, help="of the loader (default 3000)")
    rate = parser.parse_args().images_per_second
    for name, (teacher, student, pixels, blocks) in WORKLOADS.items():
        with torch.device("meta"):
            models = teacher(pixels == 32), student(pixels == 32)
        split = autobd.split(*models, torch.empty(2, 3, pixels, pixels, device="meta"), blocks=blocks)
        full = analytic(split, Cluster.of(f"{NUMBER}x{DEVICE}", torch.device("cpu")), BATCH)
        costs = {
            "arithmetic": arithmetic(split, full), "roofline": full, "and loader": replace(full, load=BATCH / rate),
        }  # fmt: skip
        steps = {kind: [plan(p, s).prediction.step for s in STRATEGIES] for kind, p in costs.items()}
        dp = plan(full, "dp")
        each = [max(BATCH / rate, max(load.total for load in loads_of(dp, a, full))) for a in dp.assignments]
        rows = [
            [s, *(f"{found[0] / found[i]:.2f}" for found in steps.values()),
             f"{sum(each) / steps['and loader'][i]:.2f}" if i else "1.00", f"{(1, *PAPER[name])[i]:.2f}",
             f"{1000 * steps['roofline'][i]:.1f}"]
            for i, s in enumerate(STRATEGIES)
        ]  # fmt: skip
        print(f"\n{name}: {len(split)} blocks; a batch takes the loader {1000 * BATCH / rate:.0f} ms")
        print(
            tabulate(
                rows,
                ["strategy", *costs, "DP loads per block", "paper", "roofline, ms a step"],
                "github",
                disable_numparse=True,
            )
        )
        for a in plan(full, "ahd").assignments:
            print(f"  ahd: blocks {a.blocks} on devices {a.ranks}, rows {a.rows}")


if __name__ == "__main__":
    main()
