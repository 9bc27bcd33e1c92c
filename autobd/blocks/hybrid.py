"""A student together with channel maps that could not be folded into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..graph import Arguments
from .split import Split
from .verify import set_mode


class Hybrid(nn.Module):
    """`student` with its adapters between blocks; called like the student, returns the distilled output.

    Arguments:
        split: the split that it was trained with; student: the trained student.
        maps: (block in front of the cut, tensor at the cut) -> [channels, channels].
    """

    def __init__(self, split: Split, student: nn.Module, maps: Mapping[tuple[int, int], Tensor]) -> None:
        super().__init__()
        self.student = student
        self.adapters = nn.ParameterDict({f"{block}_{tensor}": nn.Parameter(m) for (block, tensor), m in maps.items()})
        self._split = split
        self._blocks = tuple(split.bind_student(student))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        set_mode(list(self._blocks), self.training)
        tensors = self._inputs(Arguments(args, Arguments.of(kwargs, self.student).kwargs))
        boundary: tuple[Tensor, ...] = ()
        for number, (pair, block) in enumerate(zip(self._split.pairs, self._blocks, strict=True)):
            boundary = tuple(
                adapter.map_channels(t, self.adapters[f"{number - 1}_{i}"])
                if f"{number - 1}_{i}" in self.adapters
                else t
                for i, (t, adapter) in enumerate(
                    zip(boundary, self._split.pairs[number - 1].adapters if number else (), strict=True)
                )
            )
            boundary = block(*boundary, *(tensors[i] for i in pair.student.inputs))
        return boundary[0]

    def _inputs(self, given: Arguments) -> list[Tensor]:
        """The tensors in the order of the recording, however they were passed."""
        example = self._split.student.example
        tensors = dict(zip(given.names(self.student), given.tensors, strict=True))
        wanted = example.names(self.student)
        if tensors.keys() != set(wanted):
            raise InputError(
                "The hybrid student was called with other arguments than it was split with.",
                given=given.describe(),
                expected=example.describe(),
            )
        return [tensors[name] for name in wanted]


def hybrid(split: Split, student: nn.Module, maps: Mapping[tuple[int, int], Tensor]) -> Hybrid | None:
    """The student with those of the trained `maps` that no layer took up; None if every map was folded."""
    kept = {
        (block, tensor): m.clone()
        for (block, tensor), m in maps.items()
        if not split.pairs[block].adapters[tensor].folds
    }
    if not kept:
        return None
    result = Hybrid(split, student, kept)
    result.training = student.training
    return result
