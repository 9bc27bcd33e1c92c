"""The cuts of a pair: found by alignment, or given by name."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..errors import InputError, SplitError
from .adapters import pair_tensors, positions
from .align import Alignment, CutPair, align, crossed, matching, most_blocks
from .cuts import Cut, candidates, named
from .dataflow import Dataflow

Flows = tuple[Dataflow, Dataflow]


def found_cuts(flows: Flows, blocks: int | None, resample: bool, whole: Collection[str] = ()) -> Alignment:
    """Cuts by alignment, none of them inside a module of the student that stays `whole`.

    Errors: InputError, SplitError if there are none or not so many."""
    if blocks is not None and (not isinstance(blocks, int) or isinstance(blocks, bool) or blocks < 1):
        raise InputError(
            "blocks= asks for an impossible number.", given=blocks, expected="a whole number of at least 1"
        )
    if blocks == 1:
        return Alignment((), (1.0,), resample=resample)
    kept = [flows[1].extent[path] for path in whole if path in flows[1].extent]
    cuts = (
        candidates(flows[0]),
        [c for c in candidates(flows[1]) if not any(first <= c.position < last for first, last in kept)],
    )
    pairs = matching(*cuts, resample)
    weights = _last(flows[0].weights_until), _last(flows[1].weights_until)
    flops = _last(flows[0].flops_until), _last(flows[1].flops_until)
    sizes = "" if resample else _apart(*cuts)
    alignment = None if sizes and blocks is None else align(pairs, weights, flops, blocks)
    if alignment is not None:
        return replace(alignment, resample=resample)
    if not sizes and blocks is not None and (ceiling := most_blocks(pairs, weights, flops)) > 1:
        raise SplitError(
            f"{blocks} blocks were asked for.",
            given=f"blocks={blocks}",
            expected=f"at most {ceiling} for this pair",
            do="ask for fewer blocks, or leave blocks= out",
        )
    raise SplitError(
        "The two models have no common cut" + (f": they work at other sizes, {sizes}." if sizes else "."),
        given="\n            ".join(
            f"{whose} can be cut at: {_shapes(own)}" for whose, own in zip(("teacher", "student"), cuts, strict=True)
        ),
        expected="tensors with equal positions (rows, columns or tokens; channels may differ), a weight on either side",
        do="feed both models the same input size, pass resample=True to interpolate the teacher's tensors, "
        "or train the student as one block with blocks=1",
    )


def given_cuts(cuts: Sequence[tuple[str, str]], flows: Flows, resample: bool) -> Alignment:
    """Cuts by name. Errors: InputError, SplitError that names the nearest valid cuts or the two shapes."""
    pairs: list[CutPair] = []
    for entry in cuts if isinstance(cuts, Sequence) else (cuts,):
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not all(isinstance(n, str) for n in entry):
            raise InputError(
                "cuts= holds something else than a pair of names.",
                given=repr(entry),
                expected='("teacher module", "student module")',
            )
        teacher, student = (
            named(name, flow, whose) for name, flow, whose in zip(entry, flows, ("teacher", "student"), strict=True)
        )
        adapters = pair_tensors(teacher, student, resample)
        if adapters is None:
            raise SplitError(
                f"Block {len(pairs)}: the tensors at cut {tuple(entry)} do not go together.",
                given=f"teacher {teacher.shapes}, student {student.shapes}",
                expected="equal positions (rows, columns or tokens; channels may differ) and dtypes",
                do="cut elsewhere, or pass resample=True to interpolate other image sizes",
            )
        if pairs and not all(
            a.position < b.position
            for a, b in zip((pairs[-1].teacher, pairs[-1].student), (teacher, student), strict=True)
        ):
            raise SplitError(
                f"Cut {tuple(entry)} does not come after the one before it in both models.",
                given=f"cuts={list(cuts)}",
                expected="cuts in the order of the forward pass",
            )
        pairs.append(CutPair(replace(teacher, tensors=tuple(a.teacher for a in adapters)), student, adapters))
        if any(crossed(pairs[-2:])):
            raise SplitError(
                f"Block {len(pairs) - 1}: the layers before cut {tuple(entry)} cannot be learned as a block.",
                given=f"cuts={list(cuts)}",
                expected="in both models a new tensor at the cut, and tensors that cross two cuts paired alike at both",
                do="leave this cut out",
            )
    return Alignment(tuple(pairs), (), resample=resample)


def _last(totals: Sequence[int]) -> int:
    """Of a model of one op there are none."""
    return totals[-1] if totals else 0


def _apart(teacher: list[Cut], student: list[Cut]) -> str:
    """The largest image or token grids of both, if no size is common: "75x75 and 56x56"."""
    tensors = [[t for c in cuts for t in c.distilled if positions(t) > 1] for cuts in (teacher, student)]
    sizes = [{positions(t) for t in own} for own in tensors]
    if not all(sizes) or not sizes[0].isdisjoint(sizes[1]):
        return ""
    largest = [max((t.grid for t in own), key=lambda g: (len(g) == 2, g)) for own in tensors]
    return " and ".join("x".join(map(str, g)) + (" tokens" if len(g) == 1 else "") for g in largest)


def _shapes(cuts: list[Cut]) -> str:
    shown = list(dict.fromkeys(cut.shapes for cut in cuts))
    return ", ".join(shown[:12]) + (" ..." if len(shown) > 12 else "") if shown else "no place"
