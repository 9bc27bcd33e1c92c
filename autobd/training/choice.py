"""Which of its candidates each block gets: the least sum of relative losses that a budget allows."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ..blocks import Split
from ..errors import InputError
from ..program import Op, Trace
from ..recipe import Budget
from ..tables import quantity, table

Cost = tuple[float, float, float]  # parameters, FLOPs, seconds


@dataclass(frozen=True)
class Score:
    """What a candidate for a block is worth, and what the block costs with it.

    Attributes:
        block, path: the place; `candidate`: its number, 0 for the student's own module.
        loss: mean relative loss over the last epoch, or the best one with `Recipe.keep_best`.
        parameters, flops: of the student's block, the latter of a forward for one row.
        seconds: of that forward in training, as measured; not a number where it never ran.
        chosen: whether the student has it now.
    """

    block: int
    path: str
    candidate: int
    loss: float
    parameters: int
    flops: float
    seconds: float
    chosen: bool = False

    @property
    def cost(self) -> Cost:
        return float(self.parameters), self.flops, self.seconds


@dataclass(frozen=True)
class Scores:
    """All candidates, block by block; prints itself as a table."""

    rows: tuple[Score, ...]

    @property
    def chosen(self) -> list[tuple[int, int]]:
        """Blocks that get another module than the student's own, and its number."""
        return [(s.block, s.candidate) for s in self.rows if s.chosen and s.candidate]

    def __str__(self) -> str:
        lines = [
            [
                s.block, s.path, s.candidate, f"{s.loss:.4g}", quantity(s.parameters), quantity(s.flops),
                quantity(s.seconds, "s"), "yes" if s.chosen else "",
            ]
            for s in self.rows
        ]  # fmt: skip
        heads = ["block", "place", "candidate", "relative loss", "parameters", "FLOPs", "seconds", "chosen"]
        return f"candidates; FLOPs and seconds are of a forward for one row\n{table(heads, lines)}"


Seconds = Mapping[tuple[int, int | None], float]  # by block and candidate's number in the program


def forward_seconds(trace: Trace) -> dict[tuple[int, int | None], float]:
    """Median seconds of every student's forward in training, for one row, all ranks together."""
    spent: dict[tuple[int, int | None], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for event in trace.events:
        if event.instruction.op is Op.STUDENT_FORWARD:
            spent[event.instruction.block or 0, event.instruction.candidate][event.step] += event.seconds
    return {key: median(steps.values()) / trace.program.plan.batch_size for key, steps in spent.items()}


def contest(split: Split, losses: Sequence[float], seconds: Seconds, budget: Budget) -> tuple[Scores, tuple[str, ...]]:
    """What all candidates are worth and which are chosen; what the user should know.

    Arguments:
        losses: of the blocks, then of the candidates; `seconds`: as from `forward_seconds`.
    """
    options = _options(split, losses, seconds)
    fixed = _fixed(split, seconds)
    picks = choose([[(s.loss, s.cost) for s in own] for own in options], fixed, budget)
    notes: tuple[str, ...] = ()
    if picks is None:  # parameters and FLOPs were looked at before, so that it is the seconds
        bounded = Budget(budget.parameters, budget.flops)
        picks = choose([[(s.seconds, s.cost) for s in own] for own in options], fixed, bounded)
        assert picks is not None
        total = fixed[2] + sum(own[i].seconds for own, i in zip(options, picks, strict=True))
        notes = (
            f"no choice of candidates keeps within Budget(seconds={budget.seconds}) too; the fastest that keeps within "
            f"the rest takes {quantity(total, 's')} for one row, and was chosen",
        )
    rows = [replace(s, chosen=i == pick) for own, pick in zip(options, picks, strict=True) for i, s in enumerate(own)]
    return Scores(tuple(rows)), notes


def choose(options: Sequence[Sequence[tuple[float, Cost]]], fixed: Cost, budget: Budget) -> list[int] | None:
    """Of each block the option with which the sum of losses is least within the budget; None if nothing is.

    Exact: block by block, all sums that no other beats in loss and in every cost that has a limit.

    Arguments:
        options: by block, loss and cost of each; `fixed`: cost of all other blocks.
    """
    limits = [(i, limit) for i, limit in enumerate(vars(budget).values()) if limit is not None]
    states: list[tuple[tuple[float, ...], list[int]]] = [((0.0, *(fixed[i] for i, _ in limits)), [])]
    for own in options:
        if all(math.isinf(loss) for loss, _ in own):  # it never learned: no reason to prefer one
            own = [(0.0, cost) for _, cost in own]
        grown = sorted(
            (tuple(a + b for a, b in zip(sums, (loss, *(cost[i] for i, _ in limits)), strict=True)), [*picks, option])
            for sums, picks in states
            for option, (loss, cost) in enumerate(own)
        )
        states = []
        for sums, picks in grown:
            if all(s <= limit for s, (_, limit) in zip(sums[1:], limits, strict=True)) and not any(
                all(a <= b for a, b in zip(better, sums, strict=True)) for better, _ in states
            ):
                states.append((sums, picks))
    return states[0][1] if states else None


def check_budget(split: Split, budget: Budget) -> None:
    """Errors: InputError where no choice of candidates has so few parameters or FLOPs."""
    nothing: Seconds = {}
    losses = [0.0] * (len(split) + len(split.candidates))
    options, fixed = _options(split, losses, nothing), _fixed(split, nothing)
    bounded = Budget(budget.parameters, budget.flops)
    if choose([[(s.loss, s.cost) for s in own] for own in options], fixed, bounded) is None:
        least = [fixed[i] + sum(min(s.cost[i] for s in own) for own in options) for i in (0, 1)]
        raise InputError(
            "No choice of candidates keeps within the budget.",
            given=f"parameters={budget.parameters}, flops={budget.flops}",
            expected=f"at least {int(least[0])} parameters and {int(least[1])} FLOPs, though perhaps not both at once",
            do="give smaller candidates, or a larger budget",
        )


def _options(split: Split, losses: Sequence[float], seconds: Seconds) -> list[list[Score]]:
    """By block with candidates, what they are worth: the student's own first."""
    found: dict[int, list[Score]] = {}
    rows, unknown = split.student.example.rows, float("nan")
    for number, c in enumerate(split.candidates, len(split)):
        for at, block, candidate in ((None, split.pairs[c.block].student, 0), (number, c.student, c.number)):
            loss, own = losses[c.block if at is None else at], found.setdefault(c.block, [])
            time = seconds.get((c.block, at), unknown)
            if at is not None or not own:
                own.append(Score(c.block, c.path, candidate, loss, block.parameter_count, block.flops / rows, time))
    return list(found.values())


def _fixed(split: Split, seconds: Seconds) -> Cost:
    """What the blocks without candidates cost."""
    others = [b for b in range(len(split)) if b not in {c.block for c in split.candidates}]
    own = [split.pairs[b].student for b in others]
    sizes = {name: p.numel() for name, p in split.student.model.named_parameters()}
    parameters = float(sum(sizes[n] for n in {n for block in own for n in block.parameters}))  # tied ones count once
    flops = sum(block.flops for block in own) / split.student.example.rows
    return parameters, flops, sum(seconds.get((b, None), float("nan")) for b in others)
