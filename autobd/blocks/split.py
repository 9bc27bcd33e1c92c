"""`split(teacher, student, example) -> Split`: two whole models as a sequence of matching block pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from ..errors import InputError, SplitError
from ..graph import Arguments, Captured, capture
from ..graph.state import unwrapped
from ..tables import quantity, shape, table
from .align import align, matching
from .carve import Block, carve
from .cuts import Cut, candidates, named
from .dataflow import Dataflow
from .pair import check_devices, check_pair, is_logits, paired_outputs
from .verify import Verification, verify


@dataclass(frozen=True)
class BlockPair:
    """A teacher block and the student block that learns to reproduce it."""

    teacher: Block
    student: Block


@dataclass(frozen=True)
class Split:
    """A teacher and a student, split into block pairs.

    Attributes:
        teacher, student: the captured models.
        pairs: the block pairs, first to last.
        cuts: the pairs of cuts between them.
        outputs: name of the teacher's and of the student's output that the last pair distils.
        logits: whether that output is a classifier's logits (None: unknown).
        notes: what the user should know.
    """

    teacher: Captured
    student: Captured
    pairs: tuple[BlockPair, ...]
    cuts: tuple[tuple[Cut, Cut], ...]
    outputs: tuple[str, str]
    logits: bool | None
    notes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pairs)

    def bind_teacher(self) -> list[fx.GraphModule]:
        """The teacher's blocks over its own submodules."""
        return [pair.teacher.bind(self.teacher, self.teacher.model) for pair in self.pairs]

    def bind_student(self, model: nn.Module | None = None) -> list[fx.GraphModule]:
        """The student's blocks over the submodules of `model`, a copy of the student (default: the student itself)."""
        model = self.student.model if model is None else model
        return [pair.student.bind(self.student, model) for pair in self.pairs]

    def verify(self, rows: int | None = None) -> Verification:
        """Prove on these models that blocks in order equal the whole: output, buffers and gradients, bit by bit.

        Arguments:
            rows: how many rows of the example to use; default: at most 3, and another number than was recorded if
                there are at least 3, so that what depends on the batch size shows.

        Errors: VerifyError names the model, mode and quantity that differs.
        """
        recorded = self.student.example.rows
        return verify(self, min(3, max(2, recorded - 1)) if rows is None else rows)

    def __str__(self) -> str:
        totals = [
            [sum(getattr(b, name) for b in side) for name in ("parameter_count", "flops", "activation_bytes")]
            for side in ([p.teacher for p in self.pairs], [p.student for p in self.pairs])
        ]
        rows: list[list[object]] = []
        for i, pair in enumerate(self.pairs):
            t, s = pair.teacher, pair.student
            rows.append(
                [
                    i,
                    " .. ".join(dict.fromkeys(t.modules)),
                    " .. ".join(dict.fromkeys(s.modules)),
                    shape(("N", *t.shape)),
                    *(quantity(v) for v in (t.parameter_count, s.parameter_count, t.flops, s.flops)),
                    quantity(s.activation_bytes, "B"),
                ]
            )
        rows.append(
            [
                "",
                "total",
                "",
                "",
                *(quantity(v) for v in (totals[0][0], totals[1][0], totals[0][1], totals[1][1])),
                quantity(totals[1][2], "B"),
            ]
        )
        text = table(
            [
                "block",
                "teacher",
                "student",
                "boundary",
                "teacher params",
                "student params",
                "teacher FLOPs",
                "student FLOPs",
                "activations",
            ],
            rows,
        )
        head = (
            f"{type(self.teacher.model).__name__} -> {type(self.student.model).__name__}, {len(self)} blocks, "
            f"FLOPs and activations at batch size {self.student.example.rows}"
        )
        return "\n".join([head, text, *(f"note: {n}" for n in self.notes)])


def split(
    teacher: nn.Module,
    student: nn.Module,
    example: Any,
    *,
    blocks: int | None = None,
    cuts: Sequence[tuple[str, str]] | None = None,
    inputs: Any = None,
    logits: bool | None = None,
) -> Split:
    """Split two whole models into matching blocks.

    Arguments:
        teacher, student: any two modules; both are left exactly as they were.
        example: inputs for both models (see `capture`), at any batch size.
        blocks: how many block pairs; default: as many as stay balanced, at most 16.
        cuts: pairs of module paths (or node names) after which to cut, instead of choosing.
        inputs: `(for_teacher, for_student)`, callables from the example to each model's arguments.
        logits: whether the distilled output is a classifier's logits; default: known for timm, torchvision and
            Hugging Face classifiers.

    Errors: InputError for models that cannot be a pair, CaptureError for one that cannot be recorded, SplitError if no
    cuts match as asked.
    """
    teacher, student = unwrapped(teacher), unwrapped(student)
    check_pair(teacher, student)
    given = inputs or (None, None)
    arguments = [
        Arguments.of(f(example) if f is not None else example, model)
        for f, model in zip(given, (teacher, student), strict=True)
    ]
    for model, args in zip((teacher, student), arguments, strict=True):
        check_devices(model, args)
    captured = capture(teacher, arguments[0], train=False), capture(student, arguments[1])
    outputs = paired_outputs(*captured)
    flows = Dataflow(captured[0], outputs[0], trained=False), Dataflow(captured[1], outputs[1], trained=True)
    chosen = _given_cuts(cuts, flows) if cuts is not None else _found_cuts(flows, blocks)
    teacher_blocks, student_blocks = (carve(flow, [pair[side] for pair in chosen]) for side, flow in enumerate(flows))
    pairs = tuple(BlockPair(t, s) for t, s in zip(teacher_blocks, student_blocks, strict=True))
    return Split(
        *captured,
        pairs,
        tuple(chosen),
        outputs,
        is_logits(captured, outputs) if logits is None else logits,
        _notes(captured, pairs, flows[1]),
    )


def _found_cuts(flows: tuple[Dataflow, Dataflow], blocks: int | None) -> list[tuple[Cut, Cut]]:
    if blocks == 1:
        return []
    if blocks is not None and (not isinstance(blocks, int) or blocks < 1):
        raise InputError(
            "blocks= asks for an impossible number.", given=blocks, expected="a whole number of at least 1"
        )
    found = [candidates(flow) for flow in flows]
    weights = flows[0].weights_until[-1], flows[1].weights_until[-1]
    flops = flows[0].flops_until[-1], flows[1].flops_until[-1]
    alignment = align(found[0], found[1], weights, flops, blocks)
    if alignment is not None:
        return list(alignment.cuts)
    if blocks is not None and align(found[0], found[1], weights, flops, None) is not None:
        ceiling = max(k for k in range(2, len(found[0]) + 2) if align(found[0], found[1], weights, flops, k))
        raise SplitError(
            f"{blocks} blocks were asked for.",
            given=f"blocks={blocks}",
            expected=f"at most {ceiling} for this pair",
            do="ask for fewer blocks, or leave blocks= out",
        )
    raise SplitError(
        "The two models have no common cut.",
        given="\n            ".join(
            f"{whose} can be cut at: {_shapes(cuts)}" for whose, cuts in zip(("teacher", "student"), found, strict=True)
        ),
        expected="boundaries of equal shape, channels included, with a weight on either side"
        + "".join(f"\n            ({note})" for note in _tie_notes(flows[1], every=True)),
        do="give the student the teacher's width at some boundaries, feed both the same input size, "
        "or train it as one block with blocks=1",
    )


def _given_cuts(cuts: Sequence[tuple[str, str]], flows: tuple[Dataflow, Dataflow]) -> list[tuple[Cut, Cut]]:
    found = [candidates(flow) for flow in flows]
    pairs: list[tuple[Cut, Cut]] = []
    for entry in cuts:
        if not isinstance(entry, (tuple, list)) or len(entry) != 2 or not all(isinstance(n, str) for n in entry):
            raise InputError(
                "cuts= holds something else than a pair of names.",
                given=repr(entry),
                expected='("teacher module", "student module")',
            )
        pair = named(entry[0], found[0], flows[0], "teacher"), named(entry[1], found[1], flows[1], "student")
        if not matching(*pair):
            raise SplitError(
                f"Block {len(pairs)}: the boundaries at cut {tuple(entry)} differ.",
                given=f"teacher {_row(pair[0])}, student {_row(pair[1])}",
                expected="equal shapes and dtypes, channels included",
                do="cut elsewhere, or give the student the teacher's width there",
            )
        if pairs and not all(a.position < b.position for a, b in zip(pairs[-1], pair, strict=True)):
            raise SplitError(
                f"Cut {tuple(entry)} does not come after the one before it in both models.",
                given=f"cuts={list(cuts)}",
                expected="cuts in the order of the forward pass",
            )
        pairs.append(pair)
    return pairs


def _tie_notes(student: Dataflow, every: bool = False) -> list[str]:
    """Weights that keep cuts away: those over more than a tenth of the student, or `every` one."""
    long = [n for n, at in student.ties.items() if every or len(at) > len(student.order) / 10]
    if not long:
        return []
    more = f" and {len(long) - 3} more" if len(long) > 3 else ""
    return [f"student: used in several places, no cut between them: {', '.join(long[:3])}{more}"]


def _notes(captured: tuple[Captured, Captured], pairs: tuple[BlockPair, ...], student: Dataflow) -> tuple[str, ...]:
    notes = [f"{whose}: {note}" for whose, c in zip(("teacher", "student"), captured, strict=True) for note in c.notes]
    used = {name for pair in pairs for name in pair.student.parameters}
    idle = [n for n, p in captured[1].model.named_parameters() if n not in used and p.requires_grad]
    if idle:
        notes.append(
            f"student: not on the way to the distilled output, left as they are: {', '.join(idle[:4])}"
            + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        )
    return (*notes, *_tie_notes(student))


def _shapes(cuts: list[Cut]) -> str:
    shown = list(dict.fromkeys(shape(("N", *c.shape)) for c in cuts))
    return ", ".join(shown[:12]) + (" ..." if len(shown) > 12 else "") if shown else "no place"


def _row(cut: Cut) -> str:
    return f"{shape(('N', *cut.shape))} {str(cut.dtype).removeprefix('torch.')}"
