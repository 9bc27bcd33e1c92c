"""Models that several examples use."""

import torchvision
from torch import nn


def vgg(classes=10, small=True):
    """VGG-16; for small images with one linear layer behind the convolutions."""
    model = torchvision.models.vgg16_bn(num_classes=classes)
    if small:
        model.avgpool, model.classifier = nn.Identity(), nn.Linear(512, classes)
    return model


def depthwise(model):
    """`model` with every 3x3 convolution but the first as a depthwise and a pointwise one."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Conv2d) and layer.in_channels > 3 and layer.kernel_size == (3, 3):
                a, b = layer.in_channels, layer.out_channels
                parent.add_module(name, nn.Sequential(nn.Conv2d(a, a, 3, padding=1, groups=a), nn.Conv2d(a, b, 1)))
    return model
