"""Every rank loads its own rows of a map-style dataset, in the order that rank 0 draws, instead of being sent them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import InputError
from ..program import Program
from .data import Batches
from .draws import states
from .pair import Pair

Order = list[list[Any]]  # the dataset's indices, batch by batch


@dataclass(frozen=True)
class Reader:
    """How a rank reads rows: what is sent to it.

    Attributes:
        dataset: map-style; `options`: of a DataLoader, beside the order; `to_pair`: from a batch to what it gives.
    """

    dataset: Dataset[Any]
    options: dict[str, Any]
    to_pair: Callable[[Any], Pair]

    def read(self, order: Iterable[Sequence[Any]]) -> Iterator[Any]:
        """The batches of these indices; those without any are left out."""
        return iter(DataLoader(self.dataset, batch_sampler=[list(b) for b in order if b], **self.options))


class OwnRows(Batches):
    """Batches of which every rank loads its rows. Arguments as for `Batches`, and `to_pair` as in `Reader`.

    Errors: InputError for data that is not a map-style dataset in batches.
    """

    def __init__(self, data: Any, batch_size: int | None, seed: int, to_pair: Callable[[Any], Pair]) -> None:
        super().__init__(data, batch_size, seed)
        loader = self.data
        if (
            not isinstance(loader, DataLoader)
            or isinstance(loader.dataset, IterableDataset)
            or loader.batch_sampler is None
        ):
            raise InputError(
                "Not every rank can load its own rows of this data.",
                given=type(data).__name__,
                expected="a map-style dataset, or a DataLoader of one that makes batches",
                do="leave own_rows= out: rank 0 then loads and sends each rank its rows",
            )
        names = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor")
        self.reader = Reader(loader.dataset, {name: getattr(loader, name) for name in names}, to_pair)
        # Drawn as the loader itself would: from its generator, and as often.
        self._order: DataLoader[Any] = DataLoader(
            _Numbers(), batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator
        )
        self._drawn: Order | None = None

    def later(self, to_pair: Callable[[Any], Pair]) -> OwnRows:
        """The same data for a training after this one, with other pairs."""
        other = copy.copy(self)
        other.reader, other._drawn = replace(self.reader, to_pair=to_pair), None
        return other

    def first(self) -> Any:
        self.drawn = states(self.data)
        self._drawn = list(self._order)
        if not self._drawn:
            return super().first()  # refuses
        return next(self.reader.read(self._drawn[:1]))

    def order(self) -> Order:
        """The indices of the next epoch."""
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            self.drawn = states(self.data)
        return list(self._order) if drawn is None else drawn

    def forget(self) -> None:
        self._drawn = None


class RowsOf:
    """One rank's rows, step by step."""

    def __init__(self, reader: Reader, program: Program, rank: int) -> None:
        self._reader, self._program, self._rank = reader, program, rank
        self._batches: Iterator[Any] = iter(())

    def start(self, order: Order) -> None:
        """Begin an epoch."""
        spans = [self._program.span(self._rank, len(batch)) for batch in order]
        self._batches = self._reader.read([batch[a:b] for batch, (a, b) in zip(order, spans, strict=True)])

    def of(self, batch: int) -> Pair | None:
        """The rank's rows of the next batch, which has `batch` rows in all; None if none are its own."""
        first, last = self._program.span(self._rank, batch)
        return self._reader.to_pair(next(self._batches)) if first < last else None


class _Numbers(Dataset[Any]):
    """A dataset that gives its indices back."""

    def __getitem__(self, index: Any) -> Any:
        return index
