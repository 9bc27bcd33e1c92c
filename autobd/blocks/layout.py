"""What the axes and values of a recorded tensor are: its channel axis, and how low its values reach.

Both are followed through the graph from the layers that fix them (a convolution, a `Linear`, an activation function).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

_MOVES = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "T", "mT", "H", "mH", "adjoint", "t")
_WIDTH = ("out_channels", "out_features", "num_features", "num_channels", "embedding_dim", "normalized_shape")
_SECOND_AXIS = (_ConvNd, _NormBase, nn.GroupNorm)
_LAST_AXIS = (nn.Linear, nn.LayerNorm, nn.RMSNorm)
_SECOND_AXIS_FUNCTIONS = ("conv1d", "conv2d", "conv3d", "batch_norm", "instance_norm", "group_norm")
_LAST_AXIS_FUNCTIONS = ("linear", "layer_norm", "rms_norm", "embedding")


class Lowest(IntEnum):
    """How low values reach: after a ReLU a student cannot give a negative target, nor mixtures of channels."""

    UNBOUNDED = 0
    BOUNDED = 1  # GELU, SiLU: above a small negative number; a batch norm of these or of a ReLU: on one side of some
    ZERO = 2


_LOWEST_OF_LAYER: dict[type[nn.Module], Lowest] = {
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Hardsigmoid, nn.Softplus, nn.Softmax), Lowest.ZERO),
    **dict.fromkeys((nn.GELU, nn.SiLU, nn.Hardswish, nn.ELU, nn.Mish), Lowest.BOUNDED),
}
_LOWEST_OF_FUNCTION = {
    **dict.fromkeys(
        ("relu", "relu6", "sigmoid", "hardsigmoid", "softplus", "softmax", "abs", "square", "exp"), Lowest.ZERO
    ),
    **dict.fromkeys(("gelu", "silu", "hardswish", "elu", "mish"), Lowest.BOUNDED),
}
_ADDS = ("add", "__add__", "__radd__", "__iadd__", "cat", "concat", "stack")
_MULTIPLIES = ("mul", "__mul__", "__rmul__", "__imul__")
_PASSES = (
    *_MOVES,
    *("view", "reshape", "flatten", "unflatten", "contiguous", "clone", "detach", "alias"),
    *("squeeze", "unsqueeze", "getitem", "_getitem", "__getitem__", "chunk", "split", "roll", "to", "float", "dropout"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool2d"),
    *("mean", "amax", "max", "interpolate", "expand", "repeat", "pad"),
)
_PASSING_LAYERS = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten, nn.Unflatten, nn.Upsample),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d),
)


class Layouts:
    """Channel axis and lowest value of every tensor of `nodes` (in order), whose layers are in `modules` by path."""

    def __init__(self, nodes: list[fx.Node], modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._axes: dict[fx.Node, int] = {}
        self.lowest: dict[fx.Node, Lowest] = {}
        self.mixed: set[fx.Node] = set()  # several rows of it belong to one sample, and do not lie together
        for node in nodes:
            if "dims" in node.meta:
                if _mixes(node, self.mixed):
                    self.mixed.add(node)
                axis = self._axis(node)
                if axis is not None:
                    self._axes[node] = axis
            self.lowest[node] = self._lowest_of(node)

    def channel_axis(self, node: fx.Node) -> int:
        """The axis of the tensor (1 or more) that holds channels; by custom where the graph does not tell."""
        if self._axes.get(node, 0) > 0:
            return self._axes[node]
        dims = len(node.meta["dims"])
        for user in node.users:  # what reads it may say
            layer = self._modules.get(str(user.target)) if user.op == "call_module" else None
            if user.args[:1] == (node,):
                if isinstance(layer, _SECOND_AXIS) or _name(user) in _SECOND_AXIS_FUNCTIONS:
                    return 1
                if isinstance(layer, _LAST_AXIS) or _name(user) in _LAST_AXIS_FUNCTIONS:
                    return dims - 1
        return 2 if dims == 3 else 1

    def activates(self, node: fx.Node) -> bool:
        """Whether a node is an activation function."""
        if node.op == "call_module":
            return isinstance(self._modules[str(node.target)], tuple(_LOWEST_OF_LAYER))
        return _name(node).rstrip("_") in _LOWEST_OF_FUNCTION

    def _axis(self, node: fx.Node) -> int | None:
        sizes = [c for _, c in node.meta["dims"]]
        if not sizes:
            return None
        if node.op == "call_module":
            layer = self._modules[str(node.target)]
            for name in _WIDTH:
                if (width := getattr(layer, name, None)) is not None:
                    return _axis_of(width, sizes, 1 if isinstance(layer, _SECOND_AXIS) else len(sizes) - 1)
        name = _name(node)
        if name in _SECOND_AXIS_FUNCTIONS:
            return 1
        if name in _LAST_AXIS_FUNCTIONS:
            return len(sizes) - 1
        inputs = [n for n in node.all_input_nodes if n in self._axes]
        if not inputs:
            return None
        source = inputs[-1]
        axis, before = self._axes[source], [c for _, c in source.meta["dims"]]
        if name in _MOVES:
            return _moved(axis, len(before), node)
        if name == "einsum":
            return _axis_by_letter(axis, source, node)
        for source in reversed(inputs):
            axis, before = self._axes[source], [c for _, c in source.meta["dims"]]
            if axis == len(before) - 1 and before[-1] == sizes[-1]:
                return len(sizes) - 1
            if len(sizes) > axis and before[axis] == sizes[axis]:
                return axis
        return None

    def _lowest_of(self, node: fx.Node) -> Lowest:
        inputs = [self.lowest[n] for n in node.all_input_nodes if "dims" in n.meta]
        known = min(inputs, default=Lowest.UNBOUNDED)
        if node.op == "call_module":
            layer = self._modules[str(node.target)]
            layer = [layer, *layer.children()][-1]  # a norm with an activation function inside
            if isinstance(layer, _PASSING_LAYERS):
                return known
            if isinstance(layer, _BatchNorm):
                return min(known, Lowest.BOUNDED)
            return next((low for kind, low in _LOWEST_OF_LAYER.items() if isinstance(layer, kind)), Lowest.UNBOUNDED)
        name = _name(node)
        if name.rstrip("_") in _LOWEST_OF_FUNCTION and not name.startswith("__"):
            return _LOWEST_OF_FUNCTION[name.rstrip("_")]
        if name in _ADDS or name.rstrip("_") in _ADDS:
            constants = [a for a in node.args if isinstance(a, (int, float))]
            return known if all(c >= 0 for c in constants) else Lowest.UNBOUNDED
        if name in _MULTIPLIES or name.rstrip("_") in _MULTIPLIES:  # squeeze and excitation: times a sigmoid
            return known if len(inputs) > 1 and max(inputs) == Lowest.ZERO else Lowest.UNBOUNDED
        if name == "batch_norm":
            return min(self.lowest[node.all_input_nodes[0]], Lowest.BOUNDED)
        return known if name in _PASSES else Lowest.UNBOUNDED


def _name(node: fx.Node) -> str:
    """Of the function or method that a node calls, or of the attribute that it reads."""
    return str(node.args[1] if node.target is getattr else getattr(node.target, "__name__", node.target))


def _axis_of(width: Any, sizes: list[int], usual: int) -> int | None:
    width = width[-1] if isinstance(width, (tuple, list)) else width
    if usual < len(sizes) and sizes[usual] == width:
        return usual
    return next((i for i in range(len(sizes) - 1, 0, -1) if sizes[i] == width), None)


def _moved(axis: int, dims: int, node: fx.Node) -> int | None:
    """Where `axis` is after an operation on one tensor that moves axes: a stand-in without equal sizes shows it."""
    if len(node.all_input_nodes) != 1:
        return None
    stand_in = torch.empty(tuple(range(2, 2 + dims)), device="meta")
    first, *args = fx.node.map_arg(node.args, lambda _: stand_in)
    call: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    moved: torch.Tensor = call(first, *args, **node.kwargs)
    return tuple(moved.shape).index(2 + axis)


def _mixes(node: fx.Node, mixed: set[fx.Node]) -> bool:
    """Whether the rows of a tensor are not in the order of the batch, as after [T, N, C] -> [TN, C]."""
    for source in node.all_input_nodes:
        dims = source.meta.get("dims", ())
        batch = next((i for i, (scale, _) in enumerate(dims) if scale), None)
        if batch is None or not node.meta["dims"] or not node.meta["dims"][0][0]:
            continue
        merged = dims[batch][0] < node.meta["dims"][0][0]
        if source in mixed or (merged and any(size != 1 for _, size in dims[:batch])):
            return True
    return False


def _axis_by_letter(axis: int, source: fx.Node, node: fx.Node) -> int | None:
    """Where `axis` of `source`, or what it is contracted to, is after an einsum (recorded as an equation and its
    operands, however it was written)."""
    equation, *operands = node.args
    taken, _, given = str(equation).replace(" ", "").partition("->")
    letters = taken.split(",")[operands.index(source)]
    if "." in letters:
        return None
    new = [letter for letter in given if letter not in letters]
    if letters[axis] in given:
        return given.index(letters[axis])
    return given.index(new[0]) if len(new) == 1 else None
