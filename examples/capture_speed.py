"""Seconds to capture and split well-known models: `python examples/capture_speed.py`."""

import statistics
import time

import timm
import torch
import torchvision
from tabulate import tabulate
from transformers import BertConfig, BertModel

import autobd


def seconds(function):
    """First run, and median of five more."""
    times = []
    for _ in range(6):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


def main():
    torch.set_num_threads(1)
    image = torch.randn(8, 3, 224, 224)
    tokens = {
        "input_ids": torch.zeros(8, 128, dtype=torch.long),
        "attention_mask": torch.ones(8, 128, dtype=torch.long),
    }
    resnets = torchvision.models.resnet34(), torchvision.models.resnet18()
    jobs = {
        "capture torchvision resnet50": (autobd.capture, torchvision.models.resnet50(), image),
        "capture timm vit_base": (autobd.capture, timm.create_model("vit_base_patch16_224"), image),
        "capture bert-base": (autobd.capture, BertModel(BertConfig()), tokens),
        "split resnet34 -> resnet18": (lambda pair, example: autobd.split(*pair, example), resnets, image),
    }
    rows = [(name, *seconds(lambda job=job: job[0](*job[1:]))) for name, job in jobs.items()]
    print(tabulate(rows, ["", "first, s", "median, s"], "simple", floatfmt=".2f"))


if __name__ == "__main__":
    main()
