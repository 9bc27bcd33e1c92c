"""`split(teacher, student, example) -> Split`: two whole models as a sequence of matching block pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from ..errors import SplitError
from ..graph import Arguments, Captured, capture
from ..graph.state import unwrapped
from .adapters import Adapter
from .align import Alignment
from .candidates import Candidate, place, with_candidates
from .carve import Block, carve
from .choose import found_cuts, given_cuts
from .dataflow import flows_of
from .explain import explain
from .fit import fit
from .folding import Wanted, with_kinds
from .pair import check_devices, check_pair, is_logits, output_adapter, paired_outputs
from .show import to_dict, to_text
from .ties import Policy, Tie, find_ties
from .verify import Verification, verify


@dataclass(frozen=True)
class BlockPair:
    """A teacher block and the student block that learns to reproduce it, with an adapter for each tensor behind it."""

    teacher: Block
    student: Block
    adapters: tuple[Adapter, ...]


@dataclass(frozen=True)
class Split:
    """A teacher and a student, split into block pairs.

    Attributes:
        teacher, student: the captured models.
        pairs: the block pairs, first to last.
        alignment: the pairs of cuts between them.
        outputs: name of the teacher's and of the student's output that the last pair distils.
        logits: whether that output is a classifier's logits (None: unknown).
        ties: weights that several student blocks use.
        notes: what the user should know.
        candidates: other modules for places in the student, by block.
    """

    teacher: Captured
    student: Captured
    pairs: tuple[BlockPair, ...]
    alignment: Alignment
    outputs: tuple[str, str]
    logits: bool | None
    ties: tuple[Tie, ...]
    notes: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def bind_teacher(self) -> list[fx.GraphModule]:
        """The teacher's blocks over its own submodules."""
        return [pair.teacher.bind(self.teacher, self.teacher.model) for pair in self.pairs]

    def bind_student(
        self, model: nn.Module | None = None, frozen: Sequence[Mapping[str, Tensor]] | None = None
    ) -> list[fx.GraphModule]:
        """The student's blocks over the submodules of `model`, a copy of the student (default: the student itself).

        Arguments:
            frozen: for each block, tensors that take the place of the parameters of these names.
        """
        model = self.student.model if model is None else model
        given = frozen or [{}] * len(self)
        return [p.student.bind(self.student, model, own) for p, own in zip(self.pairs, given, strict=True)]

    def fit(self, batch: Any, writes: Sequence[str] | None = None) -> Split:
        """This split with the channel maps of its adapters chosen from the teacher's activations on `batch`.

        Arguments:
            writes: tensors that the teacher's forward changes (see `Verification`), to be put back; None: unknown.
        """
        fitted = fit(self, Arguments.of(batch, self.teacher.model), writes)
        return replace(fitted, candidates=tuple(c.fitted(fitted) for c in self.candidates))

    def explain(self) -> str:
        """Why these cuts: what was paired, what was passed over and for which reason."""
        return explain(self)

    def verify(self, rows: int | None = None) -> Verification:
        """Prove on these models that blocks in order equal the whole: output, buffers and gradients, bit by bit.

        Arguments:
            rows: how many rows of the example to use (from the start again if it has fewer); default: 2 or 3, another
                number than was recorded, so that what depends on the batch size shows.

        Errors: VerifyError names the model, mode and quantity that differs.
        """
        unlike = 2 if self.student.example.rows in (1, 3) else 3
        return verify(self, unlike if rows is None else rows)

    def to_dict(self) -> dict[str, Any]:
        """What the table shows, as plain values."""
        return to_dict(self)

    def __str__(self) -> str:
        return to_text(self)


def split(
    teacher: nn.Module,
    student: nn.Module,
    example: Any,
    *,
    blocks: int | None = None,
    cuts: Sequence[tuple[str, str]] | None = None,
    adapters: Wanted = "auto",
    resample: bool = False,
    hybrid: bool = False,
    ties: Policy = "auto",
    inputs: Any = None,
    logits: bool | None = None,
    candidates: Mapping[str, Sequence[nn.Module]] | None = None,
) -> Split:
    """Split two whole models into matching blocks.

    Arguments:
        teacher, student: any two modules; both are left exactly as they were.
        example: inputs for both models (see `capture`), at any batch size.
        blocks: how many block pairs; default: as many as stay balanced, at most 16.
        cuts: pairs of module paths (or node names) after which to cut, instead of choosing.
        adapters: where channels differ: "matched" (a fixed map of the teacher's channels), "trainable" (a trained map
            that is folded into the student), "auto" (trainable where it folds, matched elsewhere and behind the ReLU of
            a student with less than half the channels), or `{block: kind}`.
        resample: allow cuts where image sizes differ; the teacher's tensors are interpolated.
        hybrid: allow trainable adapters that cannot be folded.
        ties: what becomes of a weight that several blocks use: "first" (trained in the first one), "together" (trained
            by all, in one stage), or "auto" (first, unless a block would then have nothing to train).
        inputs: `(for_teacher, for_student)`, callables from the example to each model's arguments.
        logits: whether the distilled output is a classifier's logits; default: known for timm, torchvision and
            Hugging Face classifiers.
        candidates: other modules for places in the student, `{module path: [module, ...]}`; no cut parts such a place.

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
    flows = flows_of(*captured, outputs)
    for whose, flow in zip(("teacher", "student"), flows, strict=True):
        if flow.output not in flow.order:
            raise SplitError(
                f"The {whose} computes nothing.",
                given=f"its output is '{flow.output.name}'",
                expected="a model with weights",
            )
    last = output_adapter(flows)
    whole = candidates or {}
    found = given_cuts(cuts, flows, resample) if cuts is not None else found_cuts(flows, blocks, resample, whole)
    sides = [[p.teacher for p in found.pairs], [p.student for p in found.pairs]]
    teacher_blocks, student_blocks = (carve(flow, side) for flow, side in zip(flows, sides, strict=True))
    places = [place(flows[1], found.pairs, path) for path in whole]
    if places and adapters == "auto":  # a trained map belongs to one student block, not to each of its candidates
        adapters = {b: "matched" for own in places for b in (own - 1, own) if b >= 0}
    chosen = with_kinds([*(p.adapters for p in found.pairs), (last,)], student_blocks, captured[1], adapters, hybrid)
    pairs = tuple(BlockPair(*parts) for parts in zip(teacher_blocks, student_blocks, chosen, strict=True))
    tied = find_ties(student, student_blocks, ties)
    result = Split(
        *captured,
        pairs,
        found,
        outputs,
        is_logits(captured, outputs) if logits is None else logits,
        tied,
        _notes(captured, outputs, pairs, tied),
    )
    return with_candidates(result, whole) if whole else result


def _notes(
    captured: tuple[Captured, Captured], outputs: tuple[str, str], pairs: tuple[BlockPair, ...], ties: tuple[Tie, ...]
) -> tuple[str, ...]:
    notes = [f"{whose}: {note}" for whose, c in zip(("teacher", "student"), captured, strict=True) for note in c.notes]
    if outputs[0] != outputs[1] and max(len(c.outputs) for c in captured) > 1:
        theirs = " and ".join(
            f"'{name}' of the {whose} (which returns {', '.join(c.outputs)})"
            for whose, name, c in zip(("teacher", "student"), outputs, captured, strict=True)
        )
        notes.append(f"the outputs have no name in common, the first ones are paired: {theirs}")
    used = {name for pair in pairs for name in pair.student.parameters}
    idle = [n for n, p in captured[1].model.named_parameters() if n not in used and p.requires_grad]
    if idle:
        notes.append(
            f"student: not on the way to the distilled output, left as they are: {', '.join(idle[:4])}"
            + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        )
    if pairs[-1].adapters[0].kind != "equal":
        notes.append("the student's output is trained to be a projection of the teacher's, which has another width")
    return (*notes, *map(str, ties))
