"""The command line: `autobd inspect`, `autobd distill`, `autobd demo`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from . import __version__
from .api import distill
from .blocks import split
from .blocks.folding import KINDS
from .errors import AutobdError, InputError
from .graph import declared_example
from .planner import STRATEGIES
from .recipe import Recipe
from .specs import FORMS, load, load_model, load_pair


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

    inspect = commands.add_parser("inspect", help="show how a pair of models is split into blocks")
    inspect.set_defaults(command=_inspect)
    train = commands.add_parser("distill", help="train a student block by block")
    train.set_defaults(command=_distill)
    for command in (inspect, train):
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
    inspect.add_argument("--hybrid", action="store_true", help="allow trainable adapters that cannot be folded")
    inspect.add_argument("--explain", action="store_true", help="also tell why these cuts")
    inspect.add_argument("--json", action="store_true", help="print plain values for machines")
    inspect.add_argument("--verify", action="store_true", help="also prove that the blocks are the models")
    train.add_argument(
        "--data", metavar="SPEC", help="package.module:callable or file.py:callable that returns a loader or dataset"
    )
    train.add_argument("--init", choices=["teacher"], help="start from the teacher's weights where shapes allow")
    train.add_argument("--epochs", type=int)
    train.add_argument("--steps", type=int)
    train.add_argument("--lr", type=float, default=1e-3)
    train.add_argument(
        "--devices", default="auto", help='a number, or names with commas: "2", "cuda:0,cuda:1" (default: all GPUs)'
    )
    train.add_argument("--strategy", default="auto", help=", ".join(STRATEGIES))
    train.add_argument("--threads", type=int, help="of each rank on a CPU (default: the cores, shared evenly)")
    train.add_argument("--timeout", type=float, default=300.0, help="seconds after which a silent rank is an error")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--output", metavar="FILE", help="write the student's state_dict here")
    train.add_argument("--quiet", action="store_true", help="no progress bar")

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


def _inspect(options: argparse.Namespace) -> None:
    teacher, student = load_pair(options.teacher, options.student, weights=options.verify)
    example = _example(options, teacher, 8)
    if example is None:
        raise InputError(
            f"{options.teacher} does not say what inputs it takes.", expected="--input, for example 3x224x224"
        )
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
    if options.json:
        print(json.dumps(found.to_dict() | _present(explanation=explanation, verification=verification), indent=2))
    else:
        print("\n\n".join(str(part) for part in (found, explanation, verification) if part is not None))


def _present(**values: Any) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if value is not None}


def _adapted(options: argparse.Namespace) -> dict[str, Any]:
    return {"adapters": options.adapters, "resample": options.resample, "ties": options.ties}


def _devices(text: str) -> str | int | list[str]:
    if text == "auto":
        return text
    return int(text) if text.isdigit() else text.split(",")


def _distill(options: argparse.Namespace) -> None:
    teacher, student = load_model(options.teacher), load_model(options.student)
    data = load(options.data) if options.data else None
    recipe = Recipe(lr=options.lr, epochs=1 if options.epochs is None else options.epochs, steps=options.steps)
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
        seed=options.seed,
        progress=not options.quiet,
    )
    print(result)
    if options.output:
        torch.save(result.student.state_dict(), options.output)
        print(f"\nstudent written to {options.output}")


def _demo(options: argparse.Namespace) -> None:
    from .demo import run

    run(seed=options.seed, progress=not options.quiet)
