"""Which submodules stay whole in a recording, as `call_module` nodes that keep `train()` and `eval()` alive."""

from __future__ import annotations

import torch
from torch import nn

_OPEN = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def is_leaf(module: nn.Module) -> bool:
    """True for `torch.nn` layers (containers and Transformers aside) and their subclasses, for script modules, and for
    modules without children that hold parameters.

    A childless module without parameters (a rotary table) is opened: what it takes from an activation may be a dtype
    alone, and as a leaf it would depend on all of it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if isinstance(module, _OPEN):
        return False
    if any(_is_torch_layer(base) for base in type(module).__mro__):
        return True
    return not module._modules and bool(module._parameters)


def _is_torch_layer(cls: type) -> bool:
    return cls is not nn.Module and issubclass(cls, nn.Module) and cls.__module__.startswith("torch.nn.modules.")
