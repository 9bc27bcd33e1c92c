"""Losses of a training run, by step and block."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tables import table


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
        losses: per step, the trained loss of each block.
        relative: per step and block, mean squared error over the mean square of the teacher's boundary on the first
            batch: 1 is what a student that outputs zeros gets.
        epoch_ends: number of steps done at the end of each epoch.
        scores: what models were worth on the data to validate with.
        seconds: wall time of the training.
    """

    losses: list[tuple[float, ...]] = field(default_factory=list)
    relative: list[tuple[float, ...]] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    scores: list[Scored] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)

    def of(self, what: str) -> list[Scored]:
        """The scores of one model, over time."""
        return [s for s in self.scores if s.what == what]

    def add(self, losses: tuple[float, ...], relative: tuple[float, ...]) -> None:
        """The next step's, by block."""
        self.losses.append(losses)
        self.relative.append(relative)

    def __str__(self) -> str:
        if not self.losses:
            return "no step yet"
        last = self.relative[-min(10, self.steps) :]
        rows = [
            [
                b,
                f"{self.losses[0][b]:.4g}",
                f"{self.losses[-1][b]:.4g}",
                f"{self.relative[0][b]:.4g}",
                f"{sum(r[b] for r in last) / len(last):.4g}",
            ]
            for b in range(len(self.losses[0]))
        ]
        text = table(["block", "first loss", "last loss", "first relative", f"relative, last {len(last)} steps"], rows)
        text = f"{self.steps} steps, {len(self.epoch_ends)} epochs, {self.seconds:.1f} s\n{text}"
        if not self.scores:
            return text
        newest = {s.what: s for s in self.scores}
        names = list(dict.fromkeys(name for s in newest.values() for name in s.values))
        lines = [[what, *(f"{s.values[n]:.4g}" if n in s.values else "" for n in names)] for what, s in newest.items()]
        return f"{text}\n\n{table(['model', *names], lines)}"
