"""The channel axis is followed through the graph, also where several axes have one size."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autobd
from autobd.blocks.dataflow import Dataflow

TO_LAST = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "torch.permute": lambda x: torch.permute(x, dims=(0, 2, 3, 1)),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis": lambda x: torch.moveaxis(x, 1, 3),
    "einsum": lambda x: torch.einsum("nchw->nhwc", x),
    "einsum with a weight": lambda x: torch.einsum("nchw, cd -> nhwd", x, torch.eye(8)),
    "transposed twice": lambda x: x.transpose(dim0=1, dim1=2).transpose(2, 3),
    "swapdims": lambda x: x.flatten(2).swapdims(1, 2).unflatten(1, (8, 8)),
    "swapaxes": lambda x: x.flatten(2).swapaxes(1, 2).unflatten(1, (8, 8)),
    "mT": lambda x: x.flatten(2).mT.unflatten(1, (8, 8)),
    "adjoint": lambda x: x.flatten(2).adjoint().unflatten(1, (8, 8)),
}


@pytest.mark.parametrize("name", TO_LAST)
def test_channels_that_were_moved_to_the_last_axis_are_found_there(name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 3)

        def forward(self, x):
            x = TO_LAST[name](self.stem(x)) * 2
            return self.head(torch.tanh(x).mean((1, 2)))

    captured = autobd.capture(Net(), torch.randn(2, 3, 8, 8))
    flow = Dataflow(captured, "output", trained=True)
    moved = [n for n in flow.order if n.name in ("mul", "tanh")]
    assert [flow.layouts.channel_axis(n) for n in moved] == [3, 3]
    assert flow.layouts.channel_axis(flow.order[0]) == 1


def test_functional_layers_say_where_channels_are():
    class Net(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.last, self.weight, self.head = last, nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 3)

        def forward(self, x):
            if self.last:
                return self.head(functional.linear(x, self.weight).mean((1, 2)))
            return self.head(functional.conv2d(x, self.weight[:, :, None, None]).mean((2, 3)))

    for last, axis in ((True, 3), (False, 1)):
        flow = Dataflow(autobd.capture(Net(last), torch.randn(2, 8, 8, 8)), "output", trained=True)
        assert flow.layouts.channel_axis(next(n for n in flow.order if n.name in ("linear", "conv2d"))) == axis


@pytest.mark.parametrize(
    ("layers", "lowest"),
    [
        ([nn.ReLU()], "ZERO"),
        ([nn.ReLU(), nn.BatchNorm2d(8)], "BOUNDED"),
        ([nn.GELU(), nn.BatchNorm2d(8), nn.MaxPool2d(2)], "BOUNDED"),
        ([nn.BatchNorm2d(8)], "UNBOUNDED"),
        ([nn.ReLU(), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)], "UNBOUNDED"),
    ],
)
def test_behind_an_activation_function_values_stay_on_one_side_until_channels_are_mixed(layers, lowest):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *layers, nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 3, 8, 8))
    flow = Dataflow(autobd.capture(model, torch.randn(2, 3, 8, 8)), "output", trained=True)
    assert flow.layouts.lowest[flow.order[len(layers)]].name == lowest


def test_a_functional_batch_norm_is_like_the_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.Linear(8, 3)

        def forward(self, x):
            norm = self.norm
            x = functional.batch_norm(functional.relu(self.conv(x)), norm.running_mean, norm.running_var)
            return self.head(x.mean((2, 3)))

    flow = Dataflow(autobd.capture(Net(), torch.randn(2, 3, 8, 8)), "output", trained=True)
    assert flow.layouts.lowest[next(n for n in flow.order if n.name == "batch_norm")].name == "BOUNDED"
