"""The blocks that candidates make: each with weights of its own, also where the student has the same layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..blocks import Split
from ..blocks.candidates import with_module
from ..graph.state import copied
from ..recipe import Recipe
from .part import Part, parts_of


def candidate_parts(
    split: Split,
    student: nn.Module,
    recipe: Recipe,
    recomputed: Collection[int],
    parts: list[Part],
    values: Mapping[str, Tensor],
) -> list[Part]:
    """The candidates of `split`, with the teachers of `parts`.

    Arguments:
        student: a copy of the student, as training begins; `recomputed`: as for `parts_of`.
        values: by `name_of`, what training has already changed.
    """
    found = []
    for index, candidate in enumerate(split.candidates):
        model = copied(with_module(student, candidate.path, candidate.module)).train()
        with torch.no_grad():
            for key, tensor in (*model.named_parameters(), *model.named_buffers()):
                if name_of(split, index, key) in values:
                    tensor.copy_(values[name_of(split, index, key)])
        own, base = parts_of(candidate.split, model, recipe, recomputed)[candidate.block], parts[candidate.block]
        assert own.student is not None
        learner = replace(own.student, prefix=name_of(split, index, ""))
        found.append(replace(base, where=f"{base.where}, candidate {candidate.number}", student=learner))
    return found


def name_of(split: Split, index: int, key: str) -> str:
    """What training calls a tensor of candidate number `index` of `split`, and no tensor of the student."""
    candidate = split.candidates[index]
    return f"candidate {candidate.block} {candidate.number} {key}"
