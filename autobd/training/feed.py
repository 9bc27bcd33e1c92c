"""The batches that rank 0 reads, epoch by epoch, and what is left of one when ranks go over to another program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..ranks import STEP, Header, Peers
from ..ranks.pickling import dumps
from ..ranks.waiting import Waiter
from ..runtime import Rank
from .data import Batches
from .draws import put_back, states
from .own_rows import OwnRows

_END = object()


class Feed:
    """What rank 0 reads of each batch, and the rows of the batch where that is not all of it.

    Attributes:
        epoch: its number; `done`: steps in all.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.epoch = self.done = 0
        self._in_epoch = 0
        self._left: Iterator[Any] | None = None  # of the epoch's batches
        self._order: list[list[int]] | None = None  # of the epoch, where ranks read their own rows

    def rest(self, rank: Rank, peers: Peers) -> Iterator[tuple[Any, int | None]]:
        """What is left of the epoch. Where other ranks wait for it, each batch is read on another thread, so that a
        loader that stalls is an error in time, and a rank that dies meanwhile is noticed."""
        batches = self._own(rank) if isinstance(self.batches, OwnRows) else self._whole()
        if peers.size == 1:
            yield from batches
            return

        def following() -> tuple[Any, BaseException | None]:
            try:
                return next(batches, _END), None
            except BaseException as error:
                return None, error

        waiter = Waiter()
        try:
            while True:
                what = f"rank 0 for the loader's next batch, step {self.done}"
                batch, error = waiter.submit(following, what).result(peers.patience)
                if error is not None:
                    raise error
                if batch is _END:
                    return
                yield batch
        finally:
            waiter.close()

    def used(self) -> None:
        """The last batch has been trained on."""
        self.done += 1
        self._in_epoch += 1

    def pending(self, together: int, more: int = 0) -> bool:
        """Whether, after `more` batches from here, gradients wait for others; `together`: batches of one step."""
        return (self._in_epoch + more) % together != 0

    def state(self) -> dict[str, Any]:
        """Where it is: see `go_on`."""
        began, now = self.batches.drawn, states(self.batches.data)
        return {"epoch": self.epoch, "done": self.done, "in epoch": self._in_epoch, "began": began, "now": now}

    def go_on(self, state: dict[str, Any]) -> None:
        """From where `state` was taken, of the same data: what has been read of the epoch is read again."""
        self.epoch, self.done, self._in_epoch = state["epoch"], state["done"], state["in epoch"]
        if not self.batches.one_shot:
            self.batches.forget()
        if self._in_epoch:
            put_back(state["began"], self.batches.data)
            if isinstance(self.batches, OwnRows):
                self._order = self.batches.order()
            else:
                self._left = self.batches.epoch(self.epoch)
                for passed in range(self._in_epoch):
                    if next(self._left, _END) is _END:
                        raise CheckpointError(
                            "The checkpoint was made further on in the data than this data goes.",
                            given=f"{passed} batches",
                            expected=f"at least {self._in_epoch}",
                            do="pass the data as it was then",
                        )
        put_back(state["now"], self.batches.data)

    def end_epoch(self) -> None:
        self.epoch += 1
        self._left, self._order, self._in_epoch = None, None, 0

    def _whole(self) -> Iterator[tuple[Any, None]]:
        if self._left is None:
            self._left = self.batches.epoch(self.epoch)
        for batch in self._left:
            yield batch, None

    def _own(self, rank: Rank) -> Iterator[tuple[Any, int]]:
        assert isinstance(self.batches, OwnRows)
        if self._order is None:
            self._order = self.batches.order()
        order = self._order[self._in_epoch :]
        if not order:  # no step will ask for it
            return
        for sender in rank.links.announce.values():
            sender.send(Header(STEP), [as_bytes(order)])
        spans = [rank.program.span(0, len(batch)) for batch in order]
        read = self.batches.reader.read([batch[a:b] for batch, (a, b) in zip(order, spans, strict=True)])
        yield from zip(read, map(len, order), strict=True)


def as_bytes(value: Any) -> Tensor:
    """Any object as a tensor that can be sent."""
    return torch.frombuffer(bytearray(dumps(value)), dtype=torch.uint8)
