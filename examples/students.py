"""Students that no library has, for `model_coverage.py`."""

from torch import nn
from torchvision.models import vgg16


def vgg16_depthwise():
    """VGG-16 with depthwise-separable convolutions in place of its 3x3 convolutions, the first one aside."""
    model = vgg16()
    for i, layer in enumerate(model.features):
        if isinstance(layer, nn.Conv2d) and layer.in_channels > 3:
            channels, out = layer.in_channels, layer.out_channels
            depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
            model.features[i] = nn.Sequential(depthwise, nn.Conv2d(channels, out, 1))
    return model
