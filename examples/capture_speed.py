"""Seconds to capture and split well-known models, and how they grow: `python examples/capture_speed.py`."""

import statistics
import time

import timm
import torch
import torchvision
from tabulate import tabulate
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import autobd


def seconds(function):
    """First run, and median of five more."""
    times = []
    for _ in range(6):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return times[0], statistics.median(times[1:])


def growth(layers):
    """Nodes of a narrow Llama of that many layers, median seconds to capture it, and milliseconds for each node."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=100, num_hidden_layers=layers
    )
    model, tokens = LlamaForCausalLM(config), {"input_ids": torch.zeros(8, 32, dtype=torch.long)}
    nodes = len(autobd.capture(model, tokens).graph.nodes)
    _, median = seconds(lambda: autobd.capture(model, tokens))
    return layers, nodes, median, 1000 * median / nodes


def main():
    torch.set_num_threads(1)
    image = torch.randn(8, 3, 224, 224)
    tokens = {
        "input_ids": torch.zeros(8, 128, dtype=torch.long),
        "attention_mask": torch.ones(8, 128, dtype=torch.long),
    }
    resnets = torchvision.models.resnet50(), torchvision.models.resnet18()
    jobs = {
        "capture torchvision resnet50": (autobd.capture, torchvision.models.resnet50(), image),
        "capture timm vit_base": (autobd.capture, timm.create_model("vit_base_patch16_224"), image),
        "capture bert-base": (autobd.capture, BertModel(BertConfig()), tokens),
        "capture timm nasnetalarge, 331 px": (
            autobd.capture,
            timm.create_model("nasnetalarge"),
            torch.randn(8, 3, 331, 331),
        ),
        "split resnet50 -> resnet18": (lambda pair, example: autobd.split(*pair, example), resnets, image),
    }
    rows = [(name, *seconds(lambda job=job: job[0](*job[1:]))) for name, job in jobs.items()]
    print(tabulate(rows, ["", "first, s", "median, s"], "simple", floatfmt=".2f"))
    rows = [growth(layers) for layers in (8, 16, 32, 64)]
    print("\n" + tabulate(rows, ["Llama layers", "nodes", "median, s", "ms per node"], "simple", floatfmt=".2f"))


if __name__ == "__main__":
    main()
