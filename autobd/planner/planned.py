"""A plan for the ranks that are there, by what they measure."""

from __future__ import annotations

from ..blocks import Split
from ..costs import Profile, analytic
from ..costs import profile as measured
from ..errors import InputError
from ..ranks import Group
from ..recipe import Recipe
from .plan import Plan
from .strategies import plan

_REFINED = 2  # times that a plan's own shares are measured, and planned by
_MORE = 5.0  # seconds for that


def planned(
    given: Profile | str,
    found: Split,
    group: Group,
    batch: int,
    recipe: Recipe,
    strategy: str | Plan,
    progress: bool,
) -> tuple[Profile, Plan]:
    """What to plan by, and the plan. Where blocks are measured, also at the shares that the plan has.

    Arguments:
        given: a profile, or "auto", "measured" or "analytic" (see `distill`); `batch`: rows of a whole batch.

    Errors: InputError for a profile of other blocks or devices; else as `plan`.
    """
    cluster = group.cluster
    if isinstance(given, Profile):
        if len(given.blocks) != len(found) or given.devices != cluster.devices:
            raise InputError(
                "The profile is of other blocks or devices.",
                given=f"{len(given.blocks)} blocks on {given.devices}",
                expected=f"{len(found)} blocks on {cluster.devices}",
            )
        return given, plan(given, strategy)
    if given not in ("auto", "measured", "analytic"):
        raise InputError(
            "profile= is no profile.", given=repr(given), expected='a Profile, "auto", "measured" or "analytic"'
        )
    if isinstance(strategy, Plan):
        costs = analytic(found, cluster, strategy.batch_size)
    elif given == "measured" or (given == "auto" and group.size > 1 and strategy != "ir"):
        costs = measured(found, group, batch, recipe, progress=progress)
        for _ in range(_REFINED):
            lacking = [s for s in plan(costs, strategy).shares if not costs.knows(s)]
            if not lacking:
                break
            costs = measured(found, group, batch, recipe, known=costs, shares=lacking, budget=_MORE, progress=progress)
    else:
        costs = analytic(found, cluster, batch)
    return costs, plan(costs, strategy)
