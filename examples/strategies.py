"""What a step of every strategy was predicted to take, and takes: `python examples/strategies.py [--rounds N]`.

Three workloads on two ranks, one thread each: VGG-16 to a depthwise-separable one at 32 pixels, with a block for each
convolution; ResNet-50 to ResNet-18 at 224 pixels; BERT with 6 layers to 3. The blocks are measured first, on both ranks
at once; the plans and what they should take follow from that, before anything is run (`autobd.bench`).
"""

import argparse
from statistics import median

import torch
import torchvision
from models import depthwise, vgg
from transformers import BertConfig, BertModel

import autobd


def bert(layers):
    return BertModel(
        BertConfig(hidden_size=384, num_hidden_layers=layers, num_attention_heads=12, intermediate_size=1536)
    )


# Teacher, student, an example, and how many blocks (None: what is found).
WORKLOADS = {
    "vgg16 -> depthwise, 32 px, batch 64": (vgg, lambda: depthwise(vgg()), lambda: torch.randn(64, 3, 32, 32), 13),
    "resnet50 -> resnet18, 224 px, batch 16": (
        torchvision.models.resnet50,
        torchvision.models.resnet18,
        lambda: torch.randn(16, 3, 224, 224),
        None,
    ),
    "bert 6 -> 3 layers, 64 tokens, batch 32": (
        lambda: bert(6),
        lambda: bert(3),
        lambda: {"input_ids": torch.randint(1000, (32, 64)), "attention_mask": torch.ones(32, 64, dtype=torch.int64)},
        None,
    ),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--workloads", default="vgg,resnet,bert")
    options = parser.parse_args()
    times, peaks = {}, {}
    for name, (teacher, student, example, blocks) in WORKLOADS.items():
        if not any(name.startswith(wanted) for wanted in options.workloads.split(",")):
            continue
        torch.manual_seed(0)
        found = autobd.bench(
            teacher(), student(), example(), devices=["cpu"] * 2, threads=1, rounds=options.rounds, steps=options.steps,
            blocks=blocks,
        )  # fmt: skip
        print(f"\n{name}\n{found}", flush=True)
        times |= {(name, s): t / found.predicted[s] - 1 for s, t in found.measured.items()}
        peaks |= {
            (name, s, f"rank {rank}"): found.memory[s][rank] / said - 1
            for s, plan in found.plans.items()
            for rank, said in enumerate(plan.prediction.memory)
        }
    for what, errors in (("step times", times), ("peak memory", peaks)):
        sizes = {key: abs(e) for key, e in errors.items()}
        worst = max(sizes, key=sizes.get)
        print(f"{what}: {len(sizes)} predictions, off by {median(sizes.values()):.1%} (median), at most "
              f"{sizes[worst]:.1%} ({', '.join(worst)})")  # fmt: skip


if __name__ == "__main__":
    main()
