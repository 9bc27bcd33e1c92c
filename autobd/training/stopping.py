"""Per block: the best weights so far, and whether it still learns."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from ..blocks import Split
from ..parts.candidates import name_of
from ..recipe import Recipe
from .history import History

_GAINS = 0.01  # of the relative loss, for an epoch to count as better


class Stopping:
    """Looks at the mean relative loss of every block over each epoch.

    Attributes:
        names: of what is trained: the blocks, then the candidates.
        losses: mean relative loss of the last epoch, or of the best one where its weights are kept.
        stopped: blocks and candidates that learn no more; `notes`: when and why.
    """

    def __init__(self, split: Split, recipe: Recipe) -> None:
        self.names = [*(f"block {b}" for b in range(len(split))), *map(str, split.candidates)]
        numbers = [*range(len(split)), *(c.block for c in split.candidates)]
        self._blocks = [recipe.for_block(b, len(split), split.logits) for b in numbers]
        self._keep, self._places = recipe.keep_best, [*_places(split), *_of_candidates(split)]
        self._together = [tie.blocks for tie in split.ties if tie.together]
        self._least = [math.inf] * len(numbers)
        self.losses = [math.inf] * len(numbers)
        self._best: list[dict[str, Tensor]] = [{} for _ in numbers]
        self._waited = [0] * len(numbers)  # epochs since it was better
        self._own_input = (0.0, 0.0)
        self.stopped: frozenset[int] = frozenset()
        self.notes: list[str] = []

    def end_epoch(self, history: History, values: Mapping[str, Tensor], own_input: tuple[float, float]) -> None:
        """Take the epoch in that has just ended, with the weights (and channel maps) at its end.

        `own_input` is how much of a block's input was the student's own in the epoch's first step and in its last. Only
        epochs that have it in common are compared: a block does better on the teacher's boundary than on its own.
        """
        if own_input != self._own_input:
            going = [b for b in range(len(self.names)) if b not in self.stopped]
            for b in going:
                self._least[b], self._best[b], self._waited[b] = math.inf, {}, 0
            self._own_input = own_input
        ends = [0, *history.epoch_ends]
        steps = history.relative[ends[-2] : ends[-1]]
        found = set(self.stopped)
        for b, recipe in enumerate(self._blocks):
            losses = [step[b] for step in steps if math.isfinite(step[b])]  # others were skipped
            if b in self.stopped or not losses:
                continue
            mean = sum(losses) / len(losses)
            self.losses[b] = min(mean, self._least[b]) if self._keep else mean
            self._waited[b] = 0 if mean < self._least[b] * (1 - _GAINS) else self._waited[b] + 1
            if mean < self._least[b]:
                self._least[b] = mean
                if self._keep:
                    self._best[b] = {key: values[key].clone() for key in self._places[b] if key in values}
            enough = recipe.stop_at is not None and mean <= recipe.stop_at
            if enough or (recipe.patience is not None and self._waited[b] >= recipe.patience):
                found.add(b)
        for tied in self._together:  # a weight that several blocks train is trained until the last of them is done
            if not set(tied) <= found:
                found -= set(tied)
        new = sorted(found - self.stopped)
        self.stopped = frozenset(found)
        self.notes += [
            f"{self.names[b]} stopped after epoch {len(history.epoch_ends)}, at a relative loss of {self._least[b]:.3g}"
            for b in new
        ]

    def state(self) -> dict[str, Any]:
        """To go on from: see `go_on`."""
        own = {"least": self._least, "losses": self.losses, "best": self._best, "waited": self._waited}
        return {**own, "stopped": sorted(self.stopped), "notes": self.notes, "own_input": self._own_input}

    def go_on(self, state: Mapping[str, Any]) -> None:
        """From what `state` gave."""
        self._least, self.losses, self._waited = state["least"], state["losses"], state["waited"]
        self._best, self.stopped, self.notes = state["best"], frozenset(state["stopped"]), state["notes"]
        first, last = state["own_input"]
        self._own_input = first, last

    def best(self) -> dict[str, Tensor]:
        """The weights of each block at the end of its best epoch; empty unless they are kept."""
        return {key: value for own in self._best for key, value in own.items()}


def _places(split: Split) -> list[Collection[str]]:
    """By block the names under which training reports what it has changed."""
    names: list[Collection[str]] = []
    ids = {id(t): n for n, t in (*split.student.model.named_parameters(), *split.student.model.named_buffers())}
    elsewhere = {(n, b) for tie in split.ties for b in tie.blocks[1:] for n in tie.parameters}
    for b, module in enumerate(split.bind_student()):
        own = {ids[id(t)] for t in (*module.parameters(), *module.buffers()) if id(t) in ids}
        maps = {f"out {b} {i}" for i in range(len(split.pairs[b].adapters))}
        if b:
            maps |= {f"in {b - 1} {i}" for i in range(len(split.pairs[b - 1].adapters))}
        names.append({n for n in own if (n, b) not in elsewhere} | maps)
    return names


def _of_candidates(split: Split) -> list[Collection[str]]:
    return [
        {
            name_of(split, i, key)
            for key, _ in (*c.split.student.model.named_parameters(), *c.split.student.model.named_buffers())
        }
        for i, c in enumerate(split.candidates)
    ]
