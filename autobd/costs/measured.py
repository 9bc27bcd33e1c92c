"""`profile(split, devices, ...)`: what the blocks and links of the ranks that are there really cost."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from ..blocks import Split
from ..cluster import Cluster
from ..graph.randomness import same_randomness
from ..graph.state import copied, module_tensors, untouched
from ..hardware import Link
from ..parts import Part, parts_of
from ..parts.candidates import candidate_parts
from ..ranks import Group, Peers
from ..ranks import open as open_ranks
from ..recipe import Recipe
from . import cache
from .analytic import analytic
from .curve import Curve
from .links import MeasureLinks
from .measure import Boundary, MeasureBlocks, Measured, medians, numbers_of_rows
from .profiles import BlockCosts, Kind, Profile

_LOADING = 3.0  # seconds


def profile(
    split: Split,
    devices: str | int | Sequence[str] | Group = "auto",
    batch_size: int | None = None,
    recipe: Recipe | None = None,
    *,
    loader: Iterable[Any] | None = None,
    known: Profile | None = None,
    shares: Collection[int] = (),
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
        loader: to measure how long it takes for a batch (`Profile.load`), at most three seconds; default: nothing.
        known: a profile of the same to add to: only `shares` that it lacks are measured.
        shares: numbers of rows to measure at; without `known`, beside those of even shares.
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
    load = known.load if known is not None and loader is None else _load(loader)
    rows = set(shares) if known is not None else {*numbers_of_rows(batch, len(cluster.devices)), *shares}
    known = known or cache.read(key)
    rows -= set(known.blocks[0].saved.rows if known is not None else ())
    if known is not None and not rows:
        return replace(known, load=load)
    if any(a.kind != "equal" and a.columns is None and a.matrix is None for p in split.pairs for a in p.adapters):
        split = split.fit(split.teacher.example)
    with opened as group, torch.inference_mode(False), same_randomness(split.teacher.model, split.student.model):
        found = _Measuring(split, group, batch, recipe, sorted(rows), budget, progress).run(known)
    cache.write(key, found)
    return replace(found, load=load)


def _load(loader: Iterable[Any] | None) -> float:
    """Seconds from one batch to the next, once the first one is there."""
    if loader is None:
        return 0.0
    batches = iter(loader)
    next(batches, None)
    started, number = time.perf_counter(), 0
    for _ in batches:
        number += 1
        if time.perf_counter() - started > _LOADING:
            break
    return (time.perf_counter() - started) / max(number, 1)


class _Measuring:
    def __init__(
        self,
        split: Split,
        group: Group,
        batch: int,
        recipe: Recipe,
        rows: Sequence[int],
        budget: float,
        progress: bool,
    ) -> None:
        self.split, self.group, self.batch, self.progress = split, group, batch, progress
        self.ranks = range(group.size)
        self.examples = [a.head(batch) for a in (split.teacher.example, split.student.example)]
        self.rows = tuple(rows)
        student = copied(split.student.model).train()
        own = replace(copy.deepcopy(recipe), accumulate=1)  # losses may count their calls
        self.parts = parts_of(split, student, own)
        self.candidates = candidate_parts(split, student, own, (), self.parts, {})
        names = [_name(d) for d in group.cluster.devices]
        self.kinds = sorted(set(names))
        self.kind_of = tuple(self.kinds.index(n) for n in names)
        self.memory = [_memory(name, self.kind_of.count(i)) for i, name in enumerate(self.kinds)]
        self.base = analytic(split, Cluster(("CPU",) * group.size), batch)
        self.seconds = budget / (len(self.rows) + 1)

    def run(self, known: Profile | None) -> Profile:
        teacher = self.split.teacher.model
        tensors = list(dict(module_tensors(teacher).values()).values())
        with (
            untouched(teacher, tensors=tensors),
            tqdm(
                total=len(self.parts) * len(self.rows),
                desc="profile",
                unit="block",
                disable=not self.progress,
                dynamic_ncols=True,
            ) as bar,
        ):
            teacher.eval()
            found = self._all(bar.update)
        blocks = tuple(self._costs(*pair) for pair in zip(found, self.base.blocks, strict=True))
        if known is not None:
            return replace(known, blocks=tuple(a.joined(b) for a, b in zip(known.blocks, blocks, strict=True)))
        within, between = self._links()
        return replace(
            self.base,
            blocks=blocks,
            devices=self.group.cluster.devices,
            kinds=tuple(Kind(name, memory) for name, memory in zip(self.kinds, self.memory, strict=True)),
            kind_of=self.kind_of,
            nodes=self.group.cluster.hosts,
            within=within[0],
            between=between[0],
            reduce_within=within[1],
            reduce_between=between[1],
            source="measured",
            spread=float(torch.tensor([m.spread for b in found for m in b[0].values()]).median()),
        )

    def _all(self, told: Callable[[int], Any]) -> list[list[dict[int, Measured]]]:
        """What every rank measures, by block; as many blocks at once as fit well into memory."""
        found: list[list[dict[int, Measured]]] = []
        boundary: Boundary = ()
        folded: tuple[int, ...] = ()
        start = 0
        for stop in self._ends():
            window = self.parts[start:stop]
            measured = self._window(window, boundary, folded, told)
            if len(window) > 1 and any(math.isinf(m.student) for b in measured for rank in b for m in rank.values()):
                measured = []
                for part in window:
                    measured += self._window([part], boundary, folded, lambda blocks: None)
                    boundary, folded = self._through([part], boundary)
            else:
                boundary, folded = self._through(window, boundary)
            found += measured
            start = stop
        return found

    def _ends(self) -> list[int]:
        """One past the last block of each window."""
        ends, held, most = [], 0.0, min(self.memory) / 2
        for b, costs in enumerate(self.base.blocks):
            own = costs.teacher_bytes + costs.student_bytes + costs.gradient_bytes + costs.state_bytes
            own += costs.boundary * self.batch + costs.saved.at(self.batch)
            if b and held + own > most:
                ends.append(b)
                held = 0.0
            held += own
        return [*ends, len(self.parts)]

    def _through(self, parts: Sequence[Part], boundary: Boundary) -> tuple[Boundary, tuple[int, ...]]:
        """The boundary behind teachers, and how many rows of each of its tensors belong to one of the batch."""
        for part in parts:
            with torch.no_grad():
                given = [self.examples[0].tensors[i] for i in part.inputs]
                boundary = tuple(t.detach() for t in part.teacher(*boundary, *given))
        return boundary, parts[-1].folded

    def _window(
        self, parts: Sequence[Part], boundary: Boundary, folded: tuple[int, ...], told: Callable[[int], Any]
    ) -> list[list[dict[int, Measured]]]:
        """What every rank measures of consecutive block pairs, by block."""
        tensors = [tuple(example.tensors) for example in self.examples]
        candidates = tuple(c for c in self.candidates if c.block in {p.block for p in parts})
        job = MeasureBlocks(
            tuple(parts), candidates, boundary, tensors[0], tensors[1], folded, self.batch, self.rows,
            self.seconds * len(parts) / len(self.parts),
        )  # fmt: skip
        what = f"blocks {parts[0].block} to {parts[-1].block} for the profile"
        return [list(of_block) for of_block in zip(*self._everywhere(job, what, partial(job, told=told)), strict=True)]

    def _everywhere(
        self, job: Callable[[Peers], Any], what: str, own_job: Callable[[Peers], Any] | None = None
    ) -> list[Any]:
        results: dict[int, Any] = {}
        own = self.group.run(own_job or job, {r: job for r in self.ranks[1:]}, lambda rank: what, results)
        return [own, *(results[r] for r in self.ranks[1:])]

    def _links(self) -> tuple[tuple[Link, Link], tuple[Link, Link]]:
        """Of messages and all-reduces, within a host and between hosts."""
        hosts = self.group.cluster.hosts
        own, others = (tuple(r for r in self.ranks if (hosts[r] == hosts[0]) == same) for same in (True, False))
        within = self._link(own[1], own) if len(own) > 1 else None
        between = self._link(others[0], tuple(self.ranks)) if others else None
        free = Link(), Link()
        return within or between or free, between or within or free

    def _link(self, peer: int, ranks: tuple[int, ...]) -> tuple[Link, Link]:
        sizes = 1024, int(max(1e6, *(b.boundary * self.batch for b in self.base.blocks)))
        messages, sums = self._everywhere(MeasureLinks(sizes, peer, ranks), "links for the profile")[0]
        # A ring all-reduce of n ranks takes 2 (n - 1) (latency + size / n / bandwidth).
        per_hop = [s / (2 * (len(ranks) - 1)) for s in sums]
        return _line(sizes, messages), _line((sizes[0] / len(ranks), sizes[1] / len(ranks)), per_hop)

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
        recomputed = None
        if base.recomputed is not None:
            recomputed = saved.extended().times(base.recomputed.values[0] / base.saved.values[0])
        return replace(
            base,
            teacher=tuple(c.extended() for c in curves("teacher")),
            student=tuple(c.extended() for c in curves("student")),
            update=update,
            saved=saved,
            recomputed=recomputed,
            passing=curves("passing")[0].extended(),
        )


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
