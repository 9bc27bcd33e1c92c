"""Batches of other sizes than the first one: sequences of another length, images of another size."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch

from ..blocks import Split
from ..blocks.resize import resized
from ..graph import Arguments
from ..parts.form import Form, forms_of

_MANY = 32


class Sizes:
    """The sizes of inputs that have come so far; 0 are those that the models were split with.

    Arguments:
        batched: see `Program`.
    """

    def __init__(self, split: Split, batched: Sequence[Collection[int]]) -> None:
        self._split, self._batched = split, batched
        self._numbers = {self._key((split.teacher.example, split.student.example)): 0}

    def of(self, pair: Sequence[Arguments]) -> tuple[int, Mapping[int, Form] | None]:
        """The number of a batch's sizes and, where they are new, the blocks for them.

        Errors: InputError if the models do something else at these sizes (see `resized`).
        """
        key = self._key(pair)
        if key in self._numbers:
            return self._numbers[key], None
        forms = forms_of(resized(self._split, pair))
        number = self._numbers[key] = len(self._numbers)
        if number == _MANY:
            warnings.warn(
                f"inputs of {number} sizes so far, and the models are recorded again for each: pad to fewer lengths",
                stacklevel=2,
            )
        return number, forms

    def _key(self, pair: Sequence[Arguments]) -> tuple[torch.Size, ...]:
        return tuple(
            t.shape[1:] if i in batched else t.shape
            for arguments, batched in zip(pair, self._batched, strict=True)
            for i, t in enumerate(arguments.tensors)
        )
