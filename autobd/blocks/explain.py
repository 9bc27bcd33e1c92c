"""`Split.explain()`: why these cuts, and what was passed over for which reason."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from ..tables import table
from .adapters import pair_tensors
from .align import CutPair
from .cuts import Cut, candidates, obstacle
from .dataflow import Dataflow, flows_of

if TYPE_CHECKING:
    from .split import Split

_MOST_NAMES = 6


def explain(split: Split) -> str:
    """The text of `Split.explain`."""
    teacher, student = flows_of(split.teacher, split.student, split.outputs)
    resample = split.alignment.resample
    cuts = candidates(teacher), candidates(student)
    partners = [[any(pair_tensors(a, b, resample) for b in cuts[1]) for a in cuts[0]]]
    partners += [[any(pair_tensors(a, b, resample) for a in cuts[0]) for b in cuts[1]]]
    parts = [
        "\n".join(
            [
                f"{whose}: {len(own)} places to cut, {sum(c.border for c in own)} of them behind a stage; "
                f"{sum(has)} have a partner in the other model",
                *_passed_over(flow, own, has),
            ]
        )
        for whose, flow, own, has in zip(("teacher", "student"), (teacher, student), cuts, partners, strict=True)
    ]
    pairs = split.alignment.pairs
    if pairs:
        rows = [
            [
                i,
                p.teacher.name,
                p.student.name,
                f"{p.teacher.depth:.0%}",
                f"{p.student.depth:.0%}",
                "; ".join(str(a) for a in split.pairs[i].adapters if str(a)) or "-",
                ", ".join(_remarks(p)) or "-",
            ]
            for i, p in enumerate(pairs)
        ]
        heads = ["cut", "teacher", "student", "teacher FLOPs before", "student FLOPs before", "adapter", "remarks"]
        parts.append("chosen (balanced blocks, equal depth within a resolution, few adapters):\n" + table(heads, rows))
    if split.alignment.considered:
        shares = [[k, f"{share:.0%}", "<-" if k == len(split) else ""] for k, share in split.alignment.considered]
        parts.append(
            "numbers of blocks, and the work of the largest block (teacher forward, student forward and backward):\n"
            + table(["blocks", "largest", ""], shares)
        )
    return "\n\n".join([*parts, *map(str, split.ties)])


def _passed_over(flow: Dataflow, cuts: list[Cut], partnered: list[bool]) -> list[str]:
    """Reasons why stages of a model do not end in a cut, and cuts without a partner, each with the names."""
    reasons: dict[str, list[str]] = defaultdict(list)
    positions = {c.position for c in cuts}
    for position, paths in sorted(flow.borders.items()):
        if position not in positions and position < len(flow.order) - 1:
            crossing = sum(n.meta["dtype"].is_floating_point for n in flow.crossing[position])
            reason = obstacle(flow, position) or (
                f"{crossing} tensors cross" if crossing > 1 else "the same tensor crosses at a later cut"
            )
            reasons[reason].append(paths[-1])
    for cut, has in zip(cuts, partnered, strict=True):
        if not has:
            reasons[f"no partner for {cut.shapes}"].append(cut.name)
    return [f"  not at {_names(names)}: {reason}" for reason, names in reasons.items()]


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _remarks(pair: CutPair) -> list[str]:
    remarks = []
    for whose, cut in (("teacher", pair.teacher), ("student", pair.student)):
        if not cut.border:
            remarks.append(f"inside a stage of the {whose}")
        if cut.changed_later:
            remarks.append(f"the {whose} changes it in place later")
        if cut.tied:
            remarks.append(f"a weight of the {whose} is used on both sides")
    if any(a.student.lowest > a.teacher.lowest for a in pair.adapters):
        remarks.append("the student's activation function cannot give the teacher's negative values")
    if len(pair.adapters) > 1:
        remarks.append(f"{len(pair.adapters)} tensors cross")
    return remarks
