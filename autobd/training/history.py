"""Losses of a training run, by step and block, and what the models were worth."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..tables import table

_COLUMNS = ("stage", "step", "epoch", "block", "candidate", "loss", "relative")


@dataclass(frozen=True)
class Scored:
    """The metrics of one model over the data to validate with.

    Attributes:
        what: "teacher", "assembled" (the student as its blocks are), "recalibrated" (with running statistics of its own
            activations), or "finished" (after training end to end).
        epoch, step: when; `values`: by metric.
    """

    what: str
    epoch: int
    step: int
    values: dict[str, float]


@dataclass
class History:
    """What happened, step by step; grows while training runs.

    Attributes:
        losses: per step, the trained loss of each block, then of each candidate.
        relative: per step and block, mean squared error over the mean square of the teacher's boundary on the first
            batch: 1 is what a student that outputs zeros gets. Without the teacher, the loss itself.
        epoch_ends: number of steps done at the end of each epoch.
        candidates: of the columns behind those of the blocks: block, and number of the candidate.
        scores: what models were worth on the data to validate with.
        finish: the same of the training end to end, as one block; None without one.
        seconds: wall time of the training.
    """

    losses: list[tuple[float, ...]] = field(default_factory=list)
    relative: list[tuple[float, ...]] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    candidates: list[tuple[int, int]] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    finish: History | None = None
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Of every column of losses the block, and the number of the candidate, which is 0 for the student's own."""
        blocks = len(self.losses[0]) - len(self.candidates) if self.losses else 0
        return [*((b, 0) for b in range(blocks)), *self.candidates]

    @property
    def labels(self) -> list[str]:
        """Of every column of losses: the block, and the candidate if it is one."""
        return [f"{block}, candidate {number}" if number else str(block) for block, number in self.columns]

    def of(self, what: str) -> list[Scored]:
        """The scores of one model, over time."""
        return [s for s in self.scores if s.what == what]

    def add(self, losses: tuple[float, ...], relative: tuple[float, ...]) -> None:
        """The next step's, by block."""
        self.losses.append(losses)
        self.relative.append(relative)

    # ---------------------------------------------------------------- for other programs

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for every step and block, or candidate: see `_COLUMNS`; stage is "blocks" or "finish"."""
        for stage, history in (("blocks", self), ("finish", self.finish)):
            if history is None:
                continue
            epoch, columns = 0, history.columns
            for step, (losses, relative) in enumerate(zip(history.losses, history.relative, strict=True)):
                while epoch < len(history.epoch_ends) and step >= history.epoch_ends[epoch]:
                    epoch += 1
                for column, loss, r in zip(columns, losses, relative, strict=True):
                    yield dict(zip(_COLUMNS, (stage, step, epoch, *column, loss, r), strict=True))

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write `rows` as a table."""
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, _COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())

    def to_json(self, path: str | PathLike[str] | None = None) -> str:
        """Everything, as text; written to `path` too, where one is given."""
        text = json.dumps(asdict(self))
        if path is not None:
            Path(path).write_text(text)
        return text

    def to_pandas(self) -> Any:
        """`rows` as a pandas.DataFrame. Errors: InputError without pandas."""
        try:
            import pandas
        except ImportError:
            raise InputError("pandas is not installed.", do="pip install pandas, or use to_csv") from None
        return pandas.DataFrame(list(self.rows()))

    @classmethod
    def from_json(cls, text: str) -> History:
        """What `to_json` gave."""
        found = json.loads(text)
        for name in ("losses", "relative", "candidates"):
            found[name] = list(map(tuple, found[name]))
        found["scores"] = [Scored(**s) for s in found["scores"]]
        found["finish"] = None if found["finish"] is None else cls.from_json(json.dumps(found["finish"]))
        return cls(**found)

    def until(self, steps: int, epochs: int, scores: int) -> History:
        """The first so many of each."""
        return replace(
            self,
            losses=self.losses[:steps],
            relative=self.relative[:steps],
            epoch_ends=self.epoch_ends[:epochs],
            scores=self.scores[:scores],
        )

    def __str__(self) -> str:
        if not self.losses:
            return "no step yet"
        last = self.relative[-min(10, self.steps) :]
        rows = [
            [
                label,
                f"{self.losses[0][b]:.4g}",
                f"{self.losses[-1][b]:.4g}",
                f"{self.relative[0][b]:.4g}",
                f"{sum(r[b] for r in last) / len(last):.4g}",
            ]
            for b, label in enumerate(self.labels)
        ]
        text = table(["block", "first loss", "last loss", "first relative", f"relative, last {len(last)} steps"], rows)
        text = f"{self.steps} steps, {len(self.epoch_ends)} epochs, {self.seconds:.1f} s\n{text}"
        if self.finish is not None and self.finish.steps:
            first, end = self.finish.losses[0][0], self.finish.losses[-1][0]
            text += (
                f"\nend to end: {self.finish.steps} steps, {self.finish.seconds:.1f} s, loss {first:.4g} to {end:.4g}"
            )
        return f"{text}\n\n{self.ladder()}" if self.scores else text

    def ladder(self) -> str:
        """The newest score of every model, as a table."""
        newest = {s.what: s for s in self.scores}
        names = list(dict.fromkeys(name for s in newest.values() for name in s.values))
        lines = [[what, *(f"{s.values[n]:.4g}" if n in s.values else "" for n in names)] for what, s in newest.items()]
        return table(["model", *names], lines)
