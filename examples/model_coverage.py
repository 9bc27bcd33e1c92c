"""Which models and pairs work.

`python examples/model_coverage.py [--suite torchvision|timm|hf|pairs] [--limit N] [NAME]`.

Models: captured, cut at every place where a single activation crosses, and the blocks compared with the whole model in
eval and train mode (output, buffers, gradients). Pairs: distilled for three steps in float64 on random inputs; the
student's weights, loaded into a fresh object, are compared with the chain of trained blocks.
"""

import argparse
import copy
import gc
import importlib
import json
import resource
import sys
import time
import warnings
from pathlib import Path

import torch
from tabulate import tabulate

import autobd
from autobd.blocks.carve import carve
from autobd.blocks.cuts import candidates
from autobd.blocks.dataflow import Dataflow
from autobd.blocks.verify import run_blocks, set_mode, verify_blocks
from autobd.graph import Arguments, declared_example
from autobd.specs import load_model

MODELS = json.loads((Path(__file__).parent / "coverage.json").read_text())


def models_of(suite):
    """(name, function that makes the model, function that makes its example) for each model of a suite."""
    if suite == "torchvision":
        from torchvision import models

        names = [n for m in (models, models.segmentation, models.video) for n in models.list_models(module=m)]
        for name in names:
            yield name, lambda name=name: load_model(f"torchvision:{name}"), lambda m: declared_example(m, 2)
    elif suite == "timm":
        for name, size in MODELS["timm"].items():  # a size where the model's own takes too much memory
            yield name, lambda name=name: load_model(f"timm:{name}"), lambda m, size=size: declared_example(m, 2, size)
    else:
        for name, entry in MODELS["hf"].items():
            yield name, lambda entry=entry: transformer(entry), lambda m, entry=entry: tokens_or(entry["input"])


def transformer(entry):
    """A small model of a transformers class, random weights."""
    module, _, name = entry["class"].rpartition(".")
    made = getattr(importlib.import_module(f"transformers.{module}" if module else "transformers"), name)
    return made(made.config_class(**entry["config"]))


def tokens_or(shape):
    """Random tokens with a mask that ends early in one row, or {name: shape} as random numbers."""
    if isinstance(shape, dict):
        return {name: torch.randn(size) for name, size in shape.items()}
    rows, length = shape
    mask = (torch.arange(length) < torch.tensor([length] + [length * 2 // 3] * (rows - 1))[:, None]).long()
    return {"input_ids": torch.randint(3, 90, (rows, length)), "attention_mask": mask}


def of_model(make, example_for):
    """One row of the table of models."""
    model = make()
    example = example_for(model)
    started = time.perf_counter()
    captured = autobd.capture(model, example)
    seconds = time.perf_counter() - started
    output = next(name for name, node in captured.outputs.items() if node.meta["dtype"].is_floating_point)
    flow = Dataflow(captured, output, trained=True)
    cuts = candidates(flow)
    found = verify_blocks(captured, output, carve(flow, cuts), 2, "student")
    state = {c.mode: "identical" if c.exact else "to rounding" for c in found.checks}
    whole = ", ".join(n.split(" is kept")[0].removeprefix("module ") for n in captured.notes if "is kept whole" in n)
    notes = [f"kept whole: {whole}"] if whole else []
    notes += [] if captured.same_in_train else ["auxiliary heads in train mode are left out"]
    return ["yes", len(cuts), state.get("eval", "-"), state.get("train", "-"), f"{seconds:.1f}", "; ".join(notes)[:90]]


def named(kind):
    """Pairs by name."""
    return {p.get("name", f"{p['teacher']} -> {p['student']}"): p for p in MODELS[kind]}


def of_pair(pair):
    """One row of the table of pairs."""
    teacher, student = (load_model(pair[side]).double() for side in ("teacher", "student"))
    size = tuple(pair["input"]) if "input" in pair else None
    example = [as_double(declared_example(m, 2, size), m) for m in (teacher, student)]
    fresh = copy.deepcopy(student)
    started = time.perf_counter()
    result = autobd.distill(
        teacher,
        student,
        [0] * 3,
        inputs=(lambda _: example[0], lambda _: example[1]),
        example=0,
        recipe=autobd.Recipe(steps=3, lr=1e-4),
        epochs=3,
        progress=False,
    )
    seconds = time.perf_counter() - started
    fresh.load_state_dict(result.student.state_dict())
    fresh.eval()
    result.student.eval()
    blocks = result.split.bind_student()
    set_mode(blocks, False)
    arguments = Arguments.of(example[1], fresh)
    with torch.no_grad():
        chained = run_blocks(blocks, [p.student for p in result.split.pairs], arguments)
        whole = fresh(*arguments.args, **arguments.kwargs)
        whole = whole if isinstance(whole, torch.Tensor) else whole[result.split.outputs[1]]
    worst = float((chained - whole).abs().max() / whole.abs().max())
    kinds = sorted({a.kind for p in result.split.pairs[:-1] for a in p.adapters})
    cuts = len(result.split) - 1
    largest = f"{max(result.split.alignment.shares):.0%}"
    good = worst <= 1e-10 and cuts >= 3 and result.hybrid is None
    return ["yes" if good else "NO", cuts, largest, ", ".join(kinds), f"{worst:.0e}", f"{seconds:.1f}", ""]


def as_double(example, model):
    """Random numbers in place of an example's floating-point tensors."""
    arguments = Arguments.of(example, model)
    return arguments.map(lambda t: torch.randn(t.shape, dtype=torch.float64) if t.is_floating_point() else t)


def expected_error(pair):
    """One row for a pair that must be refused."""
    teacher, student = (load_model(pair[side]) for side in ("teacher", "student"))
    examples = [declared_example(m, 2, tuple(pair[f"{side} input"]) if f"{side} input" in pair else None)
                for side, m in (("teacher", teacher), ("student", student))]  # fmt: skip
    try:
        found = autobd.split(teacher, student, 0, inputs=(lambda _: examples[0], lambda _: examples[1]))
    except autobd.AutobdError as error:
        return ["yes", str(error).splitlines()[0]]
    return ["NO", f"split into {len(found)} blocks"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", choices=["torchvision", "timm", "hf", "pairs"], action="append")
    parser.add_argument("--limit", type=int, help="only the first so many of each suite")
    parser.add_argument("names", nargs="*", help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    failed = 0
    for suite in options.suite or ["torchvision", "timm", "hf", "pairs"]:
        if suite == "pairs":
            pairs = named("pairs")
            jobs = [(n, lambda p=p: of_pair(p)) for n, p in pairs.items()]
            heads = ["pair", "aligned", "cuts", "largest block", "adapters", "difference", "s", "reason"]
        else:
            jobs = [
                (n, lambda make=make, example=example: of_model(make, example)) for n, make, example in models_of(suite)
            ]
            heads = ["model", "captured", "cuts", "eval", "train", "s", "notes"]
        failed += table(suite, heads, jobs, options)
    if not options.suite or "pairs" in options.suite:
        pairs = named("refused")
        jobs = [(n, lambda p=p: expected_error(p)) for n, p in pairs.items()]
        failed += table("pairs that are refused", ["pair", "refused", "message"], jobs, options)
    print(f"largest memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB", file=sys.stderr)
    return 1 if failed else 0


def table(title, heads, jobs, options):
    """Run the jobs, print their rows; returns how many failed."""
    rows = []
    jobs = [job for job in jobs if not options.names or any(n in job[0] for n in options.names)][: options.limit]
    for name, job in jobs:
        print(name, end="  ", file=sys.stderr, flush=True)
        torch.manual_seed(0)
        try:
            row = job()
        except Exception as error:
            reason = " ".join(str(error).split()) if isinstance(error, autobd.AutobdError) else repr(error)
            row = ["NO", *["-"] * (len(heads) - 3), reason[:300]]
        rows.append([name, *row])
        print(*row, sep="  ", file=sys.stderr, flush=True)
        gc.collect()
    good = sum(row[1] == "yes" for row in rows)
    print(f"\n## {title}: {good} of {len(rows)}\n")
    print(tabulate(rows, heads, "github", disable_numparse=True), flush=True)
    return len(rows) - good


if __name__ == "__main__":
    sys.exit(main())
