"""What `distill` is asked to do after the blocks, refused before anything is trained where it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..blocks import Split
from ..errors import InputError, PlanError
from ..planner import Plan
from ..program import build
from ..recipe import Budget, Finish, Recipe
from .data import Batches

_RECALIBRATION = 50  # batches


def check_options(init: Any, callbacks: Any, seed: Any, flags: Mapping[str, Any]) -> None:
    """Errors: InputError for values that are none of these options'; `flags` are True or False."""
    if init is not None and not (isinstance(init, str) and init == "teacher"):
        raise InputError("init= names no way to start.", given=repr(init), expected='"teacher" or None')
    if isinstance(callbacks, (str, bytes)) or not isinstance(callbacks, Sequence):
        raise InputError("callbacks= is no list.", given=type(callbacks).__name__, do="pass [callback]")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError("seed= is no seed.", given=repr(seed), expected="a whole number from 0 to 2**63 - 1")
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InputError(f"{name}= is a switch.", given=repr(value), expected="True or False")


def asked_recipe(given: Any, epochs: Any) -> Recipe:
    """The recipe, with the call's own `epochs`. Errors: InputError."""
    recipe = Recipe() if given is None else given
    if not isinstance(recipe, Recipe):
        raise InputError("recipe= is no recipe.", given=repr(recipe), expected="Recipe(...) or None")
    return recipe if epochs is None else replace(recipe, epochs=epochs)


def asked_finish(given: Any, batches: Batches, hybrid: bool) -> Finish | None:
    """How to finish: a `Finish`, or epochs. Errors: InputError."""
    counted = isinstance(given, int) and not isinstance(given, bool)
    how = Finish(given) if counted else given
    if how is None:
        return None
    if not isinstance(how, Finish):
        raise InputError("finish= is no way to finish.", given=repr(how), expected="Finish(...), or a number of epochs")
    if hybrid:
        raise InputError(
            "A student with adapters cannot be finished end to end.",
            given="finish= and hybrid=True",
            do="leave one of them out",
        )
    _check_again("finish", batches)
    return how


def asked_recalibration(given: Any, batches: Batches) -> int:
    """Batches from which batch norms take their statistics in the end. Errors: InputError."""
    count = _RECALIBRATION if given is True else given
    if not isinstance(count, int) or count < 0:
        raise InputError("recalibrate= is no count.", given=repr(given), expected="True, False or a number of batches")
    if count:
        _check_again("recalibrate", batches)
    return int(count)


def _check_again(what: str, batches: Batches) -> None:
    if batches.one_shot:
        raise InputError(
            f"The data can be read once only, and {what}= reads it again.",
            given=type(batches.data).__name__,
            expected="data that can be read once per epoch",
            do="pass a DataLoader, Dataset or list",
        )


def with_block_input(recipe: Recipe, split: Split, plan: Plan, batches: Batches) -> tuple[Recipe, str | None]:
    """The recipe with what blocks are given decided, and why it is the teacher's boundary throughout where that was not
    asked for. Errors: PlanError for a plan that cannot hand over what was asked for."""
    if recipe.block_input is not None:
        if recipe.block_input != "teacher":
            build(plan, split, own_input=True)  # so that it does not fail on the way
        return recipe, None
    without = replace(recipe, block_input="teacher")
    if len(split) == 1:
        return without, None
    why = None
    if split.candidates:
        why = "candidates are compared on it"
    elif recipe.steps is None and not batches.length:
        why = "the length of the training is not known"
    else:
        try:
            build(plan, split, own_input=True)
        except PlanError:
            why = "this plan cannot hand the student's own over"
    if why is None:
        return replace(recipe, block_input="teacher-then-student"), None
    return without, f"blocks are given the teacher's boundary throughout: {why}"


def check_candidates(candidates: Any, budget: Any, recipe: Recipe, hybrid: bool) -> None:
    """Errors: InputError for candidates or a budget that are none, or together with what they cannot have."""
    if budget is not None and not isinstance(budget, Budget):
        raise InputError("budget= is no budget.", given=repr(budget), expected="Budget(...) or None")
    if candidates is None:
        if budget is not None:
            raise InputError("There is a budget, and nothing to choose.", given="budget= without candidates=")
        return
    if not isinstance(candidates, Mapping) or not candidates:
        raise InputError(
            "candidates= is no mapping with places in it.",
            given=repr(candidates),
            expected="{module path: [module, ...]}",
        )
    if hybrid:
        raise InputError(
            "A student with adapters cannot have candidates.",
            given="candidates= and hybrid=True",
            do="leave one of them out",
        )
    if recipe.block_input not in (None, "teacher"):
        raise InputError(
            "Candidates are compared on the teacher's boundary: the student's own depends on which are chosen.",
            given=f"candidates= and block_input={recipe.block_input!r}",
            do='use Recipe(block_input="teacher"), and distil the student that comes out again',
        )
