"""What blockwise distillation is worth beside its alternatives: the part that the examples have in common.

Every student has the same passes over the data: those of its blocks and of the end-to-end part after them together.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

import autobd

INPUTS = ("teacher", "student", "teacher-then-student")  # what a block is given


@dataclass(frozen=True)
class Workload:
    """A pair of models and how to judge them.

    Attributes:
        teacher: trained; `student`: makes one from nothing.
        loader: makes the batches of a seed: (inputs, targets).
        validation: data and one metric.
        loss: of scratch training, `(output, targets) -> number`; None: there are no targets.
        distil: of end-to-end distillation, `(output, teacher's output) -> one value per row`.
        known: from targets to the teacher's output, where these hold it; None: the teacher is asked.
        lr: of blocks; `whole_lr`: of all training end to end.
        options: of `autobd.distill`; `recipe`: fields of its recipe; `start`: sets a student up before it is trained.
    """

    teacher: nn.Module
    student: Callable[[], nn.Module]
    loader: Callable[[int], Any]
    validation: autobd.Validation
    distil: Callable[[Any, Any], Any]
    loss: Callable[[Any, Any], Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    recipe: Mapping[str, Any] = field(default_factory=dict)
    finish: Mapping[str, Any] = field(default_factory=dict)
    start: Callable[[nn.Module], None] = lambda student: None
    known: Callable[[Any], Any] | None = None
    lr: float = 3e-3
    whole_lr: float = 3e-3


def arguments(description, blocks, finish, seeds=3):
    """The options that all examples have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=blocks, help="passes for the blocks")
    parser.add_argument("--finish", type=int, default=finish, help="passes end to end after them")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument(
        "--devices", default="1", help='as for autobd.distill: a number, or names as in "cuda:0,cuda:1"'
    )
    parser.add_argument("--inputs", default=",".join(INPUTS), help="what blocks are given, one after the other")
    parser.add_argument("--timing", action="store_true", help="also the wall time of the blocks on one and two ranks")
    return parser


def devices_of(text):
    return int(text) if text.isdigit() else text.split(",")


def ladder(work, options):
    """Print the scores of every student, over all seeds."""
    name = next(iter(work.validation.metrics), "accuracy")
    scores: dict[str, list[float]] = {}

    def note(what, value):
        scores.setdefault(what, []).append(value)
        print(f"  {what}: {value:.4f}", flush=True)

    total = options.epochs + options.finish
    for seed in range(options.seeds):
        print(f"seed {seed}", flush=True)
        torch.manual_seed(seed)
        first = work.student()
        work.start(first)
        note("teacher", judged(work, work.teacher))
        note("student, untrained", judged(work, first))
        for block_input in options.inputs.split(","):
            result = blockwise(work, first, seed, options, block_input)
            for scored in ("assembled", "recalibrated", "finished"):
                found = result.history.of(scored)
                if found:
                    note(f"{scored}, {block_input} input", found[-1].values[name])
        student = copy.deepcopy(first)
        end_to_end(work, student, seed, total, distil=True)
        note("end-to-end distillation", judged(work, student))
        if work.loss is not None:
            student = copy.deepcopy(first)
            end_to_end(work, student, seed, total, distil=False)
            note("scratch", judged(work, student))
    rows = [[what, *(f"{v:.4f}" for v in values), f"{mean(values):.4f}"] for what, values in scores.items()]
    print()
    print(tabulate(rows, [name, *(f"seed {s}" for s in range(options.seeds)), "mean"], "github", disable_numparse=True))
    if options.timing:
        timing(work, options)


def blockwise(work, first, seed, options, block_input, devices=None, finish=True, **more):
    """Distil a copy of `first`: blocks, then batch norms, then end to end."""
    torch.manual_seed(seed)
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in first.modules())
    recipe = {"lr": autobd.Schedule(work.lr, warmup=0.05, final=0.05), "epochs": options.epochs, **work.recipe}
    return autobd.distill(
        work.teacher,
        copy.deepcopy(first),
        work.loader(seed),
        devices=devices_of(options.devices) if devices is None else devices,
        recipe=autobd.Recipe(block_input=block_input, **recipe),
        validate=work.validation if finish else None,
        recalibrate=norms and finish,
        finish=autobd.Finish(options.finish, **{"lr": whole_schedule(work), **work.finish}) if finish else None,
        seed=seed,
        **{**work.options, **more},
    )


def end_to_end(work, student, seed, epochs, distil):
    """A plain loop: against the teacher's output, or the targets."""
    loader, teacher = work.loader(seed), work.teacher.eval()
    optimizer = torch.optim.AdamW(student.parameters(), work.whole_lr)
    schedule, steps, done = whole_schedule(work), epochs * len(loader), 0
    student.train()
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.param_groups[0]["lr"] = schedule(0, done / steps)
            output = called(student, inputs)
            if distil:
                with torch.no_grad():
                    wanted = called(teacher, inputs) if work.known is None else work.known(targets)
                loss = work.distil(output, wanted).mean()
            else:
                loss = work.loss(output, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1


def whole_schedule(work):
    """The learning rate of training end to end."""
    return autobd.Schedule(work.whole_lr, warmup=0.05, final=0.05)


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def judged(work, model):
    """The metric over all rows."""
    ((_, metric),) = (work.validation.metrics or {"accuracy": autobd.accuracy}).items()
    model.eval()
    total = rows = 0
    with torch.no_grad():
        if hasattr(metric, "compute"):
            metric.reset()
        for inputs, targets in work.validation.data:
            output = called(model, inputs)
            if hasattr(metric, "compute"):
                metric.update(output, targets)
            else:
                total += float(metric(output, targets)) * len(output)
            rows += len(output)
    return float(metric.compute()) if hasattr(metric, "compute") else total / rows


def timing(work, options, rounds=3):
    """Seconds of the blocks' training on one rank and on two, one thread each, in turn."""
    torch.manual_seed(0)
    first, found = work.student(), {1: [], 2: []}
    short = argparse.Namespace(**{**vars(options), "epochs": 1})
    for _ in range(rounds):
        for ranks, seconds in found.items():
            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            started = time.perf_counter()
            result = blockwise(work, first, 0, short, "teacher", ranks, finish=False, threads=1, progress=False)
            seconds.append((result.history.seconds, time.perf_counter() - started))
            torch.set_num_threads(threads)
    for ranks, seconds in found.items():
        run, whole = (sorted(s[i] for s in seconds)[rounds // 2] for i in (0, 1))
        print(f"{ranks} rank{'s' if ranks > 1 else ''}: an epoch of blocks {run:.1f} s, the whole call {whole:.1f} s")
