"""Sum a block's gradients over its replicas: one flat tensor, while the next block computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..ranks import Peers
from ..ranks.waiting import Pending

AllReduce = Callable[[Sequence[Tensor]], Pending]


class GradientSum:
    """The gradients of `parameters`, on their way to and from the other replicas.

    A replica without a gradient for a parameter counts as zero; if none has one, it has none afterwards (an optimizer
    skips it, as on one rank).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], all_reduce: AllReduce) -> None:
        self._groups: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for p in parameters:
            self._groups[p.dtype].append(p)
        # For an optimizer that takes no dense ones.
        self._sparse = {id(p): p.grad.sparse_dim() for p in parameters if p.grad is not None and p.grad.is_sparse}
        self._flat = [self._packed(group) for group in self._groups.values()]
        self._pending = all_reduce(self._flat)

    def finish(self, peers: Peers) -> None:
        """Wait for the sum and set it as the gradients."""
        self._pending.result(peers.patience)
        for group, flat in zip(self._groups.values(), self._flat, strict=True):
            counts = flat[: len(group)].tolist()
            parts = torch.split(flat[len(group) :], [p.numel() for p in group])
            for p, part, count in zip(group, parts, counts, strict=True):
                total = part.view_as(p)
                if id(p) in self._sparse:
                    total = total.to_sparse(self._sparse[id(p)])
                p.grad = total if count else None

    def _packed(self, group: list[nn.Parameter]) -> Tensor:
        given = torch.tensor([float(p.grad is not None) for p in group], dtype=group[0].dtype, device=group[0].device)
        gradients = [torch.zeros_like(p).flatten() if p.grad is None else _dense(p.grad).flatten() for p in group]
        for p in group:
            p.grad = None
        return torch.cat([given, *gradients])


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient
