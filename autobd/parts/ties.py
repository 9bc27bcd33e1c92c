"""Which block trains a tied weight, and the copies that other blocks use of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ..blocks import Split


def stale_copies(split: Split, parameters: Mapping[str, nn.Parameter]) -> list[dict[str, Tensor]]:
    """For each block the frozen copies it uses of weights that an earlier block trains."""
    copies: list[dict[str, Tensor]] = [{} for _ in range(len(split))]
    for tie in split.ties:
        for block in () if tie.together else tie.blocks[1:]:
            for name in tie.parameters:
                copies[block][name] = nn.Parameter(parameters[name].detach().clone(), requires_grad=False)
    return copies


def trained_names(split: Split, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """For each block the parameters that its optimizer updates; a tied one belongs to the first block that uses it."""
    elsewhere = {(name, block) for tie in split.ties for block in tie.blocks[1:] for name in tie.parameters}
    return [
        [n for n in pair.student.parameters if parameters[n].requires_grad and (n, block) not in elsewhere]
        for block, pair in enumerate(split.pairs)
    ]
