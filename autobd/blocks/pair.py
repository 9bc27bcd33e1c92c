"""Whether two models can be a pair, which outputs the last block pair distils, and whether these are logits."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..errors import InputError, SplitError
from ..graph import Arguments, Captured
from .adapters import Adapter, adapter
from .cuts import boundary, has_rows
from .dataflow import Dataflow


def check_pair(teacher: nn.Module, student: nn.Module) -> None:
    """Refuse pairs that cannot be distilled. Errors: InputError."""
    for name, model in (("teacher", teacher), ("student", student)):
        if not isinstance(model, nn.Module):
            raise InputError(f"The {name} is not a model.", given=type(model).__name__, expected="a torch.nn.Module")
    if teacher is student:
        raise InputError(
            "The teacher is the student.",
            given=type(teacher).__name__,
            expected="two separate models",
            do="pass copy.deepcopy(teacher) as the student to train a copy",
        )
    shared = {id(p) for p in (*teacher.parameters(), *teacher.buffers())} & {
        id(p) for p in (*student.parameters(), *student.buffers())
    }
    if shared:
        names = [n for n, p in (*student.named_parameters(), *student.named_buffers()) if id(p) in shared]
        raise InputError(
            "The student shares tensors with the teacher: training would change the teacher.",
            given=f"shared: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}",
            expected="two models without common modules",
            do="build the shared part twice, or deepcopy it",
        )
    for name, model in (("teacher", teacher), ("student", student)):
        if any(t.is_inference() for t in (*model.parameters(), *model.buffers())):
            raise InputError(
                f"The {name} was made inside torch.inference_mode(): its tensors cannot take part in training.",
                given=type(model).__name__,
                expected="ordinary tensors",
                do="build or load the model outside of inference_mode",
            )
    if not any(p.requires_grad for p in student.parameters()):
        raise InputError(
            "The student has no trainable parameter.",
            given=type(student).__name__,
            expected="at least one parameter with requires_grad=True",
        )
    kinds = [
        ({p.device for p in m.parameters()}, {p.dtype for p in m.parameters() if p.is_floating_point()})
        for m in (teacher, student)
    ]
    for what, a, b in zip(("devices", "dtypes"), *kinds, strict=True):
        if a and b and a != b:
            raise InputError(
                f"Teacher and student are on different {what}.",
                given=f"teacher {_set(a)}, student {_set(b)}",
                expected="the same for both",
                do="move or convert one of them with .to(...)",
            )


def check_devices(model: nn.Module, arguments: Arguments) -> None:
    devices = {p.device for p in model.parameters()}
    if {d.type for d in devices} == {"meta"}:
        return  # to be looked at, not to be run
    wrong = {t.device for t in arguments.tensors} - devices
    if devices and wrong:
        raise InputError(
            "The inputs are not on the model's device.",
            given=f"inputs on {_set(wrong)}, model on {_set(devices)}",
            expected="the same device",
            do="move the model or the batch with .to(...)",
        )


def paired_outputs(teacher: Captured, student: Captured) -> tuple[str, str]:
    """Which output of each model the last block pair distils: the first that both name, else the first of each."""

    def floating(captured: Captured) -> dict[str, fx.Node]:
        return {k: n for k, n in captured.outputs.items() if n.meta.get("dtype") and n.meta["dtype"].is_floating_point}

    mine, theirs = floating(teacher), floating(student)
    if not mine or not theirs:
        raise SplitError(
            "A model returns no floating-point tensor to distil.", given=f"{list(mine)} and {list(theirs)}"
        )
    common = [name for name in mine if name in theirs]
    return (common[0], common[0]) if common else (next(iter(mine)), next(iter(theirs)))


def output_adapter(flows: tuple[Dataflow, Dataflow]) -> Adapter:
    """The adapter between the two distilled outputs. Errors: SplitError if they are apart."""
    for flow in flows:
        if not has_rows(flow.output) or flow.output.meta["dims"][0] != (1, 0):
            raise SplitError(
                "The distilled output does not have the batch as its first dimension.",
                given=f"'{flow.output.name}' {list(flow.output.meta['shape'])}",
                expected="one row per sample",
            )
    teacher, student = (boundary(flow, flow.output, len(flow.order) - 1) for flow in flows)
    found = adapter(teacher, student)
    hidden = len(teacher.shape) > 1  # of a flat output, other sizes mean other classes
    if found is None or (found.kind != "equal" and not hidden) or found.resamples:
        raise SplitError(
            "The two models' outputs differ.",
            given=f"teacher '{flows[0].output.name}' {teacher}, student '{flows[1].output.name}' {student}",
            expected="outputs of equal shape (the same number of classes) and dtype",
            do="build the student with the teacher's number of classes",
        )
    return found


def is_logits(captured: tuple[Captured, Captured], outputs: tuple[str, str]) -> bool | None:
    """True for classifiers of timm, torchvision and Hugging Face; None where nothing is known."""
    return (
        True
        if all(_is_classifier(c.model, name, c.outputs[name]) for c, name in zip(captured, outputs, strict=True))
        else None
    )


def _is_classifier(model: nn.Module, output: str, node: fx.Node) -> bool:
    if len(node.meta["shape"]) != 2:
        return False
    package = type(model).__module__.split(".")[0]
    if package == "timm":
        return getattr(model, "num_classes", 0) == node.meta["shape"][1]
    if package == "torchvision":
        return type(model).__module__.split(".")[1] == "models" and output == "output"
    return package == "transformers" and output == "logits" and "Classification" in type(model).__name__


def _set(values: set[Any]) -> str:
    return ", ".join(sorted(str(v).removeprefix("torch.") for v in values))
