"""The command line: `autobd inspect`, `autobd distill`, `autobd bench`, `autobd demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .api import distill
from .bench import bench
from .blocks import Split, split
from .blocks.folding import KINDS
from .cluster import Cluster
from .costs import profile
from .errors import AutobdError, InputError
from .graph import declared_example
from .planner import STRATEGIES, Plan
from .recipe import Recipe
from .report import Report, inspect
from .specs import FORMS, load, load_model, load_pair
from .training import Checkpoint, random_batches


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (1 after an error, 130 after Ctrl-C)."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except AutobdError as error:
        print(f"autobd: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("autobd: stopped", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="autobd", description="Automatic blockwise distillation of any two PyTorch models."
    )
    parser.add_argument("--version", action="version", version=f"autobd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    shown = commands.add_parser("inspect", help="show how a pair of models is split into blocks")
    shown.set_defaults(command=_inspect)
    train = commands.add_parser("distill", help="train a student block by block")
    train.set_defaults(command=_distill)
    timed = commands.add_parser("bench", help="run every strategy for real, beside what is predicted")
    timed.set_defaults(command=_bench)
    for command in (shown, train, timed):
        command.add_argument("teacher", metavar="TEACHER", help=FORMS)
        command.add_argument("student", metavar="STUDENT")
        command.add_argument(
            "--input",
            metavar="SIZE",
            help="of one input: 3x224x224 for images, 128 for tokens (default: the model's own)",
        )
        command.add_argument("--batch-size", type=int, help="rows per batch")
        command.add_argument("--blocks", type=int, help="how many blocks (default: as many as stay balanced)")
        command.add_argument(
            "--cut", action="append", metavar="TEACHER_MODULE=STUDENT_MODULE", help="cut after these (repeat)"
        )
        command.add_argument("--adapters", choices=KINDS, default="auto", help="where channels differ")
        command.add_argument("--resample", action="store_true", help="allow cuts where image sizes differ")
        command.add_argument("--ties", choices=["auto", "first", "together"], default="auto", help="of shared weights")
    shown.add_argument("--hybrid", action="store_true", help="allow trainable adapters that cannot be folded")
    shown.add_argument("--explain", action="store_true", help="also tell why these cuts")
    shown.add_argument("--json", action="store_true", help="print plain values for machines")
    shown.add_argument("--verify", action="store_true", help="also prove that the blocks are the models")
    shown.add_argument(
        "--devices",
        help='plan for these: a number, names with commas, or "4xA6000", "2xA100+2xL4", "8xH100/2 nodes"; those '
        "that are here are measured",
    )
    shown.add_argument("--strategy", default="auto", help=", ".join(STRATEGIES) + ", or a file with a plan")
    shown.add_argument("--memory", type=float, help="GB that each device may hold")
    shown.add_argument("--html", metavar="FILE", help="write the report as a page")
    shown.add_argument("--trace", metavar="FILE", help="write the schedule for chrome://tracing and Perfetto")
    shown.add_argument("--code", type=int, metavar="RANK", help="also print the program of a rank")
    shown.add_argument("--quiet", action="store_true", help="no progress bar")
    train.add_argument(
        "--data", metavar="SPEC", help="package.module:callable or file.py:callable that returns a loader or dataset"
    )
    train.add_argument("--init", choices=["teacher"], help="start from the teacher's weights where shapes allow")
    train.add_argument("--epochs", type=int)
    train.add_argument("--steps", type=int)
    train.add_argument("--lr", type=float, default=1e-3)
    train.add_argument(
        "--block-input",
        choices=["teacher", "student", "teacher-then-student"],
        help="whose boundary a student block is given; default: where possible the last of these",
    )
    train.add_argument("--precision", choices=["bf16", "fp16"], help="run blocks under autocast")
    train.add_argument("--validate", metavar="SPEC", help="like --data: data, or a Validation, to judge it by")
    train.add_argument("--recalibrate", action="store_true", help="give batch norms the student's own statistics")
    train.add_argument("--finish", type=int, metavar="EPOCHS", help="then train the whole student end to end")
    train.add_argument("--checkpoint", metavar="DIRECTORY", help="write there where the training is, to go on from")
    train.add_argument(
        "--every", default="1 epoch", metavar="TIME", help='when: "1 epoch" (default), "200 steps", "10 minutes"'
    )
    train.add_argument(
        "--resume", nargs="?", const="auto", metavar="FOLDER", help="go on from the last checkpoint, or from this one"
    )
    train.add_argument(
        "--devices", default="auto", help='a number, or names with commas: "2", "cuda:0,cuda:1" (default: all GPUs)'
    )
    train.add_argument("--strategy", default="auto", help=", ".join(STRATEGIES))
    train.add_argument("--threads", type=int, help="of each rank on a CPU (default: the cores, shared evenly)")
    train.add_argument("--timeout", type=float, default=300.0, help="seconds after which a silent rank is an error")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--output", metavar="FILE", help="write the student's weights here, to .pt or .safetensors")
    train.add_argument("--quiet", action="store_true", help="no progress bar")

    timed.add_argument("--devices", default="auto", help="as for distill")
    timed.add_argument("--threads", type=int, help="of each rank on a CPU")
    timed.add_argument("--rounds", type=int, default=3, help="of all strategies in turn")
    timed.add_argument("--steps", type=int, default=16, help="of each run")
    timed.add_argument("--quiet", action="store_true", help="no progress bars")

    demo = commands.add_parser("demo", help="a newcomer's run: distil a small network on handwritten digits")
    demo.set_defaults(command=_demo)
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--quiet", action="store_true", help="no progress bars")
    return parser


def _cuts(options: argparse.Namespace) -> list[tuple[str, str]] | None:
    if options.cut is None:
        return None
    if any(cut.count("=") != 1 for cut in options.cut):
        raise InputError("--cut is not a pair.", given=options.cut, expected="TEACHER_MODULE=STUDENT_MODULE")
    return [(teacher, student) for teacher, student in (cut.split("=") for cut in options.cut)]


def _example(options: argparse.Namespace, model: Any, rows: int) -> Any:
    size: tuple[int, ...] | None = None
    if options.input is not None:
        if not all(part.isdigit() for part in options.input.split("x")):
            raise InputError(
                "--input is not a size.", given=options.input, expected="numbers with x between, such as 3x224x224"
            )
        size = tuple(int(part) for part in options.input.split("x"))
    return declared_example(model, options.batch_size or rows, size)


def _given(options: argparse.Namespace, model: Any) -> Any:
    """Random inputs of the size that is asked for, or that the model declares."""
    example = _example(options, model, 8)
    if example is None:
        raise InputError(
            f"{options.teacher} does not say what inputs it takes.", expected="--input, for example 3x224x224"
        )
    return random_batches(model, example, None, 0)[0]


def _inspect(options: argparse.Namespace) -> None:
    here = options.devices is not None and Cluster.of(_devices(options.devices), torch.device("cpu")).exists
    teacher, student = load_pair(options.teacher, options.student, weights=options.verify or here)
    example = _given(options, teacher)
    found = split(
        teacher,
        student,
        example,
        blocks=options.blocks,
        cuts=_cuts(options),
        hybrid=options.hybrid,
        **_adapted(options),
    )
    explanation = found.explain() if options.explain else None
    verification = found.verify() if options.verify else None
    report = None if options.devices is None else _report(found, options)
    code = report.program.code(options.code) if report and options.code is not None else None
    if options.json:
        values = found.to_dict() if report is None else json.loads(report.to_json())
        values |= _present(explanation=explanation, verification=verification, code=code)
        print(json.dumps(values, indent=2))
    else:
        print("\n\n".join(str(part) for part in (found, explanation, verification, report, code) if part is not None))


def _report(found: Split, options: argparse.Namespace) -> Report:
    devices, strategy = _devices(options.devices), options.strategy
    if strategy not in STRATEGIES and Path(strategy).is_file():
        strategy = Plan.from_json(Path(strategy).read_text())
    costs = profile(found, devices, options.batch_size, progress=not (options.quiet or options.json))
    report = inspect(found, costs, strategy, None if options.memory is None else options.memory * 1e9)
    if options.code is not None and not 0 <= options.code < len(costs.devices):
        raise InputError("--code names no rank.", given=options.code, expected=f"0 to {len(costs.devices) - 1}")
    for path, text in ((options.html, report.html), (options.trace, report.chrome_trace)):
        if path is not None:
            Path(path).write_text(text())
            print(f"written: {path}", file=sys.stderr)
    return report


def _present(**values: Any) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if value is not None}


def _adapted(options: argparse.Namespace) -> dict[str, Any]:
    return {"adapters": options.adapters, "resample": options.resample, "ties": options.ties}


def _devices(text: str) -> str | int | list[str]:
    if text == "auto":
        return text
    if "," not in text:
        return int(text) if text.isdigit() else text
    return text.split(",")


def _distill(options: argparse.Namespace) -> None:
    teacher, student = load_model(options.teacher), load_model(options.student)
    data = load(options.data) if options.data else None
    recipe = Recipe(
        lr=options.lr,
        epochs=1 if options.epochs is None else options.epochs,
        steps=options.steps,
        block_input=options.block_input,
        precision=options.precision,
    )
    result = distill(
        teacher,
        student,
        data,
        recipe=recipe,
        batch_size=options.batch_size,
        devices=_devices(options.devices),
        strategy=options.strategy,
        threads=options.threads,
        timeout=options.timeout,
        example=_example(options, teacher, 8) if data is None else None,
        blocks=options.blocks,
        cuts=_cuts(options),
        **_adapted(options),
        init=options.init,
        validate=None if options.validate is None else load(options.validate),
        recalibrate=options.recalibrate,
        finish=options.finish,
        checkpoint=None if options.checkpoint is None else Checkpoint(options.checkpoint, options.every),
        resume=options.resume,
        seed=options.seed,
        progress=not options.quiet,
    )
    print(result)
    if options.output:
        result.save(options.output)
        print(f"\nstudent written to {options.output}")


def _bench(options: argparse.Namespace) -> None:
    teacher, student = load_pair(options.teacher, options.student)
    example = _given(options, teacher)
    result = bench(
        teacher,
        student,
        example,
        devices=_devices(options.devices),
        threads=options.threads,
        rounds=options.rounds,
        steps=options.steps,
        progress=not options.quiet,
        blocks=options.blocks,
        cuts=_cuts(options),
        **_adapted(options),
    )
    print(result)


def _demo(options: argparse.Namespace) -> None:
    from .demo import run

    run(seed=options.seed, progress=not options.quiet)
