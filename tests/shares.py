"""Random models in known parts, random plans, and blockwise distillation over row intervals in plain PyTorch."""

import copy
import hashlib
import math
from fractions import Fraction
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from autobd.planner import Assignment, Plan

SIDE, TOKENS, FEATURES, OUTPUTS = 4, 5, 3, 2


class Part(nn.Module):
    """Reads what the part before gives, perhaps an earlier part's first tensor and a mask; gives one or two tensors."""

    def __init__(self, image, before, after, norm, dropout, gate=None, side=None, second=None, shared=None):
        super().__init__()
        self.image = image

        def linear(a, b):
            return nn.Conv2d(a, b, 3, padding=1) if image else nn.Linear(a, b)

        self.mix = linear(before, after) if shared is None else shared
        self.gated = None if gate is None else linear(gate, after)
        self.side = None if side is None else linear(side, after)
        self.norm = (nn.BatchNorm2d(after) if image else nn.LayerNorm(after)) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.second = None if second is None else linear(after, second)

    def forward(self, x, gate=None, side=None, mask=None):
        y = self.mix(x)
        if gate is not None:
            y = y + self.gated(gate)
        if side is not None:
            y = y + self.side(side)
        y = self.drop(functional.gelu(self.norm(y)))
        if mask is not None:
            y = y * mask.unsqueeze(1 if self.image else -1)
        return y if self.second is None else (y, self.second(y))


class Model(nn.Module):
    """`parts` one after another; part `i` reads part `reads[i]` too (None: no other), and the mask if `masked[i]`."""

    def __init__(self, parts, reads, masked, width):
        super().__init__()
        self.parts, self.reads, self.masked = nn.ModuleList(parts), reads, masked
        self.head = nn.Linear(width, OUTPUTS)

    def forward(self, x, mask=None):
        given = [(x,)]
        for i in range(len(self.parts)):
            side = given[self.reads[i] + 1][0] if self.reads[i] is not None else None
            given.append(self.block(i, given[-1], side, mask))
        return given[-1][0]

    def block(self, i, given, side, mask):
        x, gate = given if len(given) == 2 else (given[0], None)
        out = self.parts[i](x, gate, side, mask if self.masked[i] else None)
        if i + 1 == len(self.parts):
            out = self.head(out.mean((2, 3) if self.parts[i].image else 1))
        return out if isinstance(out, tuple) else (out,)

    @property
    def cuts(self):
        """Names of the places behind all parts but the last."""
        return [f"parts.{i}.second" if p.second is not None else f"parts.{i}" for i, p in enumerate(self.parts[:-1])]


@st.composite
def pairs(draw, image, tied=False):
    """A teacher and a student in as many parts; with `tied` two parts of the student share a layer."""
    count = draw(st.integers(3 if tied else 2, 4))
    reads = [draw(st.sampled_from([None, *range(i - 1)])) if i > 1 else None for i in range(count)]
    masked = [draw(st.booleans()) for _ in range(count)]
    second = [i + 1 < count and draw(st.booleans()) for i in range(count)]
    first, again = sorted(draw(st.permutations(range(1, count)))[:2]) if tied else (None, None)
    models = []
    for whose in ("teacher", "student"):
        torch.manual_seed(draw(st.integers(0, 99)))
        widths = [4] * count if tied else draw(st.lists(st.sampled_from([3, 4, 6]), min_size=count, max_size=count))
        seconds = [(draw(st.sampled_from([2, 5])) if s else None) for s in second]
        parts = []
        for i in range(count):
            parts.append(
                Part(
                    image,
                    widths[i - 1] if i else FEATURES,
                    widths[i],
                    draw(st.booleans()),
                    draw(st.sampled_from([0.0, 0.3])),
                    seconds[i - 1] if i else None,
                    widths[reads[i]] if reads[i] is not None else None,
                    seconds[i],
                    parts[first].mix if whose == "student" and i == again else None,
                )
            )
        models.append(Model(parts, reads, masked, widths[-1]).double())
    if draw(st.booleans()):
        models[1].parts[draw(st.integers(0, count - 1))].requires_grad_(False)
    return tuple(models)


@st.composite
def batches(draw, image):
    torch.manual_seed(draw(st.integers(0, 99)))
    place = (SIDE, SIDE) if image else (TOKENS,)
    rows = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    return [
        {
            "x": torch.randn(n, FEATURES, *place).double() if image else torch.randn(n, *place, FEATURES).double(),
            "mask": (torch.rand(n, *place) > 0.3).double(),
        }
        for n in rows
    ]


@st.composite
def plans(
    draw, blocks, devices, kinds=("relay", "prefix", "store", "mixed"), apart=(), replicas=True, microbatched=True
):
    """Random plans; `apart[b]` False keeps block `b` with the one before."""
    world, rows = len(devices), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(kinds))
    free = [b for b in range(1, blocks) if b >= len(apart) or apart[b]]
    starts = [0] if kind == "store" else [0, *(b for b in free if draw(st.booleans()) or draw(st.booleans()))]
    if kind == "relay":
        starts = starts[:world]
    groups = list(pairwise([*starts, blocks]))
    order = draw(st.permutations(range(world)))
    spare, before, assignments = world - len(groups), (), []
    for number, (a, b) in enumerate(groups):
        if kind == "relay":
            most = min(rows, 1 + spare if replicas else 1)
            count = max(draw(st.integers(1, most)), draw(st.integers(1, most)))
            ranks, order, spare = tuple(order[:count]), order[count:], spare - count + 1
        else:
            count = draw(st.integers(1, min(world, rows) if replicas else 1))
            ranks = tuple(draw(st.permutations(range(world)))[:count])
        relay = kind == "relay" or (kind == "mixed" and number and not set(before) & set(ranks) and draw(st.booleans()))
        source = "store" if kind == "store" else "relay" if relay else "prefix"
        cuts = sorted(draw(st.permutations(range(1, rows)))[: count - 1])
        shares = tuple(y - x for x, y in pairwise([0, *cuts, rows]))
        parts = draw(st.integers(1, min(shares))) if microbatched and draw(st.booleans()) else 1
        assignments.append(Assignment(tuple(range(a, b)), ranks, shares, source, parts, draw(st.booleans())))
        before = ranks
    if kind == "mixed":
        assignments = draw(st.permutations(assignments))
    return Plan("mine", rows, tuple(devices), tuple(assignments))


def shares(assignment, rows):
    """First and one-past-last row of each share of a batch of `rows` rows."""
    total, done, ends = sum(assignment.rows), 0, [0]
    for own in assignment.rows:
        done += own
        ends.append(math.ceil(Fraction(done * rows, total)))
    return list(pairwise(ends))


def microbatches(assignment, rows):
    """The same, each in `assignment.microbatches` parts: (which replica, first row, one past the last)."""
    m, found = assignment.microbatches, []
    for replica, (a, b) in enumerate(shares(assignment, rows)):
        ends = [a + math.ceil(Fraction(i * (b - a), m)) for i in range(m + 1)]
        found += [(replica, *ends) for ends in pairwise(ends)]
    return found


def key(seed, step, block, share):
    digest = hashlib.blake2b(repr((seed, step, block, 0, share)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Serial:
    """Blockwise distillation of two `Model`s, share after share; trains `student` in place.

    Arguments:
        adapters: of each cut, as fitted: the maps that fix what the student is to give, or that training starts from.
        together: the tied layer is trained by both of its blocks; else by the first, others use a copy of it that is as
            old as the epoch.
    """

    def __init__(self, teacher, student, adapters, plan, recipe, own_input, together=False, seed=0):
        self.teacher, self.student = copy.deepcopy(teacher).eval(), student
        student.train()
        self.adapters, self.plan, self.recipe, self.own_input, self.seed = adapters, plan, recipe, own_input, seed
        self.moved = False  # whether blocks have begun to see the student's own boundary
        self.blocks, self.scales, self.losses = len(student.parts), [None] * len(student.parts), []
        self.assignment = {b: a for a in plan.assignments for b in a.blocks}
        self.inward, self.outward = {}, {}
        for place, adapter in adapters.items():
            if adapter.kind == "trainable":
                start = adapter.initial_map.double()
                self.inward[place] = nn.Parameter(start.clone())
                self.outward[place] = nn.Parameter(torch.linalg.pinv(start))
        seen, groups = set(), []
        self.stale = [{} for _ in range(self.blocks)]
        for i in range(self.blocks):
            own = {id(p): p for m in self._modules(i) for p in m.parameters() if p.requires_grad}
            if not together:
                self.stale[i] = {
                    n: p.detach().clone()
                    for n, p in student.parts[i].named_parameters()
                    if id(p) in seen and p.requires_grad
                }
            groups.append(
                [
                    *(p for k, p in own.items() if k not in seen),
                    *(m for (before, _), m in self.inward.items() if before + 1 == i),
                    *(m for (before, _), m in self.outward.items() if before == i),
                ]
            )
            seen |= set(own)
        self.groups = groups
        self.optimizers = [recipe.optimizer(g, lr=self._lr(i, 0.0)) if g else None for i, g in enumerate(groups)]

    def train(self, batches, epochs):
        total = len(batches) * epochs
        for _ in range(epochs):
            for batch in batches:
                progress = len(self.losses) / total
                if self._share(progress) and self.losses and not self.moved:
                    self._refresh()
                self.moved = self.moved or self._share(progress) > 0
                self._step(batch, progress)
            self._refresh()
        self._fold()
        return self.losses

    def _refresh(self):
        for i, stale in enumerate(self.stale):
            current = dict(self.student.parts[i].named_parameters())
            for name, copied in stale.items():
                copied.copy_(current[name].detach())

    def _share(self, progress):
        return self.own_input(progress) if callable(self.own_input) else float(self.own_input)

    def _modules(self, i):
        return [self.student.parts[i], *([self.student.head] if i + 1 == self.blocks else [])]

    def _lr(self, i, progress):
        return self.recipe.lr(i, progress) if callable(self.recipe.lr) else self.recipe.lr

    def _step(self, batch, progress):
        step, rows, mask = len(self.losses), len(batch["x"]), batch["mask"]
        reads = self.teacher.reads
        known, taught = [(batch["x"],)], []
        with torch.no_grad():
            for i in range(self.blocks):
                side = known[reads[i] + 1][0] if reads[i] is not None else None
                known.append(self.teacher.block(i, known[-1], side, mask))
                taught.append([self._adapted(i, t, x) for t, x in enumerate(known[-1])])
        own, losses = [], []
        for i in range(self.blocks):
            if self.scales[i] is None:
                self.scales[i] = [t.square().mean() if t.any() else torch.ones(()) for t in taught[i]]
            source = self._source(own, taught, progress)
            outputs, loss_sum = [], 0.0
            for share, (replica, a, b) in enumerate(microbatches(self.assignment[i], rows)):
                if a == b:
                    continue
                buffers = {n: v.clone() for n, v in self.student.parts[i].named_buffers()}
                given = (
                    [self._entering(i - 1, t, x[a:b]) for t, x in enumerate(source[i - 1])] if i else [batch["x"][a:b]]
                )
                side = self._entering(reads[i], 0, source[reads[i]][0][a:b]) if reads[i] is not None else None
                torch.manual_seed(key(self.seed, step, i, share))
                out = self._student(i, given, side, mask[a:b])
                out = [self._leaving(i, t, x) for t, x in enumerate(out)]
                parts = [
                    (x - y[a:b]).square().flatten(1).mean(1).mean() / n
                    for x, y, n in zip(out, taught[i], self.scales[i], strict=True)
                ]
                loss = torch.stack(parts).mean()
                weight = (b - a) / rows
                if loss.requires_grad:
                    (loss if (a, b) == (0, rows) else loss * weight).backward()
                loss_sum += loss.item() * weight
                outputs.append([x.detach() for x in out])
                if replica:
                    for name, buffer in self.student.parts[i].named_buffers():
                        buffer.copy_(buffers[name])
            own.append([x[0] if len(x) == 1 else torch.cat(x) for x in zip(*outputs, strict=True)])
            losses.append(loss_sum)
        for i, (group, optimizer) in enumerate(zip(self.groups, self.optimizers, strict=True)):
            if optimizer is None:
                continue
            for settings in optimizer.param_groups:
                settings["lr"] = self._lr(i, progress)
            if self.recipe.clip is not None:
                nn.utils.clip_grad_norm_(group, self.recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
        self.losses.append(tuple(losses))

    def _source(self, own, taught, progress):
        """What the next block is made from: the student's own boundaries, the teacher's, or a mixture."""
        share = self._share(progress)
        if share == 0:
            return taught
        both = zip(taught, own, strict=False)
        return [[torch.lerp(t, s, share) if share < 1 else s for t, s in zip(*b, strict=True)] for b in both]

    def _student(self, i, given, side, mask):
        part, stale = self.student.parts[i], self.stale[i]
        if not stale:
            return self.student.block(i, tuple(given), side, mask)
        fixed = copy.copy(self.student)  # with the old weights in place of those that an earlier block trains

        class Old(nn.Module):
            image = part.image

            def forward(self, *arguments):
                return functional_call(part, stale, arguments)

        fixed._modules = {**self.student._modules, "parts": nn.ModuleList(self.student.parts)}
        fixed.parts[i] = Old()
        return fixed.block(i, tuple(given), side, mask)

    def _adapted(self, cut, t, x):
        """The teacher's tensor as the student is to give it."""
        adapter = self.adapters.get((cut, t))
        if adapter is None or adapter.kind != "matched":
            return x
        x = x.movedim(adapter.teacher.channels + 1, -1)
        x = x[..., adapter.columns] if adapter.columns is not None else x @ adapter.matrix.T
        return x.movedim(-1, adapter.student.channels + 1).contiguous()

    def _mapped(self, maps, cut, t, x):
        if (cut, t) not in maps:
            return x
        axis = self.adapters[cut, t].student.channels + 1
        return (x.movedim(axis, -1) @ maps[cut, t].T).movedim(-1, axis)

    def _leaving(self, i, t, x):
        return self._mapped(self.outward, i, t, x)

    def _entering(self, cut, t, x):
        return self._mapped(self.inward, cut, t, x)

    def _fold(self):
        for (cut, t), inward in self.inward.items():
            own = (inward @ self.outward[cut, t]).detach()
            part = self.student.parts[cut + 1]
            with torch.no_grad():
                layer = part.mix if t == 0 else part.gated
                layer.weight.copy_(torch.einsum("oc...,cd->od...", layer.weight, own))


def adapters_of(split):
    """The adapters of a split by (block, which of its part's tensors)."""
    return {
        (b, t): pair.adapters[i]
        for b, pair in enumerate(split.pairs[:-1])
        for t, i in enumerate(pair.student.distilled)
    }
