"""Weights that several student blocks use (an embedding that is also the output layer, layers that share weights)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from torch import nn

from ..errors import InputError
from .carve import Block

Policy = Literal["auto", "first", "together"]


@dataclass(frozen=True)
class Tie:
    """Parameters of the student that the same several blocks use.

    Attributes:
        parameters: their keys in the student; `blocks`: numbers of the blocks, rising.
        aliases: further keys of the same parameters, where several modules hold one.
        together: True: every block's gradient counts and these blocks stay in one stage; False: trained in the first
            block alone, later ones use a copy that is refreshed at epoch ends.
    """

    parameters: tuple[str, ...]
    blocks: tuple[int, ...]
    together: bool
    aliases: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = _shown(self.parameters) + (f" (also {_shown(self.aliases)})" if self.aliases else "")
        how = (
            "trained by all of them, in one stage"
            if self.together
            else f"trained in block {self.blocks[0]}, elsewhere a copy that is refreshed at epoch ends"
        )
        return f"student: {names}: used in blocks {', '.join(map(str, self.blocks))}, {how}"


def _shown(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def find_ties(student: nn.Module, blocks: list[Block], policy: Policy) -> tuple[Tie, ...]:
    """The ties between student `blocks`.

    Arguments:
        policy: "first", "together", or "auto": first, unless that would leave a block with nothing to train.

    Errors: InputError for another policy.
    """
    if policy not in ("auto", "first", "together"):
        raise InputError("ties= names no policy.", given=repr(policy), expected='"auto", "first" or "together"')
    trainable = {n for n, p in student.named_parameters() if p.requires_grad}
    used: dict[str, list[int]] = defaultdict(list)
    for number, block in enumerate(blocks):
        for name in block.parameters:
            if name in trainable:
                used[name].append(number)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, where in used.items():
        if len(where) > 1:
            groups[tuple(where)].append(name)
    own = {b for where in used.values() for b in where[:1]}  # blocks that train something under "first"
    starved = {b for where in used.values() for b in where} - own
    return tuple(
        Tie(
            tuple(names),
            where,
            policy == "together" or (policy == "auto" and not starved.isdisjoint(where)),
            _aliases(student, names),
        )
        for where, names in groups.items()
    )


def _aliases(student: nn.Module, names: list[str]) -> tuple[str, ...]:
    tied = {id(student.get_parameter(name)) for name in names}
    every = student.named_parameters(remove_duplicate=False)
    return tuple(name for name, p in every if id(p) in tied and name not in names)
