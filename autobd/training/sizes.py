"""Batches of other sizes than the first one: sequences of another length, images of another size."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence

import torch

from ..blocks import Split
from ..blocks.resize import resized
from ..errors import InputError
from ..graph import Arguments
from ..parts.form import Form, forms_of
from ..program.build import batched

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
        for n, c in enumerate(self._split.candidates, len(self._split)):
            forms[n] = forms_of(resized(c.split, pair))[c.block]
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
            for arguments, batched in zip(pair[:2], self._batched[:2], strict=True)
            for i, t in enumerate(arguments.tensors)
        )


def check_batch(pair: Sequence[Arguments], split: Split) -> None:
    """Errors: InputError for a batch that cannot be used, whatever its sizes."""
    check_like(pair, split)
    Sizes(split, batched(split)).of(pair)


def check_like(pair: Sequence[Arguments], split: Split) -> None:
    """A recording holds for the example's structure, dtypes and constants (sizes may differ: see `Sizes`).

    Errors: InputError for the teacher's and the student's arguments if they differ from those.
    """
    for whose, given, captured in zip(("teacher", "student"), pair[:2], (split.teacher, split.student), strict=True):
        example, rows, batch = captured.example, captured.example.rows, given.rows
        same = (
            given.names_equal(example)
            and len(given.tensors) == len(example.tensors)
            and given.constants == example.constants
            and all(
                a.dtype == b.dtype
                and a.ndim == b.ndim
                and (not b.ndim or (a.shape[0] == batch) == (b.shape[0] == rows) or a.shape == b.shape)
                for a, b in zip(given.tensors, example.tensors, strict=True)
            )
        )
        if not same or batch < 1:
            raise InputError(
                f"A batch does not fit the {whose} as it was recorded.",
                given=given.describe(),
                expected=f"{example.describe()}, with any number of rows",
                do="give every batch the same structure, or set inputs=(for_teacher, for_student)",
            )
