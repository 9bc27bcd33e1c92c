"""What the student is trained with, and for how long: `Recipe`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch

from ..errors import InputError, nearest
from .block_recipe import BlockRecipe, Groups, LearningRate, NonFinite, OptimizerFactory, Precision
from .losses import KL, MSE, Loss
from .target_loss import TargetLoss

_CALLED = ("loss", "optimizer", "lr", "groups")  # fields whose values are callables themselves
_BY_BLOCK = (
    *("loss", "optimizer", "lr", "weight_decay", "groups", "clip", "non_finite", "accumulate"),
    *("precision", "compile", "recompute", "ema", "patience", "stop_at"),
)


BlockInput = Literal["teacher", "student", "teacher-then-student"] | Callable[[float], float]


@dataclass(frozen=True)
class Recipe:
    """How the student is trained. A field marked * is one value for all blocks or `{block: value}`, where a block that
    the mapping leaves out gets the default; unless its values are callables themselves, also a callable from a block's
    number to its value.

    Arguments:
        loss*: callable `(student, teacher) -> one value per row` (or one in all): `MSE`, `CosineDistance`,
            `RelativeL1`, `KL`, `Weighted` sums of them, or one's own. Default: normalised MSE, and on the last block of
            a classifier KL of the logits.
        optimizer*: callable `(parameters, lr=...)`, such as `torch.optim.AdamW` (default) or
            `functools.partial(torch.optim.SGD, momentum=0.9)`.
        lr*: learning rate, or a schedule `(block, progress) -> rate` with progress from 0 to 1 over the training, such
            as `Schedule(1e-3, warmup=0.05)`.
        weight_decay*: of weights; biases, norms and other parameters of one dimension get none. None: the optimizer's
            own, for all parameters.
        groups*: callable from a parameter's name in the student and the parameter to options of the optimizer for it
            alone, such as `{"weight_decay": 0.0}`; `lr_scale` multiplies its learning rate.
        clip*: largest gradient norm of a block; None: no clipping.
        non_finite*: what to do where a loss or gradient is NaN or infinite: "stop" with an error, or "skip" the batch.
        accumulate*: batches whose gradients are averaged for one step of the optimizer; what is left at an epoch's end
            makes a step of its own.
        precision*: "bf16" or "fp16" runs the pair of blocks under autocast, the latter with a gradient scaler of its
            own; weights, boundaries and losses stay as they are. None: as the models are.
        compile*: run the student block through `torch.compile`; where that fails it runs as it is, with a warning.
        recompute*: activations are computed again in the backward, to save memory.
        ema*: decay of an exponential moving average of the block's weights, which the student gets in their place.
        patience*: epochs in which a block's relative loss may fail to fall by a hundredth before the block is left as
            it is; the next plan gives its time to others. None: it is trained to the end.
        stop_at*: relative loss of an epoch at which a block is left as it is.
        keep_best: give each block the weights of the epoch in which its relative loss was least.
        freeze: parts of the student that are not trained: patterns of parameter names ("stem.*", as in a shell; the
            path of a module stands for all in it), or a callable from a name to whether. Running statistics go on.
        target_loss: a loss of the last block against the data's targets, beside the teacher's output: "ce", or a
            `TargetLoss`.
        epochs: passes over the data.
        steps: stop after so many steps, whatever `epochs` says.
        logits: whether the distilled output is a classifier's logits; None: known classifiers only.
        temperature: of the KL loss.
        block_input: what a student block is given: "teacher" (the teacher's boundary, as in the papers), "student" (the
            student's own, detached: it sees and corrects the errors of the blocks before), "teacher-then-student" (the
            one for the first half of the training, then the other), or a callable from progress to how much of it is
            the student's own, 0 to 1. None: "teacher-then-student", which gave the best students (docs/results.md);
            "teacher" where that cannot be: data without a length and no `steps`, candidates, and plans that cannot hand
            the student's boundary over.

    Errors: InputError for a field that is not of this kind.
    """

    loss: Loss | Mapping[int, Loss] | None = None
    optimizer: OptimizerFactory | Mapping[int, OptimizerFactory] = torch.optim.AdamW
    lr: LearningRate | Mapping[int, LearningRate] = 1e-3
    weight_decay: float | Mapping[int, float] | Callable[[int], float | None] | None = None
    groups: Groups | Mapping[int, Groups] | None = None
    clip: float | Mapping[int, float] | Callable[[int], float | None] | None = None
    non_finite: NonFinite | Mapping[int, NonFinite] | Callable[[int], NonFinite] = "stop"
    accumulate: int | Mapping[int, int] | Callable[[int], int] = 1
    precision: Precision | Mapping[int, Precision] | Callable[[int], Precision] = None
    compile: bool | Mapping[int, bool] | Callable[[int], bool] = False
    recompute: bool | Mapping[int, bool] | Callable[[int], bool] = False
    ema: float | Mapping[int, float] | Callable[[int], float | None] | None = None
    patience: int | Mapping[int, int] | Callable[[int], int | None] | None = None
    stop_at: float | Mapping[int, float] | Callable[[int], float | None] | None = None
    keep_best: bool = False
    freeze: Sequence[str] | Callable[[str], bool] = ()
    target_loss: TargetLoss | Literal["ce"] | None = None
    epochs: int = 1
    steps: int | None = None
    logits: bool | None = None
    temperature: float = 4.0
    block_input: BlockInput | None = None

    def __post_init__(self) -> None:
        known = (None, "teacher", "student", "teacher-then-student")
        if self.block_input not in known and not callable(self.block_input):
            raise InputError(
                "Recipe.block_input names no boundary.",
                given=repr(self.block_input),
                expected='"teacher", "student", "teacher-then-student" or a callable',
            )
        for name, count in (("epochs", self.epochs), ("steps", self.steps)):
            if count is not None and not _is_count(count):
                raise InputError(
                    f"Recipe.{name} is no count.", given=repr(count), expected="a whole number of at least 1"
                )
        for name in _BY_BLOCK:
            given = getattr(self, name)
            if isinstance(given, Mapping):
                for value in given.values():
                    _check(name, value)
            elif name in _CALLED or not callable(given):
                _check(name, given)
        if not isinstance(self.keep_best, bool):
            raise InputError("Recipe.keep_best is no bool.", given=repr(self.keep_best), expected="True or False")
        if self.target_loss == "ce":
            object.__setattr__(self, "target_loss", TargetLoss())
        if self.target_loss is not None and not isinstance(self.target_loss, TargetLoss):
            raise InputError(
                "Recipe.target_loss is no loss against targets.",
                given=repr(self.target_loss),
                expected='"ce" or TargetLoss(...)',
            )
        if isinstance(self.freeze, str):
            raise InputError(
                "Recipe.freeze is one text.", given=repr(self.freeze), expected="a list of patterns, or a callable"
            )
        if not self.temperature > 0:
            raise InputError("Recipe.temperature is not positive.", given=self.temperature, expected="a number above 0")

    def for_block(self, block: int, blocks: int, logits: bool | None) -> BlockRecipe:
        """The values for one of `blocks` blocks. Errors: InputError if a mapping names a block that does not exist, or
        a callable gives a value that the field does not take."""
        chosen = {name: self._value(name, block, blocks) for name in _BY_BLOCK}
        is_logits = self.logits if self.logits is not None else logits
        if chosen["loss"] is None:
            chosen["loss"] = KL(self.temperature) if is_logits and block == blocks - 1 else MSE()
        against = self.target_loss if isinstance(self.target_loss, TargetLoss) and block == blocks - 1 else None
        return BlockRecipe(block, **chosen, target_loss=against)

    @property
    def follows_progress(self) -> bool:
        """Whether something changes with the progress of the training."""
        rates = self.lr.values() if isinstance(self.lr, Mapping) else [self.lr]
        return any(map(callable, rates)) or self.block_input not in (None, "teacher", "student")

    def own_input(self, progress: float) -> float:
        """How much of a block's input is the student's own at `progress` (0 to 1) through the training; none while that
        is not decided. Errors: InputError if a callable gives something else than that."""
        if callable(self.block_input):
            share = self.block_input(progress)
            if not _is_number(share) or share > 1:
                raise InputError(
                    "Recipe.block_input gives no share.",
                    given=f"{share!r} at progress {progress:g}",
                    expected="a number from 0 (the teacher's boundary) to 1 (the student's own)",
                )
            return float(share)
        halfway = self.block_input == "teacher-then-student" and progress >= 0.5
        return float(self.block_input == "student" or halfway)

    def frozen(self, names: Iterable[str]) -> list[str]:
        """Those of a student's parameters that are not trained. Errors: InputError for a pattern that fits none."""
        names = list(names)
        for pattern in () if callable(self.freeze) else self.freeze:
            if not any(_fits(pattern, name) for name in names):
                raise InputError(
                    "Recipe.freeze names nothing in the student.",
                    given=repr(pattern),
                    expected="a pattern of parameter names, or the path of a module with parameters",
                    do=f"perhaps you meant {nearest(pattern, names, 1)}",
                )
        return [name for name in names if self.freezes(name)]

    def freezes(self, name: str) -> bool:
        """Whether a student's parameter of this name is not trained."""
        if callable(self.freeze):
            return bool(self.freeze(name))
        return any(_fits(pattern, name) for pattern in self.freeze)

    def _value(self, name: str, block: int, blocks: int) -> Any:
        given = getattr(self, name)
        if isinstance(given, Mapping):
            unknown = [k for k in given if not isinstance(k, int) or not 0 <= k < blocks]
            if unknown:
                raise InputError(
                    f"Recipe.{name} names a block that does not exist.",
                    given=unknown,
                    expected=f"block numbers from 0 to {blocks - 1}",
                )
            return given.get(block, Recipe.__dataclass_fields__[name].default)
        if callable(given) and name not in _CALLED:
            given = given(block)
            _check(name, given)
        return given


def _check(name: str, value: Any) -> None:
    """Errors: InputError for a value that a field by block does not take."""
    accepts, expected = _VALUES[name]
    if not accepts(value):
        raise InputError(f"Recipe.{name} has an impossible value.", given=repr(value), expected=expected)


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0 and math.isfinite(value)


def _none_or(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "loss": (_none_or(callable), "a callable (student, teacher) -> one value per row"),
    "optimizer": (callable, "a callable (parameters, lr=...), such as torch.optim.AdamW"),
    "lr": (lambda value: callable(value) or _is_number(value), "a number of at least 0, or (block, progress) -> rate"),
    "weight_decay": (_none_or(_is_number), "a number of at least 0, or None"),
    "groups": (_none_or(callable), "a callable (name, parameter) -> options"),
    "clip": (_none_or(_is_number), "a number of at least 0, or None"),
    "non_finite": (lambda value: value in ("stop", "skip"), '"stop" or "skip"'),
    "accumulate": (_is_count, "a whole number of at least 1"),
    "precision": (lambda value: value in (None, "bf16", "fp16"), '"bf16", "fp16" or None'),
    "compile": (_is_bool, "True or False"),
    "recompute": (_is_bool, "True or False"),
    "patience": (_none_or(_is_count), "a whole number of at least 1, or None"),
    "stop_at": (_none_or(_is_number), "a number of at least 0, or None"),
    "ema": (_none_or(lambda value: _is_number(value) and value < 1), "a number from 0 to below 1, such as 0.999"),
}
