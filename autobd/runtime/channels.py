"""The trained channel maps of adapters: one into each block, one out of the block before."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..blocks import Split
from ..blocks.folding import folded

Place = tuple[int, int]  # block in front of the cut, tensor at the cut


class ChannelMaps:
    """Maps for the split's trainable adapters; at the start a map in and a map out undo each other as far as they can.

    Arguments:
        split: with fitted adapters; `like`: a tensor whose dtype and device the maps have.
    """

    def __init__(self, split: Split, like: Tensor) -> None:
        self.adapters = {
            (block, i): adapter
            for block, pair in enumerate(split.pairs)
            for i, adapter in enumerate(pair.adapters)
            if adapter.kind == "trainable"
        }
        start = {place: adapter.initial_map.to(like.device) for place, adapter in self.adapters.items()}
        self.inward = {place: nn.Parameter(m.clone().to(like)) for place, m in start.items()}
        self.outward = {place: nn.Parameter(torch.linalg.pinv(m).to(like)) for place, m in start.items()}

    def of_block(self, block: int) -> list[nn.Parameter]:
        """The maps that are trained with `block`."""
        inward = [m for (before, _), m in self.inward.items() if before + 1 == block]
        return inward + [m for (own, _), m in self.outward.items() if own == block]

    def leave(self, block: int, tensor: int, value: Tensor) -> Tensor:
        """A student's tensor behind `block`, with the teacher's channels where the map is trained."""
        place = block, tensor
        if place not in self.outward:
            return value
        return self.adapters[place].map_channels(value, self.outward[place])

    def enter(self, block: int, tensor: int, value: Tensor) -> Tensor:
        """What `block` gets of a teacher's tensor in the student's layout."""
        place = block - 1, tensor
        return self.adapters[place].map_channels(value, self.inward[place]) if place in self.inward else value

    def between(self) -> dict[Place, Tensor]:
        """For each trained place the map from the student's tensor to what its next block is to get."""
        return {place: (self.inward[place] @ self.outward[place]).detach() for place in self.inward}

    def folded(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The student's `weights` that take up a map, with it multiplied in."""
        between = self.between()
        return folded(weights, {self.adapters[place].folds: m for place, m in between.items()})
