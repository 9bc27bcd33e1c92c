"""Batches from whatever the user has: a loader, a dataset, a tensor, any iterable of batches, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ..errors import InputError, users_code
from ..graph import Arguments, declared_example
from .draws import states

_DEFAULT_BATCH, _SMOKE_BATCH, _SMOKE_STEPS = 32, 8, 10
_NOTHING = object()
_UNREADABLE = "The data cannot be read."

ToArguments = Callable[[Any], Arguments]


class Batches:
    """Batches for several epochs; the first one can be looked at before training starts.

    Arguments:
        data: DataLoader, Dataset (of samples), tensor (rows are samples) or other iterable (of batches).
        batch_size: for a dataset or tensor; default 32.
        seed: of the order in which a dataset or tensor is shuffled.

    Errors: InputError for data of another kind, without batches, or with a `batch_size` that has no meaning.
    """

    def __init__(self, data: Any, batch_size: int | None, seed: int) -> None:
        if batch_size is not None and (
            not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1
        ):
            raise InputError(
                "batch_size= is no number of rows.", given=repr(batch_size), expected="at least 1, or None"
            )
        if isinstance(data, Tensor):
            if not data.dim():
                raise InputError("The data has no rows.", given="a tensor of no dimensions", expected="samples")
            data = TensorDataset(data)
        if isinstance(data, Dataset):
            generator = torch.Generator().manual_seed(seed)
            ordered = isinstance(data, IterableDataset)
            if isinstance(data, Sized) and not len(data):
                raise InputError("The dataset is empty.", given="0 samples", expected="at least one")
            data = DataLoader(
                data,
                batch_size or _DEFAULT_BATCH,
                shuffle=None if ordered else True,
                generator=None if ordered else generator,
            )
        elif batch_size is not None:
            raise InputError(
                "batch_size= is for a dataset or a tensor; this data comes in batches already.",
                given=f"{type(data).__name__}, batch_size={batch_size}",
                do="leave batch_size= out",
            )
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes, dict)):
            raise InputError(
                "Nothing to iterate over.",
                given=type(data).__name__,
                expected="a DataLoader, Dataset, tensor or iterable of batches",
            )
        self.data = data
        with users_code(_UNREADABLE):
            self.one_shot = iter(data) is data
        self._started: Iterator[Any] | None = None
        self._counted: int | None = None  # in an epoch that was read to its end
        self.drawn: dict[str, Any] = {}  # random states when the epoch that is read began

    @property
    def length(self) -> int | None:
        """Batches per epoch, where the data says so or an epoch has shown it."""
        try:
            return len(self.data)  # type: ignore[arg-type]
        except TypeError:
            return self._counted

    def first(self) -> Any:
        """The first batch; the first epoch starts with it."""
        self.drawn = states(self.data)
        with users_code(_UNREADABLE):
            iterator = iter(self.data)
            batch = next(iterator, _NOTHING)
        if batch is _NOTHING:
            raise InputError("The data has no batch.", given=type(self.data).__name__, expected="at least one batch")
        self._started = _chain(batch, iterator)
        return batch

    def forget(self) -> None:
        """The first batch was not read."""
        self._started = None

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of one epoch. Errors: InputError if an iterator is already used up."""
        started, self._started = self._started, None
        if started is None:
            self.drawn = states(self.data)
        batches = 0
        for batch in self.data if started is None else started:
            batches += 1
            yield batch
        self._counted = batches
        if not batches:
            kind = "an iterator that can be read once" if self.one_shot else type(self.data).__name__
            raise InputError(
                f"The data has no batch in epoch {number}.",
                given=kind,
                expected="data that can be read once per epoch",
                do="pass a DataLoader, Dataset or list, or epochs=1",
            )


def _chain(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def random_batches(model: nn.Module, example: Any, batch_size: int | None, seed: int) -> list[Arguments]:
    """Random inputs for a smoke run, shaped like `example` or as the model's own configuration declares.

    Errors: InputError if neither says what the model takes.
    """
    generator = torch.Generator().manual_seed(seed)
    if example is None:
        example = declared_example(model, batch_size or _SMOKE_BATCH)
        if example is None:
            raise InputError(
                f"{type(model).__name__} does not say what inputs it takes.",
                given="no data and no example",
                expected="data, or example= (a tensor, tuple or dict)",
            )
    arguments = Arguments.of(example, model)

    def random(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return tensor[torch.randperm(len(tensor), generator=generator)] if tensor.ndim else tensor

    return [arguments.map(random) for _ in range(_SMOKE_STEPS)]
