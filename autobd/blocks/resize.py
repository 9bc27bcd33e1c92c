"""A split's blocks for inputs of another size: recorded anew, cut at the same places, over the same modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import CaptureError, InputError
from ..graph import Arguments, Captured, capture
from .adapters import Adapter, adapter
from .align import CutPair
from .carve import carve
from .cuts import Boundary, Cut, cut_at, obstacle
from .dataflow import Dataflow, flows_of
from .pair import output_adapter

if TYPE_CHECKING:
    from .split import Split


def resized(split: Split, arguments: Sequence[Arguments]) -> Split:
    """`split` for the teacher's and the student's arguments, which differ from its example in sizes only.

    A graph holds for the sizes that it was recorded with; the same operations with other numbers are another graph of
    the same blocks.

    Errors: InputError if a model does something else at these sizes, or if the cuts no longer go together.
    """
    try:
        captured = (
            capture(split.teacher.model, arguments[0], train=False),
            capture(split.student.model, arguments[1]),
        )
    except CaptureError as error:
        raise InputError(
            "A batch has another size than the first one, and a model cannot be recorded with it.",
            given=f"teacher {arguments[0].describe()}, student {arguments[1].describe()}",
            expected=f"a size that both take, such as {split.student.example.describe()}",
            do="pad or resize every batch alike",
        ) from error
    for whose, new, old in zip(("teacher", "student"), captured, (split.teacher, split.student), strict=True):
        if _operations(new) != _operations(old):
            raise _other(whose, new, old)
    flows = flows_of(*captured, split.outputs)
    pairs = [_moved(pair, flows) for pair in split.alignment.pairs]
    found = carve(flows[0], [p.teacher for p in pairs]), carve(flows[1], [p.student for p in pairs])
    last = output_adapter(flows)
    ends = [*([(a.teacher, a.student) for a in p.adapters] for p in pairs), [(last.teacher, last.student)]]
    blocks = [
        replace(
            pair,
            teacher=teacher,
            student=student,
            adapters=tuple(
                _with_sizes(a, *tensors, split.alignment.resample)
                for a, tensors in zip(pair.adapters, own, strict=True)
            ),
        )
        for pair, teacher, student, own in zip(split.pairs, *found, ends, strict=True)
    ]
    alignment = replace(split.alignment, pairs=tuple(pairs))
    return replace(split, teacher=captured[0], student=captured[1], pairs=tuple(blocks), alignment=alignment)


def _operations(captured: Captured) -> list[tuple[str, str, str]]:
    return [(n.op, n.name, str(n.target)) for n in captured.graph.nodes]


def _moved(pair: CutPair, flows: tuple[Dataflow, Dataflow]) -> CutPair:
    """The same pair of cuts in other graphs."""
    sides = []
    for flow, cut in zip(flows, (pair.teacher, pair.student), strict=True):
        problem = obstacle(flow, cut.position)
        if problem is not None:
            raise InputError(f"A batch has another size than the first one: at cut '{cut.name}', {problem}.")
        sides.append(_in_order(cut_at(flow, cut.position), cut))
    adapters = tuple(
        replace(a, teacher=t, student=s)
        for a, t, s in zip(pair.adapters, sides[0].tensors, sides[1].tensors, strict=True)
    )
    return CutPair(sides[0], sides[1], adapters)


def _in_order(cut: Cut, like: Cut) -> Cut:
    by_name: dict[str, Boundary] = {t.node.name: t for t in cut.tensors}
    return replace(cut, tensors=tuple(by_name[t.node.name] for t in like.tensors))


def _with_sizes(fitted: Adapter, teacher: Boundary, student: Boundary, resample: bool) -> Adapter:
    if adapter(teacher, student, resample) is None:
        raise InputError(
            "A batch has another size than the first one, at which the two models' tensors do not go together.",
            given=f"teacher {teacher}, student {student}",
            expected="equal positions, as on the first batch",
            do="pad or resize every batch alike",
        )
    return replace(fitted, teacher=teacher, student=student)


def _other(whose: str, new: Captured, old: Captured) -> InputError:
    differing = next(
        (a[1] for a, b in zip(_operations(new), _operations(old), strict=False) if a != b), "its number of operations"
    )
    return InputError(
        f"A batch has another size than the first one, and the {whose} does something else with it.",
        given=f"{new.example.describe()}: first difference at '{differing}'",
        expected=f"the operations of {old.example.describe()}",
        do="pad or resize every batch alike",
    )
