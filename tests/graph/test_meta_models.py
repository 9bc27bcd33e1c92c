"""Models on the meta device are recorded for inspection: as they would be with weights, and in no memory."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import autobd
from autobd.errors import CaptureError

TOKENS = {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
IMAGE = torch.randn(2, 3, 64, 64)
SMALL = {"vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL))


def vit():
    import timm

    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)


def resnet():
    from torchvision.models import resnet18

    return resnet18()


class SharedMemory(nn.Module):
    """Buffers and a parameter that are views of one tensor; one of them is changed in place."""

    def __init__(self):
        super().__init__()
        whole = torch.zeros(12)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("tail", whole[6:])
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.tail.add_(1)
        self.steps += 1
        return self.layer(x) + self.whole[:6] + torch.arange(6, device=self.whole.device)


MODELS = {
    "BERT": (bert, TOKENS),
    "Llama": (llama, TOKENS),
    "timm vit": (vit, IMAGE),
    "torchvision resnet18": (resnet, IMAGE),
    "shared memory": (SharedMemory, torch.randn(4, 6)),
}


def nodes(captured):
    """What a graph says, without the numbers that stand for memory."""
    stores = {}

    def store(storage):
        return stores.setdefault(storage, len(stores))

    return [
        (n.name, n.op, n.meta["path"], str(n.args), str(n.kwargs), n.meta.get("shape"), n.meta["flops"])
        + (n.meta["parameter_bytes"], n.meta["random"], n.meta["stateful"], sorted(map(store, n.meta["mutates"])))
        for n in captured.graph.nodes
    ]


@pytest.mark.parametrize("where", ["meta", "cpu"])
@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_the_model_with_weights(name, where):
    make, example = MODELS[name]
    expected = nodes(autobd.capture(make(), example))
    with torch.device("meta"):
        model = make()
    versions = [t._version for t in (*model.parameters(), *model.buffers())]
    example = torch.utils._pytree.tree_map(lambda t: t.to(where), example)
    assert nodes(autobd.capture(model, example)) == expected
    with torch.device("meta"):
        assert nodes(autobd.capture(model, example)) == expected
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert versions == [t._version for t in (*model.parameters(), *model.buffers())]


def test_a_module_that_needs_values_is_an_error():
    class Needs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x) if x.mean() > 0 else x

    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Needs())).to("meta")
    with pytest.raises(CaptureError, match=r"module '1\.0' uses the value of a tensor") as error:
        autobd.capture(model, torch.randn(4, 6))
    assert "meta device" in str(error.value)
    assert "test_meta_models.py:" in str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory from /proc")
@pytest.mark.timeout(600)
def test_seven_billion_parameters_fit_into_two_gigabytes():
    script = """
import re, torch, autobd
from transformers import LlamaConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(LlamaConfig())
assert sum(p.numel() for p in model.parameters()) > 6e9
captured = autobd.capture(model, {"input_ids": torch.zeros(1, 128, dtype=torch.long)})
assert captured.flops > 1e12 and not captured.opaque
# Not ru_maxrss: a started program inherits that of the process that started it.
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
assert peak < 2 * 2**20, f"{peak} kB"
"""
    subprocess.run([sys.executable, "-c", script], check=True)
