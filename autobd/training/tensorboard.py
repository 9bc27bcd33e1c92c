"""Losses and scores for TensorBoard: `TensorBoard`."""

from __future__ import annotations

from os import PathLike

from ..errors import InputError
from .callbacks import Callback, Run


class TensorBoard(Callback):
    """`distill(callbacks=[TensorBoard("runs/one")])`: relative losses by block and step, scores by epoch.

    Arguments:
        directory: where to write; `every`: steps from one entry to the next.

    Errors: InputError where the package tensorboard is not installed.
    """

    def __init__(self, directory: str | PathLike[str], every: int = 10) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise InputError("TensorBoard is not installed.", do="pip install 'autobd[tensorboard]'") from None
        self.every, self._written = every, 0
        self._writer = SummaryWriter(str(directory))

    def on_step(self, run: Run) -> None:
        step = run.step - 1
        if step % self.every == 0:
            for label, value in zip(run.history.labels, run.history.relative[step], strict=True):
                self._writer.add_scalar(f"{run.stage}/relative loss of block {label}", value, step)

    def on_epoch(self, run: Run) -> None:
        for scored in run.history.scores[self._written :]:
            for name, value in scored.values.items():
                self._writer.add_scalar(f"{name}/{scored.what}", value, scored.epoch)
        self._written = len(run.history.scores)

    def on_end(self, run: Run) -> None:
        self._written = 0
        self._writer.flush()
