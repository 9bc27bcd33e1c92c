"""Losses of a training run, by step and block."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..tables import table


@dataclass
class History:
    """What happened, step by step; grows while training runs.

    Attributes:
        losses: per step, the trained loss of each block.
        relative: per step and block, mean squared error over the mean square of the teacher's boundary on the first
            batch: 1 is what a student that outputs zeros gets.
        epoch_ends: number of steps done at the end of each epoch.
        seconds: wall time of the training.
    """

    losses: list[tuple[float, ...]] = field(default_factory=list)
    relative: list[tuple[float, ...]] = field(default_factory=list)
    epoch_ends: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        return len(self.losses)

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
        return f"{self.steps} steps, {len(self.epoch_ends)} epochs, {self.seconds:.1f} s\n{text}"
