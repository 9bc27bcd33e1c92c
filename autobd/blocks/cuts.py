"""Cut candidates of one model: the positions where one activation crosses, or a few where there is no such position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import fx

from ..errors import SplitError, nearest
from ..tables import shape
from .dataflow import Dataflow
from .layout import Lowest

_GAP = 0.2  # share of the FLOPs without a single-tensor cut from which on several tensors may cross
_MOST_TENSORS = 6

Value = tuple[fx.Node, int]


@dataclass(frozen=True)
class Boundary:
    """One tensor that crosses a cut.

    Attributes:
        node: what makes it.
        shape: of one row (without the batch); `dtype`.
        folded: how many of its rows belong to one row of the batch (windows folded into the batch axis); mostly 1.
        channels: which axis of `shape` holds channels.
        lowest: how low its values reach.
        version: counts in-place changes of it, of which some are the work of layers with weights.
        image: the model reads images, so that tokens may be their positions.
        made_of: keys of the inputs, common to both models, that it is made of.
    """

    node: fx.Node
    shape: tuple[int, ...]
    dtype: torch.dtype
    folded: int
    channels: int
    lowest: Lowest
    version: int = 0
    image: bool = False
    made_of: frozenset[str] = frozenset()

    @property
    def distilled(self) -> bool:
        """Whether a student can learn it; masks and indices are carried along as they are."""
        return self.dtype.is_floating_point

    @property
    def value(self) -> Value:
        """What tells it from every other tensor of the model, and from itself changed by other layers."""
        return self.node, self.version

    @property
    def width(self) -> int:
        return self.shape[self.channels] if self.shape else 1

    @property
    def rows(self) -> str:
        """The first dimension as text: "N", or "4N" if four rows belong to one sample."""
        return "N" if self.folded == 1 else f"{self.folded}N"

    def __str__(self) -> str:
        return f"{shape((self.rows, *self.shape))} {str(self.dtype).removeprefix('torch.')}"

    @property
    def grid(self) -> tuple[int, ...]:
        """The sizes of the other axes: positions of an image, tokens."""
        return self.shape[: self.channels] + self.shape[self.channels + 1 :]


@dataclass(frozen=True)
class Cut:
    """A place between two blocks.

    Attributes:
        name: the outermost module whose output crosses, else the node's name.
        aliases: every name that `cuts=` accepts for it.
        tensors: what crosses: those that are distilled, then masks and indices that are carried along.
        position: how far in `Dataflow.order` the block before it goes.
        border: it is behind a stage or layer (a module with submodules, in the root or a container), before the
            activation function that ends one, or in the root's own code.
        changed_later: a later in-place operation overwrites a tensor (the block after it then works on a copy).
        tied: a trainable weight is used on both sides.
        depth: share of the model's FLOPs before it, 0 to 1.
        weights: how many weights are used before it.
    """

    name: str
    aliases: tuple[str, ...]
    tensors: tuple[Boundary, ...]
    position: int
    border: bool
    changed_later: bool
    tied: bool
    depth: float
    weights: int

    @property
    def distilled(self) -> tuple[Boundary, ...]:
        return tuple(t for t in self.tensors if t.distilled)

    @property
    def shapes(self) -> str:
        """What crosses, as text: "N x 64 x 8 x 8 float32"."""
        return " + ".join(map(str, self.tensors))


def candidates(flow: Dataflow) -> list[Cut]:
    """The cuts that alignment chooses from, in order.

    Of several positions with the same single activation the last is taken, so that an in-place change of it belongs to
    the block that makes it, unless layers with weights are in between. Where a fifth of the model has no such position,
    borders that up to six tensors cross are taken as well.
    """
    last: dict[frozenset[tuple[fx.Node, int]], int] = {}
    for position in range(len(flow.order)):
        if obstacle(flow, position) is None:
            last[frozenset((n, flow.version(n, position)) for n in flow.crossing[position])] = position
    cuts = [cut_at(flow, position) for position in sorted(last.values())]
    single = [cut for cut in cuts if len(cut.distilled) == 1]
    edges = [(-1, 0.0), *((cut.position, cut.depth) for cut in single), (len(flow.order), 1.0)]
    gaps = [(start, end) for (start, before), (end, after) in pairwise(edges) if after - before > _GAP]
    several = [
        cut_at(flow, position)
        for position in (flow.borders if gaps else ())
        if any(start < position < end for start, end in gaps) and obstacle(flow, position) is None
    ]
    return sorted([*single, *(cut for cut in several if len(cut.distilled) > 1)], key=lambda cut: cut.position)


def obstacle(flow: Dataflow, position: int) -> str | None:
    """Why no cut can be at a position."""
    live = flow.crossing[position]
    if position in flow.forbidden:
        return "state that the forward changes is used on both sides"
    odd = [n for n in live if not has_rows(n)]
    if odd:
        return f"'{odd[0].name}' crosses and does not have one row per sample"
    mixed = [n for n in live if n in flow.layouts.mixed]
    if mixed:
        return f"the rows of '{mixed[0].name}', which crosses, are not in the order of the batch"
    storages = [flow.storage(n) for n in live]
    if any(flow.changes_after(n, position) and storages.count(flow.storage(n)) > 1 for n in live):
        return "two views of a tensor cross that is changed in place later"
    distilled = [n for n in live if n.meta["dtype"].is_floating_point]
    if len(distilled) > _MOST_TENSORS:
        return f"{len(distilled)} tensors cross"
    if not distilled or flow.output in live:
        return "the distilled output is made before it" if flow.output in live else "no activation crosses"
    return None


def boundary(flow: Dataflow, node: fx.Node, position: int) -> Boundary:
    """What is known of a node as a tensor at the cut at a position."""
    (folded, _), *rest = node.meta["dims"]
    return Boundary(
        node,
        tuple(c for _, c in rest),
        node.meta["dtype"],
        folded,
        flow.layouts.channel_axis(node) - 1 if rest else 0,
        flow.layouts.lowest[node],
        flow.version(node, position),
        flow.reads_images,
        flow.made_of[node],
    )


def has_rows(node: fx.Node) -> bool:
    """Whether the first axis of a tensor is the batch (or a multiple of it) and no other one depends on it."""
    dims: tuple[tuple[int, int], ...] = node.meta.get("dims", ())
    return bool(dims) and dims[0][0] >= 1 and dims[0][1] == 0 and not any(a for a, _ in dims[1:])


def cut_at(flow: Dataflow, position: int) -> Cut:
    """The cut at a position of `Dataflow.order` that has no `obstacle`."""
    crossing = sorted(flow.crossing[position], key=lambda n: flow.position[n])
    tensors = sorted((boundary(flow, n, position) for n in crossing), key=lambda t: not t.distilled)
    made_last = max((t.node for t in tensors if t.distilled), key=lambda n: flow.position[n])
    exits: list[str] = list(made_last.meta.get("exits", []))
    by_root = made_last.op != "call_module" and not made_last.meta["path"]
    border = (
        by_root
        or _ends_stage(flow, made_last)
        or any(_ends_stage(flow, user) and flow.layouts.activates(user) for user in made_last.users)
    )
    if sum(t.distilled for t in tensors) > 1:
        ended = flow.borders.get(position, [])
        exits, border = [*exits, *(path for path in ended if path not in exits)], bool(ended)
    return Cut(
        exits[-1] if exits else made_last.name,
        tuple(dict.fromkeys([*exits, made_last.name])),
        tuple(tensors),
        position,
        border,
        any(flow.changes_after(t.node, position) for t in tensors),
        any(at[0] <= position < at[-1] for at in flow.tied_weights.values()),
        flow.flops_until[position] / (flow.flops_until[-1] or 1),
        flow.weights_until[position],
    )


def _ends_stage(flow: Dataflow, node: fx.Node) -> bool:
    return any(flow.is_stage(path) for path in node.meta.get("exits", []))


def named(name: str, flow: Dataflow, whose: str) -> Cut:
    """The cut called `name` (module path or node name) of the model called `whose`, right behind it.

    Errors: SplitError that lists the nearest valid names.
    """
    cuts = [cut_at(flow, i) for i in range(len(flow.order)) if obstacle(flow, i) is None]
    matches = [c for c in cuts if name in c.aliases]
    if matches:
        return matches[0]
    valid = [alias for c in cuts for alias in c.aliases]
    if name in flow.modules:
        reasons = list(dict.fromkeys(_obstacles_after(flow, name)))
        problem = f"Nothing can be cut after module '{name}' of the {whose}: " + (
            reasons[0] if reasons else "its output is not what the next layers read"
        )
    else:
        problem = f"The {whose} has no module or node '{name}' to cut after."
    raise SplitError(problem, given=repr(name), expected=f"one of: {nearest(name, valid)}")


def _obstacles_after(flow: Dataflow, path: str) -> Iterator[str]:
    inside = [i for i, n in enumerate(flow.order) if _below(str(n.meta["path"]), path)]
    if not inside:
        anew = any(n in flow.on_path and _below(str(n.meta["path"]), path) for n in flow.floating)
        yield (
            "it works on inputs alone or on weights alone, and is made anew in each block that needs it"
            if anew
            else "it is not on the way to the distilled output"
        )
        return
    reason = obstacle(flow, inside[-1])
    if reason is not None:
        yield reason
    distilled = [n.name for n in flow.crossing[inside[-1]] if n.meta["dtype"].is_floating_point]
    if len(distilled) > 1:
        yield f"{len(distilled)} tensors cross there ({', '.join(distilled[:4])})"


def _below(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")
