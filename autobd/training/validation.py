"""What the assembled student, and the teacher, are worth: `Validation`, and its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ..errors import InputError, users_code
from .pair import called

Function = Callable[[Any, Any], Any]


@runtime_checkable
class Counter(Protocol):
    """A metric that counts by itself, as those of torchmetrics do."""

    def update(self, output: Any, targets: Any) -> Any: ...

    def compute(self) -> Any: ...

    def reset(self) -> Any: ...


Metric = Function | Counter


@dataclass(frozen=True)
class Validation:
    """Data and metrics for the assembled student, at epoch ends: `distill(validate=Validation(loader, {"mae": mae}))`.

    Arguments:
        data: as for `distill`; never shuffled.
        metrics: by name, callables `(output, targets) -> number`, the mean over the rows of a batch, or objects with
            `update(output, targets)`, `compute()` and `reset()`. The output is the model's tensor, or a tuple of
            several; the targets what follows the inputs in a batch, or None. Default: accuracy, of a classifier.
        every: epochs from one time to the next; the last one is never left out.
        batch_size: rows per batch, for a dataset or tensor.
        targets: callable from a batch to what the metrics are given as targets.
    """

    data: Any
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    every: int = 1
    batch_size: int = 64
    targets: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        wrong = isinstance(self.data, (str, bytes, Mapping)) or not isinstance(self.data, (Iterable, Dataset))
        if wrong or isinstance(self.data, Iterator):
            raise InputError(
                "The data to validate with cannot be read every time.",
                given=type(self.data).__name__,
                expected="a DataLoader, Dataset, tensor or list of batches",
            )
        for name, metric in self.metrics.items():
            if not callable(metric) and not isinstance(metric, Counter):
                raise InputError(
                    f"The metric {name!r} cannot be called.",
                    given=type(metric).__name__,
                    expected="a callable (output, targets), or an object with update, compute and reset",
                )
        if not isinstance(self.every, int) or self.every < 1:
            raise InputError("Validation.every is no count.", given=repr(self.every), expected="at least 1")

    @classmethod
    def of(cls, given: Any, classifier: bool) -> Validation:
        """What `distill(validate=)` is given: data alone is judged by accuracy. Errors: InputError where nothing says
        how to judge."""
        found = given if isinstance(given, Validation) else cls(given)
        if found.metrics:
            return found
        if not classifier:
            raise InputError(
                "validate= does not say what to measure.",
                given="data alone, for a student that is not known to be a classifier",
                expected="metrics",
                do='pass validate=Validation(data, {"name": metric}), or Recipe(logits=True)',
            )
        return cls(found.data, {"accuracy": accuracy}, found.every, found.batch_size, found.targets)

    def batches(self) -> Iterator[Any]:
        """Errors: InputError for data that is none, or empty."""
        data = TensorDataset(self.data) if isinstance(self.data, Tensor) else self.data
        if isinstance(data, Dataset):
            data = DataLoader(data, self.batch_size)
        count = 0
        with users_code("The data to validate with cannot be read."):
            for batch in data:
                count += 1
                yield batch
        if not count:
            raise InputError("The data to validate with has no batch.", given=type(data).__name__)

    def check(self, fits: Callable[[Any], None]) -> None:
        """Look at the first batch, before anything is trained. Errors: InputError for no data; those of `fits`."""
        fits(next(self.batches()))

    def targets_of(self, batch: Any, default: Callable[[Any], Any]) -> Any:
        """What the metrics are given; `default`: where `targets` is None. Errors: InputError where `targets` fails."""
        return default(batch) if self.targets is None else called("Validation.targets", self.targets, batch)


class Scores:
    """The metrics over the batches of one round. Errors: InputError that names a metric which raises."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics, self._sums, self._rows = metrics, dict.fromkeys(metrics, 0.0), 0
        for metric in metrics.values():
            if isinstance(metric, Counter):
                metric.reset()

    def add(self, output: tuple[Tensor, ...], targets: Any) -> None:
        rows = len(output[0])
        given = output[0] if len(output) == 1 else output
        if isinstance(targets, Tensor):
            targets = targets.to(output[0].device)
        self._rows += rows
        for name, metric in self._metrics.items():
            with torch.no_grad():
                if isinstance(metric, Counter):
                    self._called(name, partial(metric.update, given, targets))
                else:
                    value = self._called(name, partial(metric, given, targets))
                    self._sums[name] += value * rows

    def values(self) -> dict[str, float]:
        return {
            name: self._called(name, metric.compute)
            if isinstance(metric, Counter)
            else self._sums[name] / max(self._rows, 1)
            for name, metric in self._metrics.items()
        }

    def _called(self, name: str, call: Callable[[], Any]) -> float:
        try:
            value = call()
            return 0.0 if value is None else float(value)
        except Exception as error:
            raise InputError(
                f"The metric {name!r} has failed: {type(error).__name__}: {error}",
                expected="a number from the output and the targets of a batch",
                do="see the error above for where it began",
            ) from error


def accuracy(output: Tensor, targets: Tensor) -> Tensor:
    """Part of the rows whose highest score is that of the target."""
    return (output.argmax(1) == targets).float().mean()
