"""What stages of consecutive units cost on devices of one kind, as running sums: `StageCosts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..costs import BlockCosts, Profile, at_rows
from .predict import RECEIVING, SENDING


@dataclass(frozen=True)
class StageCosts:
    """By [devices of a stage - 1, unit, or border of units]; with links by [between hosts, the same].

    Attributes:
        alone: seconds of each unit, without links; infinite where its share does not fit, whatever the memory.
        ahead: running sums of seconds until the boundary is made, at the borders.
        reduced: running sums of seconds of the all-reduces; `edge`: seconds for the boundary at each border.
        fits: whether a stage from one border to another fits into memory; None: all do.
    """

    alone: Tensor
    ahead: Tensor
    reduced: Tensor
    edge: Tensor
    fits: Tensor | None

    @classmethod
    def of(cls, profile: Profile, memory: float, most: int) -> StageCosts:
        """For stages of up to `most` devices that may hold `memory` bytes each."""
        kind, devices = profile.kind_of[0], torch.arange(1, most + 1)
        rows = [-(-profile.batch_size // k) for k in devices.tolist()]
        row = torch.tensor(rows, dtype=torch.float64)[:, None]
        borders = torch.tensor([0, *accumulate(len(u) for u in profile.units)])

        def sums(values: Tensor) -> Tensor:
            """Running sums over blocks, at the borders of units; blocks are the last axis."""
            return torch.nn.functional.pad(values.cumsum(-1), (1, 0))[..., borders]

        def each(value: Callable[[BlockCosts], float]) -> Tensor:
            return torch.tensor([value(b) for b in profile.blocks], dtype=torch.float64)

        ahead = at_rows([b.teacher[kind] for b in profile.blocks], rows).T
        behind = at_rows([b.student[kind] for b in profile.blocks], rows).T + each(lambda b: b.update[kind])
        saved = at_rows([b.saved for b in profile.blocks], rows).T
        never = ~(ahead + behind + saved).isfinite()
        ahead, behind = (t.masked_fill(~t.isfinite(), 0.0) for t in (ahead, behind))  # a difference of sums is finite
        boundary, gradients = each(lambda b: b.boundary), each(lambda b: b.gradient_bytes)
        border = torch.nn.functional.pad(boundary, (1, 0))[borders] * row
        border[:, -1] = 0.0
        rings = [
            link.latency * (gradients > 0) + gradients / devices[:, None] / link.bandwidth
            for link in (profile.reduce_within, profile.reduce_between)
        ]
        edges = [border / link.bandwidth + link.latency * (border > 0) for link in (profile.within, profile.between)]
        held = sums(
            each(lambda b: b.teacher_bytes + b.student_bytes + b.gradient_bytes + b.state_bytes) + boundary * row
        )
        return cls(
            sums(ahead + behind).diff().masked_fill(sums(never.double()).diff() > 0, torch.inf),
            sums(ahead),
            2 * (devices[:, None] - 1) * sums(torch.stack(rings)),
            torch.stack(edges),
            _fits(profile, memory, held, saved.masked_fill(never, torch.inf), border, row[:, 0]),
        )


def _fits(profile: Profile, memory: float, held: Tensor, saved: Tensor, border: Tensor, rows: Tensor) -> Tensor | None:
    """Whether a stage from one border to another fits into memory (`predict.rank_bytes`).

    Arguments:
        held: running sums of what stays, at borders; `saved`: what each block needs while it works.
        border: bytes of the boundary at each border; `rows`: of a device.
    """
    given = profile.input_bytes * rows
    waiting = (RECEIVING - 1) * given  # at a first stage
    highest = held[:, -1] + saved.amax(1) + (RECEIVING + SENDING) * border.amax(1) + given + waiting
    if highest.isfinite().all() and (highest <= memory).all():
        return None
    of_unit = torch.stack([saved[:, list(u)].amax(1) for u in profile.units], 1)
    fits = []
    for k, of_k in enumerate(of_unit):
        most = torch.nn.functional.pad(of_k, (1, 0)).expand(held.shape[1], -1).triu(1).cummax(1).values
        edges = RECEIVING * border[k, :, None] + SENDING * border[k, None, :]
        bytes_ = held[k, None, :] - held[k, :, None] + most + edges + given[k]
        bytes_[0] += waiting[k]
        fits.append(bytes_.isfinite() & (bytes_ <= memory))
    return torch.stack(fits)
