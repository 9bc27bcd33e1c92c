"""Run the assembled student, or the teacher, through the ranks that hold their blocks, between steps of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..blocks import Split
from ..program import Program
from ..ranks import EPOCH, STEP, Header
from ..ranks.pickling import loads
from ..runtime import Evaluation, Rank
from .pair import Pair
from .sizes import Sizes, check_like
from .validation import Scores, Validation

PHASES = ("done", "student", "teacher", "recalibrate", "restore", "save")  # what rank 0 asks for, by number


def evaluations(rank: Rank, programs: Mapping[str, Program]) -> dict[str, Evaluation]:
    """One rank's ends of the evaluation programs, by the model they run; opened by all ranks in the same order."""
    found: dict[str, Evaluation] = {}
    first = rank.links.end
    for name, program in programs.items():
        found[name] = Evaluation(rank, program, first)
        first = found[name].end
    return found


def prepared(evaluation: Evaluation, phase: str) -> AbstractContextManager[None]:
    """How blocks are set for a phase."""
    if phase == "recalibrate":
        return evaluation.recalibrating()
    return evaluation.as_used() if phase == "student" else nullcontext()


def serve(rank: Rank, by_model: Mapping[str, Evaluation], phase: str) -> None:
    """What a rank other than the caller's does in a phase."""
    evaluation = by_model["teacher" if phase == "teacher" else "student"]
    step, links = evaluation.program.compile(rank.number), evaluation.links
    assert rank.links.news is not None
    with prepared(evaluation, phase):
        while evaluation.works:
            coming = links.next()
            if coming.kind != STEP:
                break
            if not rank.knows(coming.sizes):
                rank.learn(coming.sizes, loads(bytes(rank.links.news.take()[1][0].numpy())))
            evaluation.perform(step, evaluation, None)
        links.pass_on(EPOCH, 0)


def ask(rank: Rank, phase: str, tensors: Sequence[Tensor] = ()) -> None:
    """Tell the other ranks what comes next between two steps; "done": nothing more, until the next time."""
    number = torch.tensor([PHASES.index(phase)])
    for sender in rank.links.announce.values():
        sender.send(Header(EPOCH), [number, *tensors])


class Judge:
    """Rank 0's side.

    Arguments:
        to_pair: as for `train`; `announce`: tells ranks of blocks for other sizes of inputs (see `Announcer`).
    """

    def __init__(
        self,
        rank: Rank,
        by_model: Mapping[str, Evaluation],
        split: Split,
        sizes: Sizes,
        to_pair: Callable[[Any], Pair],
        announce: Callable[[int, Any, Iterable[int]], None],
    ) -> None:
        self._rank, self._by_model, self._split, self._sizes = rank, by_model, split, sizes
        self._to_pair, self._announce = to_pair, announce

    def score(self, validation: Validation, model: str, targets_of: Callable[[Any], Any]) -> dict[str, float]:
        """The metrics of a model over the data. Errors: InputError for a batch that does not fit, or from a metric."""
        scores, waiting, parts, first = Scores(validation.metrics), dict[int, Any](), dict[int, list[Any]](), 0

        def take(outputs: Iterable[tuple[Header, list[Tensor]]]) -> None:
            nonlocal first
            for header, tensors in outputs:
                parts.setdefault(header.step, []).append((header, tensors))
            while first in parts and sum(h.last - h.first for h, _ in parts[first]) == parts[first][0][0].batch:
                own = sorted((p for p in parts.pop(first) if p[1]), key=lambda p: p[0].first)
                here = [[t.to(self._rank.device) for t in tensors] for _, tensors in own]
                whole = [t[0] if len(t) == 1 else torch.cat(t) for t in zip(*here, strict=True)]
                scores.add(tuple(whole), waiting.pop(first))
                first += 1

        evaluation = self._by_model[model]

        def keep(step: int, batch: Any) -> None:
            waiting[step] = validation.targets_of(batch, targets_of)
            take(evaluation.take())

        self._run(evaluation, model, validation.batches(), keep)
        take(evaluation.take())
        while waiting:
            take([evaluation.wait()])
        return scores.values()

    def recalibrate(self, batches: Iterable[Any]) -> None:
        """Let batch norms take in the statistics of the assembled student on these batches."""
        self._run(self._by_model["student"], "recalibrate", batches, lambda step, batch: None)

    def _run(
        self, evaluation: Evaluation, phase: str, batches: Iterable[Any], then: Callable[[int, Any], None]
    ) -> None:
        ask(self._rank, phase)
        step = evaluation.program.compile(0)
        with prepared(evaluation, phase):
            for number, batch in enumerate(batches):
                pair = self._to_pair(batch)
                check_like(pair, self._split)
                size, forms = self._sizes.of(pair)
                self._announce(size, forms, [r for r, own in enumerate(evaluation.program.ranks) if own])
                evaluation.begin(Header(STEP, number, pair[0].rows, sizes=size))
                evaluation.perform(step, evaluation, pair)
                then(number, batch)
            evaluation.links.pass_on(EPOCH, 0)
