"""`profile(split, devices, ...)`: what the blocks and links of the ranks that are there really cost."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from ..blocks import Split
from ..cluster import Cluster
from ..graph import Arguments
from ..graph.state import module_tensors, untouched
from ..hardware import Link
from ..parts import Part, parts_of
from ..ranks import Group, Peers
from ..ranks import open as open_ranks
from ..recipe import Recipe
from . import cache
from .analytic import analytic
from .curve import Curve
from .measure import MeasureBlock, Measured, MeasureLinks, medians, numbers_of_rows
from .profiles import BlockCosts, Kind, Profile


def profile(
    split: Split,
    devices: str | int | Sequence[str] | Group = "auto",
    batch_size: int | None = None,
    recipe: Recipe | None = None,
    *,
    threads: int | None = None,
    budget: float = 20.0,
    cached: bool = True,
    progress: bool = True,
) -> Profile:
    """Measure every block pair and the links between ranks, on all ranks at once.

    Arguments:
        devices: as for `distill`; devices that are not there ("4xA6000") are analysed, not measured.
        batch_size: rows of a whole batch; default: those of the example that the models were split with.
        recipe: what the blocks are trained with (optimizer and losses cost time and memory).
        threads: of each rank on a CPU.
        budget: seconds that it may take, about.
        cached: use what was measured before for the same blocks, recipe, hardware and versions, and keep it.
        progress: show a progress bar.

    Errors: InputError for unknown devices, RankError for a rank that fails.
    """
    recipe, batch = recipe or Recipe(), batch_size or split.student.example.rows
    home = next(split.student.model.parameters()).device
    if not isinstance(devices, Group):
        cluster = Cluster.of(devices, home)
        if not cluster.exists:
            return analytic(split, cluster, batch)
        opened: AbstractContextManager[Group] = open_ranks(cluster, threads=threads)
    else:
        cluster, opened, threads = devices.cluster, nullcontext(devices), devices.threads
    key = cache.key(split, cluster, batch, recipe, threads) if cached else None
    known = cache.read(key)
    if known is not None:
        return known
    if any(a.kind != "equal" and a.columns is None and a.matrix is None for p in split.pairs for a in p.adapters):
        split = split.fit(split.teacher.example)
    with opened as group, torch.inference_mode(False):
        found = _Measuring(split, group, batch, recipe, budget, progress).run()
    cache.write(key, found)
    return found


class _Measuring:
    def __init__(self, split: Split, group: Group, batch: int, recipe: Recipe, budget: float, progress: bool) -> None:
        self.split, self.group, self.batch, self.progress = split, group, batch, progress
        self.ranks = range(group.size)
        self.rows = numbers_of_rows(batch, group.size)
        self.seconds = budget / (len(split) + 1) / len(self.rows)
        student = copy.deepcopy(split.student.model).train()
        self.parts = parts_of(split, student, recipe)
        names = [_name(d) for d in group.cluster.devices]
        self.kinds = sorted(set(names))
        self.kind_of = tuple(self.kinds.index(n) for n in names)

    def run(self) -> Profile:
        teacher, found = self.split.teacher.model, []
        examples = [a.head(self.batch) for a in (self.split.teacher.example, self.split.student.example)]
        boundary: tuple[Tensor, ...] = ()
        folded: tuple[int, ...] = ()
        tensors = list(dict(module_tensors(teacher).values()).values())
        with (
            untouched(teacher, tensors=tensors),
            tqdm(
                total=len(self.parts), desc="profile", unit="block", disable=not self.progress, dynamic_ncols=True
            ) as bar,
        ):
            teacher.eval()
            for part in self.parts:
                found.append(self._block(part, boundary, folded, examples))
                with torch.no_grad():
                    given = [examples[0].tensors[i] for i in part.inputs]
                    boundary = tuple(t.detach() for t in part.teacher(*boundary, *given))
                folded = part.folded
                bar.update()
        base = analytic(self.split, Cluster(("CPU",) * len(self.ranks)), self.batch)
        within, reduce = self._links(base)
        blocks = tuple(self._costs(*pair) for pair in zip(found, base.blocks, strict=True))
        return replace(
            base,
            blocks=blocks,
            devices=self.group.cluster.devices,
            kinds=tuple(Kind(name, _memory(name, self.kind_of.count(i))) for i, name in enumerate(self.kinds)),
            kind_of=self.kind_of,
            nodes=self.group.cluster.hosts,
            within=within,
            between=within,
            reduce_within=reduce,
            reduce_between=reduce,
            source="measured",
            spread=float(torch.tensor([m.spread for b in found for m in b[0].values()]).median()),
        )

    def _block(
        self, part: Part, boundary: tuple[Tensor, ...], folded: tuple[int, ...], examples: list[Arguments]
    ) -> list[dict[int, Measured]]:
        """What every rank measures of a block pair."""
        assert part.student is not None
        sides = [
            tuple(arguments.tensors[i] for i in indices)
            for arguments, indices in zip(examples, (part.inputs, part.student.inputs), strict=True)
        ]
        job = MeasureBlock(
            copy.deepcopy(part), boundary, sides[0], sides[1], folded, self.batch, self.rows, self.seconds
        )
        return self._everywhere(job, f"block {part.block} for the profile")

    def _everywhere(self, job: Callable[[Peers], Any], what: str) -> list[Any]:
        results: dict[int, Any] = {}
        own = self.group.run(job, {r: job for r in self.ranks[1:]}, lambda rank: what, results)
        return [own, *(results[r] for r in self.ranks[1:])]

    def _links(self, base: Profile) -> tuple[Link, Link]:
        if self.group.size == 1:
            return Link(), Link()
        sizes = 1024, int(max(1e6, *(b.boundary * self.batch for b in base.blocks)))
        messages, sums = self._everywhere(MeasureLinks(sizes), "links for the profile")[0]
        number = len(self.ranks)
        # A ring all-reduce of n ranks takes 2 (n - 1) (latency + size / n / bandwidth).
        per_hop = [s / (2 * (number - 1)) for s in sums]
        return _line(sizes, messages), _line((sizes[0] / number, sizes[1] / number), per_hop)

    def _costs(self, found: list[dict[int, Measured]], base: BlockCosts) -> BlockCosts:
        by_kind = [
            {
                rows: medians([m[rows] for m, kind in zip(found, self.kind_of, strict=True) if kind == k])
                for rows in self.rows
            }
            for k in range(len(self.kinds))
        ]

        def curves(name: str) -> tuple[Curve, ...]:
            return tuple(Curve(self.rows, tuple(getattr(m[r], name) for r in self.rows)) for m in by_kind)

        saved = curves("saved")[0]
        update = tuple(m[self.rows[-1]].update for m in by_kind)
        return replace(base, teacher=curves("teacher"), student=curves("student"), update=update, saved=saved)


def _line(sizes: Sequence[float], seconds: Sequence[float]) -> Link:
    slope = max(seconds[1] - seconds[0], 1e-12) / (sizes[1] - sizes[0])
    return Link(max(seconds[0] - slope * sizes[0], 0.0), 1 / slope)


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _memory(name: str, ranks: int) -> float:
    """Bytes that one of so many ranks may use."""
    if name != "CPU":
        return float(torch.cuda.get_device_properties(0).total_memory) * 0.9
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.9 / ranks
    except (ValueError, OSError, AttributeError):
        return math.inf
