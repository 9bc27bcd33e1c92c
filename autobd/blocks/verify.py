"""Prove that the blocks of a split, run in order, are the whole model: output, buffers and gradients, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from ..errors import VerifyError, users_code
from ..graph import Arguments, Captured
from ..graph.state import identical, module_tensors, untouched, written
from ..tables import table
from .carve import Block

if TYPE_CHECKING:
    from .split import Split

_SEED = 6022140  # one that no forward sets by itself
_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-4}  # relative; half precision: 2e-2


@dataclass(frozen=True)
class Check:
    """One comparison: which model and mode, and the largest relative difference of outputs, buffers, gradients."""

    model: str
    mode: str
    output: float
    buffers: float
    gradients: float

    @property
    def exact(self) -> bool:
        return self.output == self.buffers == self.gradients == 0


@dataclass(frozen=True)
class Verification:
    """The outcome of `Split.verify`: true (it raises otherwise); `exact` if everything is bit-identical.

    `teacher_writes` names the tensors that the teacher's own forward changes (a maximum norm, a counter).
    """

    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    teacher_writes: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return all(c.exact for c in self.checks)

    def __bool__(self) -> bool:
        return True

    def __str__(self) -> str:
        def shown(value: float) -> str:
            return "identical" if value == 0 else f"{value:.1e}"

        rows = [(c.model, c.mode, shown(c.output), shown(c.buffers), shown(c.gradients)) for c in self.checks]
        return "\n".join(
            [table(["model", "mode", "output", "buffers", "gradients"], rows), *(f"note: {n}" for n in self.notes)]
        )


@dataclass(frozen=True)
class _Outcome:
    output: Tensor
    buffers: dict[str, Tensor]
    gradients: dict[str, Tensor] | None  # None: cannot be differentiated
    written: list[str]  # tensors that the forward changed


def verify(split: Split, rows: int) -> Verification:
    """Compare blocks and whole models on the first `rows` rows of the example. Errors: VerifyError."""
    teacher, student = (
        verify_blocks(captured, output, blocks, rows, whose)
        for whose, captured, output, blocks in (
            ("teacher", split.teacher, split.outputs[0], [p.teacher for p in split.pairs]),
            ("student", split.student, split.outputs[1], [p.student for p in split.pairs]),
        )
    )
    return Verification(
        (*teacher.checks, *student.checks), tuple(dict.fromkeys(teacher.notes + student.notes)), teacher.teacher_writes
    )


def verify_blocks(captured: Captured, output: str, blocks: list[Block], rows: int, whose: str) -> Verification:
    """Compare `blocks`, in order, with the whole model.

    Arguments:
        output: the name of the model's output that the last block gives.
        rows: how many rows of the example to use.
        whose: "teacher" (compared in eval mode, without gradients) or "student" (also in train mode, with gradients).

    Errors: VerifyError names the mode and the quantity that differs; InputError for a model that itself fails.
    """
    checks: list[Check] = []
    notes: list[str] = []
    writes: tuple[str, ...] = ()
    trained = whose == "student"
    arguments = captured.example.head(rows)
    bound = [b.bind(captured, captured.model) for b in blocks]
    for mode in ("eval", "train") if trained else ("eval",):
        if mode == "train" and not captured.same_in_train:
            notes.append("student: verified in eval mode alone, train mode has auxiliary heads")
            continue
        with users_code(
            f"The {whose} fails on its own example, in {mode} mode.",
            expected="a model that runs as it is, with weights and data of one dtype",
        ):
            whole = _outcome(captured, mode, trained, partial(_whole, captured, arguments, output))
        set_mode(bound, mode == "train")
        parts = _outcome(captured, mode, trained, partial(run_blocks, bound, blocks, arguments))
        if not trained:
            writes = tuple(whole.written)
        if whole.gradients is None:
            notes.append(f"{whose}, {mode}: the whole model cannot be differentiated, gradients were not compared")
            parts = replace(parts, gradients=None)
        checks.append(_check(whose, mode, whole, parts))
    if any(not c.exact for c in checks):
        notes.append("not bit-identical but equal to rounding: the model picks another kernel when it is recorded")
    return Verification(tuple(checks), tuple(notes), writes)


def _whole(captured: Captured, arguments: Arguments, output: str) -> Tensor:
    own = arguments.map(lambda t: t.clone())  # a model may change its input in place
    return _select(captured.model(*own.args, **own.kwargs), output)


def run_blocks(bound: list[fx.GraphModule], blocks: list[Block], arguments: Arguments) -> Tensor:
    """All blocks in order, on the model's own arguments."""
    tensors = arguments.tensors
    boundary: tuple[Tensor, ...] = ()
    for module, block in zip(bound, blocks, strict=True):
        boundary = module(*boundary, *(tensors[i] for i in block.inputs))
    return boundary[0]


def set_mode(bound: Sequence[nn.Module], training: bool) -> None:
    """Set the blocks' own flag; the submodules belong to the model and keep what `model.train()` gave them."""
    for module in bound:
        module.training = training


def _outcome(captured: Captured, mode: str, trained: bool, run: Callable[[], Tensor]) -> _Outcome:
    """What `run` gives in `mode`, from equal random generators, as it will run: with gradients only if `trained`. The
    model is left as it was."""
    model = captured.model
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # recorded code is the ordinary path of nn.TransformerEncoder
    tensors = {path: t for path, t in module_tensors(model).values() if not t.is_meta}
    before = {path: t.detach().clone() for path, t in tensors.items()}
    try:
        with untouched(model, tensors=tensors.values()), torch.inference_mode(False), torch.set_grad_enabled(trained):
            model.train(mode == "train")
            torch.manual_seed(_SEED)
            run()
            output = run()  # the second of two calls: what one leaves behind for the next counts
            buffers = {n: b.detach().clone() for n, b in model.named_buffers()}
            changed = written(before, model)
            return _Outcome(output.detach().clone(), buffers, _gradients(model, output), changed)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _gradients(model: nn.Module, output: Tensor) -> dict[str, Tensor] | None:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not output.requires_grad:
        return {}
    try:
        found = torch.autograd.grad(output.float().sum(), list(parameters.values()), allow_unused=True)
    except RuntimeError:  # an in-place operation of the model's own spoils its backward
        return None
    given = {n: g for n, g in zip(parameters, found, strict=True) if g is not None}
    return {n: g.to_dense() if g.is_sparse else g for n, g in given.items()}


def _check(whose: str, mode: str, whole: _Outcome, parts: _Outcome) -> Check:
    result = {"output": _difference(whole.output, parts.output)}
    for kind in ("buffers", "gradients"):
        a, b = getattr(whole, kind) or {}, getattr(parts, kind) or {}
        if a.keys() != b.keys():
            raise VerifyError(
                f"The {whose}'s blocks in {mode} mode give other {kind} than the whole model.",
                given=f"only on one side: {', '.join(sorted(a.keys() ^ b.keys())[:5])}",
                expected="the same",
            )
        result[kind] = max((_difference(a[n], b[n]) for n in a), default=0.0)
    for kind, value in result.items():
        if not value <= _ROUNDING.get(whole.output.dtype, 2e-2):
            raise VerifyError(
                f"The {whose}'s blocks in {mode} mode do not reproduce the whole model.",
                given=f"{kind} differ by {value:.2g} (relative)",
                expected="no difference",
                do="pass cuts=[...] around the part that is not a function of its inputs, and report the model",
            )
    return Check(whose, mode, **result)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if identical(a, b):
        return 0.0
    scale = a.double().abs().max().clamp(min=1e-30)
    return float((a.double() - b.double()).abs().max() / scale)


def _select(output: Any, name: str) -> Tensor:
    """The tensor called `name` (see `Captured.outputs`) in what the model returned."""
    if isinstance(output, Tensor):
        return output
    key, _, rest = name.partition(".")
    if isinstance(output, Mapping):
        value = output[key] if key in output else output[int(key)]
    elif isinstance(output, (tuple, list)) and key.isdigit():
        value = output[int(key)]
    else:
        value = getattr(output, key)
    return _select(value, rest)
