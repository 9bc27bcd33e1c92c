"""Inputs that a model's own configuration declares (timm, torchvision, transformers)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TOKENS, _SAMPLES, _FRAMES = 128, 16000, 16


def declared_example(model: nn.Module, rows: int, size: tuple[int, ...] | None = None) -> Any:
    """Inputs of `rows` rows that the model is made for, on the CPU and of any content; None if it does not say.

    Arguments:
        size: of one row instead of the model's own: (channels, height, width), or (tokens,) for a language model.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(model, "main_input_name"):
        return _of_transformers(str(model.main_input_name), config, rows, size)
    size = size or declared_size(model)
    return None if size is None else torch.empty(rows, *size)


def declared_size(model: nn.Module) -> tuple[int, ...] | None:
    """Channels, (frames,) height and width that a timm or torchvision model is made for; None if it does not say."""
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(config, dict) and "input_size" in config:
        return tuple(config["input_size"])
    module = type(model).__module__.split(".")
    if module[:2] != ["torchvision", "models"] or len(module) < 3:
        return None
    size = getattr(model, "image_size", 299 if type(model).__name__ == "Inception3" else 224)
    if len(module) == 3 or module[2] == "segmentation":
        return (3, size, size) if isinstance(size, int) else None
    return (3, _FRAMES, 224, 224) if module[2] == "video" else None


def _of_transformers(name: str, config: Any, rows: int, size: tuple[int, ...] | None) -> dict[str, Tensor] | None:
    if name == "input_ids":
        most = [v for n in ("max_position_embeddings", "n_positions") if (v := getattr(config, n, None))]
        length = size[0] if size else min([_TOKENS, *most])
        tokens = torch.arange(rows * length).remainder(config.vocab_size).view(rows, length)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if name == "pixel_values" and size is None:
        side = getattr(config, "image_size", 224)
        size = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else side))
    elif name == "input_values" and size is None:
        size = (_SAMPLES,)
    elif name == "input_features" and size is None and hasattr(config, "num_mel_bins"):
        size = (config.num_mel_bins, 2 * config.max_source_positions)
    return None if size is None else {name: torch.empty(rows, *size)}
