"""The pairs a newcomer tries first: each is verified bit for bit and trains."""

import pytest
import torch
from networks import assert_same, fingerprint
from torch import nn

import autobd


def separable(module):
    """Every 3 x 3 convolution replaced by a depthwise-separable one, in place."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Conv2d) and child.kernel_size == (3, 3):
            i, o = child.in_channels, child.out_channels
            depthwise = nn.Conv2d(i, i, 3, child.stride, 1, groups=i, bias=False)
            setattr(module, name, nn.Sequential(depthwise, nn.Conv2d(i, o, 1, bias=False)))
        else:
            separable(child)
    return module


def resnets():
    from torchvision.models import resnet18

    return resnet18(num_classes=10), separable(resnet18(num_classes=10)), [torch.randn(4, 3, 64, 64) for _ in range(3)]


def vision_transformers():
    import timm

    def make(depth):
        return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=depth, num_classes=10)

    return make(12), make(6), [torch.randn(4, 3, 64, 64) for _ in range(3)]


def berts():
    from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel

    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 6}
    teacher = BertModel(BertConfig(vocab_size=99, **sizes))
    student = DistilBertModel(DistilBertConfig(vocab_size=99, dim=32, n_heads=2, hidden_dim=64, n_layers=3))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [9], [12]])).long()
    fixed = {"token_type_ids": torch.zeros(4, 12).long(), "attention_mask": mask, "labels": torch.zeros(4)}
    batches = [{"input_ids": torch.randint(0, 99, (4, 12)), **fixed} for _ in range(3)]
    return teacher, student, batches


@pytest.mark.parametrize(("make", "blocks"), [(resnets, 6), (vision_transformers, 6), (berts, 3)])
def test_pair_is_exact_and_trains(make, blocks):
    teacher, student, batches = make()
    keys, before = list(student.state_dict()), fingerprint(teacher)
    result = autobd.distill(teacher, student, batches * 4, progress=False, recipe=autobd.Recipe(block_input="teacher"))
    assert len(result.split) >= blocks
    assert result.verification
    assert result.verification.exact, str(result.verification)
    assert_same(before, fingerprint(teacher))
    assert result.student is student
    assert list(student.state_dict()) == keys
    first, last = result.history.relative[0], result.history.relative[-1]
    assert all(b < a for a, b in zip(first, last, strict=True))
