"""The blocks of a rank for inputs of another size: other graphs over the modules that it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from ..blocks import Split
from ..blocks.adapters import Adapter
from ..blocks.cuts import Boundary
from .part import Part, without_node

Sides = tuple[tuple[Boundary, Boundary], ...]  # teacher's and student's tensors at a cut


@dataclass(frozen=True)
class Form:
    """What differs in a block pair for inputs of another size.

    Attributes:
        block: its number.
        teacher, student: graphs, and the values that they read beside the block's own modules and tensors.
        folded: see `Part`.
        before, behind: the tensors at its cuts.
    """

    block: int
    teacher: tuple[fx.Graph, Mapping[str, Any]]
    student: tuple[fx.Graph, Mapping[str, Any]]
    folded: tuple[int, ...]
    before: Sides
    behind: Sides

    def of(self, part: Part) -> Part:
        """The block pair `part` in this form."""
        student = part.student
        if student is not None:
            student = replace(
                student,
                module=_over(student.module, *self.student),
                run=None,
                before=_sized(student.before, self.before),
                behind=_sized(student.behind, self.behind),
            )
        return replace(part, teacher=_over(part.teacher, *self.teacher), folded=self.folded, student=student)


def forms_of(split: Split) -> dict[int, Form]:
    """Every block pair of a resized split."""
    stale = {b: t.parameters for t in split.ties if not t.together for b in t.blocks[1:]}
    named = dict(split.student.model.named_parameters())
    frozen = [{n: nn.Parameter(named[n].detach(), False) for n in stale.get(b, ())} for b in range(len(split))]
    found = {}
    before: Sides = ()
    blocks = zip(split.pairs, split.bind_teacher(), split.bind_student(frozen=frozen), strict=True)
    for number, (pair, teacher, student) in enumerate(blocks):
        behind = tuple((without_node(a.teacher), without_node(a.student)) for a in pair.adapters)
        folded = tuple(t.folded for t in pair.teacher.returns)
        found[number] = Form(number, _graph(teacher), _graph(student), folded, before, behind)
        before = behind
    return found


def _graph(bound: fx.GraphModule) -> tuple[fx.Graph, dict[str, Any]]:
    values = {str(n.target): getattr(bound, str(n.target)) for n in bound.graph.nodes if n.op == "get_attr"}
    return bound.graph, {name: v for name, v in values.items() if not isinstance(v, (Tensor, bool))}


def _over(module: fx.GraphModule, graph: fx.Graph, values: Mapping[str, Any]) -> fx.GraphModule:
    """`graph` over the modules and tensors of `module`."""
    root = nn.Module()
    root.__dict__.update(module.__dict__)
    for name, value in values.items():
        setattr(root, name, value)
    result = fx.GraphModule(root, graph, type(module).__name__)
    result.training = module.training
    return result


def _sized(adapters: tuple[Adapter, ...], sides: Sides) -> tuple[Adapter, ...]:
    return tuple(replace(a, teacher=t, student=s) for a, (t, s) in zip(adapters, sides, strict=True))
