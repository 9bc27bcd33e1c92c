"""`distill`: from two whole models and data to a trained student."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .blocks import split
from .blocks.folding import Wanted
from .blocks.hybrid import hybrid as hybrid_student
from .blocks.initialise import weights_from_teacher
from .blocks.pair import check_pair
from .blocks.ties import Policy
from .cluster import Cluster
from .costs import Profile
from .distilled import Distilled, Shared, received, tensors_of
from .errors import InputError
from .graph.randomness import same_randomness
from .graph.state import unwrapped
from .interrupts import interrupts_kept
from .parts.candidates import name_of
from .planner import Plan, planned
from .program import build
from .ranks import Group
from .ranks import open as open_ranks
from .ranks.joined import Joined, launched
from .recipe import Budget, Finish, Recipe, check_tied
from .runtime import statistics_note
from .training import (
    Batches,
    Checkpoint,
    Moves,
    OwnRows,
    Stages,
    Task,
    ToPair,
    Validation,
    asked_checkpoint,
    asked_finish,
    asked_recalibration,
    asked_recipe,
    asked_resume,
    check_batch,
    check_budget,
    check_candidates,
    check_like,
    check_options,
    in_order,
    random_batches,
    signals,
    with_block_input,
)


def distill(
    teacher: nn.Module,
    student: nn.Module,
    data: Any = None,
    *,
    devices: str | int | Sequence[str] | Group = "auto",
    strategy: str | Plan = "auto",
    profile: Profile | Literal["auto", "analytic", "measured"] = "auto",
    replan: bool = True,
    threads: int | None = None,
    timeout: float = 300.0,
    recipe: Recipe | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    example: Any = None,
    inputs: Sequence[Callable[[Any], Any] | None] | None = None,
    targets: Callable[[Any], Tensor] | None = None,
    own_rows: bool = False,
    validate: Any = None,
    recalibrate: bool | int = False,
    finish: Finish | int | None = None,
    blocks: int | None = None,
    cuts: Sequence[tuple[str, str]] | None = None,
    adapters: Wanted = "auto",
    resample: bool = False,
    hybrid: bool = False,
    callbacks: Sequence[Any] = (),
    checkpoint: Checkpoint | str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    candidates: Mapping[str, Sequence[nn.Module]] | None = None,
    budget: Budget | None = None,
    ties: Policy = "auto",
    init: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Distilled:
    """Train `student` block by block to reproduce `teacher`.

    Both models are recorded, cut where their boundaries match, and each student block learns to give the teacher's
    next boundary from the teacher's previous one. The teacher is used in eval mode and comes back exactly as it was;
    the student is trained in place, on a copy that is written back at epoch ends.

    Arguments:
        teacher, student: any two modules on one device.
        data: DataLoader, Dataset (of samples), tensor (rows are samples), or other iterable (of batches). A batch is a
            tensor, `(inputs, targets)`, several inputs, or a dict of keyword arguments. None: a smoke run on random
            inputs.
        devices: one rank for each: "auto" (all GPUs; without one, the device that the models are on), a number of
            them, names such as `["cuda:0", "cuda:1"]` or `["cpu"] * 2`, or a group of ranks that is open
            (`ranks.open`), which may run several times.
        strategy: "auto", a schedule by its name in the Pipe-BD paper, or a `Plan` (see `planner.plan`).
        profile: what to plan by: every block measured on the ranks, in about 20 seconds and with copies of the
            recipe's own losses and optimizers ("measured"), or operations and bytes ("analytic"), or a profile made
            before (`profile`). "auto" measures where there is something to plan: several ranks, and no `Plan` given.
        replan: at epoch ends, plan again where ranks take other times than the profile says, and move if that is
            faster (not with a `Plan` of one's own, or modules that are kept whole). A note tells of it. What is
            computed stays the same, but for batch norms and dropout of blocks whose batch is then split otherwise.
        threads: of each rank on a CPU; default: the cores, shared evenly.
        timeout: seconds after which a rank that does not answer is an error. Ranks also wait for callbacks and metrics.
        recipe: loss, optimizer, learning rate and length; `epochs` overrides the same field.
        batch_size: rows per batch, for a dataset or tensor.
        example: inputs to record the models with, at any batch size; default: the first batch.
        inputs: `(for_teacher, for_student)`, callables from a batch to that model's arguments (None: as it is).
        targets: callable from a batch to its targets, where the recipe has a loss against them; default: what follows
            the inputs, or the entry "labels" or the like of a dict.
        own_rows: each rank that reads inputs loads its own rows of a map-style dataset (by the same order; the dataset
            is sent to it), instead of rank 0 all of them. A dataset that draws random numbers then draws other ones.
        validate: data to judge the assembled student with at epoch ends, and the teacher once, through the ranks that
            hold their blocks: a loader, dataset or list of batches (accuracy of a classifier), or a `Validation` with
            metrics of one's own. `result.history.scores` has what came out.
        recalibrate: in the end, let the assembled student's batch norms take their running statistics from its own
            activations on so many batches of `data` (True: 50).
        finish: train the whole student end to end after its blocks, the batch split over all ranks: a `Finish`, or a
            number of epochs. `result.history.finish` tells of it.
        blocks, cuts, adapters, resample, hybrid, ties: how the models are split (see `split`).
        checkpoint: write where the training is to disk while it goes on: a `Checkpoint`, or a directory. SIGTERM and
            SIGUSR1, a scheduler's notice, and Ctrl-C save within the step; the first two then end the process with 0.
        resume: go on from a checkpoint: a directory, or "auto": from the newest one where they are written, if there is
            any. On any number of ranks; a damaged one, or one of another training, is refused.
        candidates: other modules for places in the student, `{module path: [module, ...]}`. All are trained on the
            same boundaries, each with what else is in its block; the student gets those with which the sum of its
            blocks' relative losses (against the teacher, whatever else the recipe trains for) is least, when all are
            trained. `result.candidates` has what each is worth. Channel maps next to such a place are matched ones.
        budget: what the student may cost with them: a `Budget`.
        callbacks: objects with some of the methods of `Callback`, called in this process.
        init: "teacher" starts the student from the teacher's weights where shapes allow.
        seed: of dropout and of the order of a dataset or tensor. The caller's random state is left alone.
        progress: show a progress bar.

    Errors: an `AutobdError` that names what was given, what was expected and what to do.
    """
    teacher, student = unwrapped(teacher), unwrapped(student)
    check_pair(teacher, student)
    if any(p.is_meta for p in (*teacher.parameters(), *student.parameters())):
        raise InputError(
            "A model is on the meta device: it has no weights to train or to learn from.",
            given="parameters on meta",
            expected="models with weights",
            do="build the models outside of torch.device('meta'), or use autobd.split to look at them",
        )
    flags = {"replan": replan, "own_rows": own_rows, "resample": resample, "hybrid": hybrid, "progress": progress}
    check_options(init, callbacks, seed, flags)
    recipe = asked_recipe(recipe, epochs)
    check_candidates(candidates, budget, recipe, hybrid)
    budget = budget or Budget()
    checkpoint = asked_checkpoint(checkpoint)
    to_pair = ToPair.of(teacher, student, inputs, targets, example, recipe.target_loss is not None)
    home = next(student.parameters()).device
    as_asked = partial(
        split,
        teacher,
        student,
        blocks=blocks,
        cuts=cuts,
        adapters=adapters,
        resample=resample,
        hybrid=hybrid,
        ties=ties,
        candidates=candidates,
        logits=recipe.logits,
        inputs=(lambda pair: pair[0], lambda pair: pair[1]),
    )
    with (
        in_order(),
        interrupts_kept(),
        same_randomness(teacher, student),
        torch.inference_mode(False),
        _ranks(devices, home, timeout, threads) as group,
    ):
        if isinstance(group, Joined) and not group.leads:
            with signals(checkpoint is not None):  # rank 0 hears them too, and says what is to be done
                group.serve()
            return received(group.share(), as_asked, student, home)
        with _telling(group):
            torch.manual_seed(seed)
            notes = []
            if data is None:
                data = random_batches(teacher, example, batch_size, seed)
                batch_size = None
                notes.append(
                    f"no data was given: {len(data)} random batches, a smoke run only; the student is of no use"
                )
                warnings.warn(notes[-1], stacklevel=2)
            batches = OwnRows(data, batch_size, seed, to_pair) if own_rows else Batches(data, batch_size, seed)
            saved = asked_resume(resume, checkpoint)
            how, recalibration = asked_finish(finish, batches, hybrid), asked_recalibration(recalibrate, batches)
            batch = batches.first()
            first = tuple(a.on(home) for a in to_pair(batch))
            bare = replace(to_pair, wanted=False)
            recorded = first if example is None else tuple(a.on(home) for a in bare(example))
            found = as_asked(recorded)
            models = student, *(c.split.student.model for c in found.candidates)
            recipe.frozen({name: None for model in models for name, _ in model.named_parameters()})
            of_block = [recipe.for_block(block, len(found), found.logits) for block in range(len(found))]
            for tie in found.ties:
                if tie.together:
                    check_tied([of_block[b] for b in tie.blocks])
            verification = found.verify()
            for candidate in found.candidates:
                candidate.split.verify()
            check_budget(found, budget)
            check_like(first, found)
            found = found.fit(first[0], verification.teacher_writes)
            costs, chosen = planned(profile, found, group, first[0].rows, recipe, strategy, progress)
            recipe, taught = with_block_input(recipe, found, chosen, batches)
            notes += filter(None, [statistics_note(found, chosen), taught])
            program = build(chosen, found, recipe.own_input(0.0) > 0, own_rows, to_pair.wanted)
            logits = recipe.logits if recipe.logits is not None else found.logits
            start = weights_from_teacher(found) if init == "teacher" else {}
            if init == "teacher":
                count = len(tensors_of(student))
                notes.append(f'init="teacher" set {len(start)} of the student\'s {count} parameters and buffers')
            for i, candidate in enumerate(found.candidates if init == "teacher" else ()):
                own = weights_from_teacher(candidate.split)
                start |= {name_of(found, i, k): v for k, v in own.items() if k.startswith(f"{candidate.path}.")}
            moves = Moves(found, costs, chosen.strategy if isinstance(strategy, Plan) else strategy)
            # Modules kept whole may have state of their own, which stays where it is.
            may_move = replan and group.size > 1 and isinstance(strategy, str)
            may_move = may_move and not any(s.student.opaque for s in (found, *(c.split for c in found.candidates)))
            validation = None if validate is None else Validation.of(validate, bool(logits))
            if validation is not None:
                validation.check(lambda batch: check_batch(bare(batch), found))
            task = Task(
                found,
                recipe,
                batches,
                to_pair,
                seed,
                verification.teacher_writes,
                start,
                moves.look if may_move else None,
                validation,
                callbacks=tuple(callbacks),
            )
            ended = Stages(task, program, recalibration, how, batch, budget, checkpoint, saved).run(group, progress)
            trained = ended.trained
            if ended.task.split is not found:
                found, verification = ended.task.split, ended.task.split.verify()
        done = Distilled(
            student,
            trained.history,
            trained.trace,
            found,
            verification,
            moves.profile,
            trained.program.plan,
            trained.program,
            (*notes, *ended.notes, *moves.notes),
            candidates=ended.scores,
        )
        if isinstance(group, Joined):
            group.share(Shared.of(done, recorded, trained.maps))
    return replace(done, hybrid=hybrid_student(found, student, trained.maps))


def _ranks(devices: Any, home: torch.device, timeout: float, threads: int | None) -> AbstractContextManager[Group]:
    """The group that is given, the launcher's processes, or local ranks."""
    if isinstance(devices, Group):
        return nullcontext(devices)
    processes = launched()
    if processes > 1 and (devices in ("auto", processes) or not isinstance(devices, (str, int))):
        return Joined("auto" if devices == processes else devices, timeout, threads)
    cluster = Cluster.of(devices, home)
    if not cluster.exists:
        raise InputError(
            "These devices can be planned for, not run on.",
            given=f"devices={devices!r}",
            expected="devices that are here",
            do="see autobd inspect --devices",
        )
    return open_ranks(cluster, timeout, threads)


@contextmanager
def _telling(group: Group) -> Iterator[None]:
    """Let the launcher's other processes fail as this one does."""
    try:
        yield
    except Exception as error:
        if isinstance(group, Joined):
            tell = group.tell if group.broken else group.share
            tell(error)
        raise
