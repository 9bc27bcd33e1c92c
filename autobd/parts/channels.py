"""The trained channel maps of adapters: one into each block, one out of the block before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..blocks import Split
from ..blocks.adapters import Adapter
from ..blocks.folding import folded

Place = tuple[int, int]  # block in front of the cut, tensor at the cut


class ChannelMaps:
    """The maps of one rank's blocks; at the start a map in and a map out undo each other as far as they can.

    Arguments:
        sides: for each block of the rank the fitted adapters before and behind it.
        like: a tensor whose dtype and device the maps have.
    """

    def __init__(self, sides: Mapping[int, tuple[tuple[Adapter, ...], tuple[Adapter, ...]]], like: Tensor) -> None:
        self.adapters: dict[Place, Adapter] = {}
        self.inward: dict[Place, nn.Parameter] = {}
        self.outward: dict[Place, nn.Parameter] = {}
        for block, (before, behind) in sides.items():
            for cut, adapters in ((block - 1, before), (block, behind)):
                for i, adapter in enumerate(adapters):
                    if adapter.kind == "trainable":
                        self.adapters[cut, i] = adapter
                        start = adapter.initial_map.to(like.device)
                        if cut == block:
                            self.outward[cut, i] = nn.Parameter(torch.linalg.pinv(start).to(like))
                        else:
                            self.inward[cut, i] = nn.Parameter(start.clone().to(like))

    def leave(self, block: int, tensor: int, value: Tensor) -> Tensor:
        """A student's tensor behind `block`, with the teacher's channels where the map is trained."""
        place = block, tensor
        if place not in self.outward:
            return value
        return self.adapters[place].map_channels(value, self.outward[place])

    def enter(self, block: int, tensor: int, value: Tensor) -> Tensor:
        """What `block` gets of a tensor in the student's layout and the teacher's channels."""
        place = block - 1, tensor
        return self.adapters[place].map_channels(value, self.inward[place]) if place in self.inward else value

    def trained_with(self, block: int) -> dict[str, nn.Parameter]:
        """The maps that are trained with `block`, by names that no key of a student has."""
        return {
            f"{side} {cut} {i}": m
            for side, maps, own in (("in", self.inward, block - 1), ("out", self.outward, block))
            for (cut, i), m in maps.items()
            if cut == own
        }


def between(split: Split, tensors: Mapping[str, Tensor]) -> dict[Place, Tensor]:
    """For each trained place the map from the student's tensor to what its next block is to get; `tensors` as from
    `ChannelMaps.tensors`, of all blocks."""
    return {
        (block, i): (tensors[f"in {block} {i}"] @ tensors[f"out {block} {i}"]).detach()
        for block, pair in enumerate(split.pairs)
        for i, adapter in enumerate(pair.adapters)
        if adapter.kind == "trainable"
    }


def plain_weights(split: Split, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The student's weights that take up a trained map, with it multiplied in."""
    maps = {split.pairs[block].adapters[i].folds: m for (block, i), m in between(split, tensors).items()}
    return folded(tensors, maps)
