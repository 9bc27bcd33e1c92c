"""Matched against trainable adapters: `python examples/adapters.py [--epochs N] [--seeds N]`.

A teacher of each kind learns scikit-learn's digits; the same narrower (or wider) student is then trained blockwise for
equal steps with either kind of adapter at every cut. Printed: test accuracy of the assembled student, and its loss, the
mean squared error of its logits over the teacher's mean square, on test images that neither has seen.
"""

import argparse
import copy
import itertools
import statistics

import torch
from tabulate import tabulate
from torch import nn
from torch.utils.data import DataLoader

import autobd
from autobd.demo import decay, digits, fit, score


def block(a, b, stride, act, norm=True):
    """Convolution, norm, activation, twice; the next block's first convolution is all that reads its output."""
    return nn.Sequential(
        nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b) if norm else nn.Identity(), nn.ReLU(),
        nn.Conv2d(b, b, 3, 1, 1), nn.BatchNorm2d(b) if norm else nn.Identity(), act(),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions around a convolution as shortcut, so that nothing reads the input as it is."""

    def __init__(self, a, b, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU(), nn.Conv2d(b, b, 3, 1, 1), nn.BatchNorm2d(b)
        )
        self.shortcut, self.act = nn.Conv2d(a, b, 1, stride), nn.ReLU()

    def forward(self, x):
        return self.act(self.body(x) + self.shortcut(x))


class Bottleneck(nn.Module):
    """MobileNetV2's: expand, depthwise, project without an activation function."""

    def __init__(self, a, b, stride):
        super().__init__()
        inner = 4 * a
        self.layers = nn.Sequential(
            nn.Conv2d(a, inner, 1), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, b, 1), nn.BatchNorm2d(b),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def convolutional(make, width):
    """Three blocks and a classifier; cuts behind each block."""
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 10))
    return nn.Sequential(make(1, width, 1), make(width, width, 1), make(width, 2 * width, 2), head)


def dense(act, width):
    """Layers over flat images."""
    ends = [64, width, width, width]
    layers = [
        nn.Sequential(nn.Linear(a, 2 * width), nn.ReLU(), nn.Linear(2 * width, b), act())
        for a, b in itertools.pairwise(ends)
    ]
    return nn.Sequential(nn.Sequential(nn.Flatten(), layers[0]), *layers[1:], nn.Linear(width, 10))


NETWORKS = {
    "plain, ReLU": lambda w: convolutional(lambda a, b, s: block(a, b, s, nn.ReLU), w),
    "plain, SiLU": lambda w: convolutional(lambda a, b, s: block(a, b, s, nn.SiLU), w),
    "residual, ReLU": lambda w: convolutional(Residual, w),
    "bottleneck, signed": lambda w: convolutional(Bottleneck, w),
    "dense, ReLU": lambda w: dense(nn.ReLU, 2 * w),
    "dense, signed": lambda w: dense(nn.Identity, 2 * w),
}
WIDTHS = [(32, 16), (32, 8), (16, 24)]


def measure(make, widths, seed, epochs):
    """{kind: (accuracy, loss)} of the assembled student."""
    train_set, test_set = digits(seed)
    loader = DataLoader(train_set, 32, shuffle=True, generator=torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)
    teacher, student = make(widths[0]), make(widths[1])
    fit(teacher, loader, 10, "teacher", False)
    teacher.eval()
    found = {"teacher": (score(teacher, test_set), 0.0)}
    for kind in ("matched", "trainable"):
        mine = copy.deepcopy(student)
        recipe = autobd.Recipe(lr=decay, epochs=epochs, logits=False)
        cuts = [(str(i), str(i)) for i in range(3)]
        autobd.distill(teacher, mine, loader, cuts=cuts, adapters=kind, recipe=recipe, seed=seed, progress=False)
        mine.eval()
        images = test_set.tensors[0]
        with torch.no_grad():
            wanted = teacher(images)
            error = (mine(images) - wanted).square().mean() / wanted.square().mean()
        found[kind] = score(mine, test_set), float(error)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, make in NETWORKS.items():
        for widths in WIDTHS:
            runs = [measure(make, widths, seed, options.epochs) for seed in range(options.seeds)]
            row = [name, f"{widths[0]} to {widths[1]}"]
            for kind in ("teacher", "matched", "trainable"):
                row.append("/".join(f"{100 * run[kind][0]:.0f}" for run in runs))
            row += [f"{statistics.median(run[kind][1] for run in runs):.3f}" for kind in ("matched", "trainable")]
            rows.append(row)
            print(*row, flush=True)
    heads = ["network", "width", "teacher, %", "matched, %", "trainable, %", "loss matched", "loss trainable"]
    print(tabulate(rows, heads, "github", disable_numparse=True))


if __name__ == "__main__":
    main()
