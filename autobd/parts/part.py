"""Block pairs cut loose from their two models, so that a rank can hold its own and no others."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..blocks import Split
from ..blocks.adapters import Adapter
from ..blocks.cuts import Boundary
from ..recipe import BlockRecipe, Recipe
from ..recipe.block_recipe import Precision
from .recompute import recomputing
from .ties import stale_copies, trained_names


@dataclass(frozen=True)
class StudentPart:
    """A student block as it is trained.

    Attributes:
        module: called with the boundary before it and its input tensors; `inputs`: indices of these.
        distilled: indices, behind the block, of the tensors that it learns.
        before, behind: adapters of the tensors before and behind it.
        fresh: indices, before the block, of the tensors that the block before has made; others come from further back.
        keys: path of a tensor in `module` -> key in the student, for those that training may change; `stale` likewise
            for copies of weights that an earlier block trains.
        trained: keys of the parameters that its optimizer updates.
        tied: it trains a weight together with other blocks.
        recipe: what it is trained with.
        varies: it may leave out its weights in a step, as a layer that drops itself does.
        draws: its forward draws random numbers; `draws_python`: perhaps Python's.
        prefix: of its tensors' names where training reports them: that of a candidate's.
        run: what is called instead of `module`, with the same weights, to compute activations again.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    distilled: tuple[int, ...]
    before: tuple[Adapter, ...]
    behind: tuple[Adapter, ...]
    fresh: tuple[int, ...]
    keys: Mapping[str, str]
    stale: Mapping[str, str]
    trained: tuple[str, ...]
    tied: bool
    recipe: BlockRecipe
    varies: bool
    draws: bool
    draws_python: bool
    run: nn.Module | None = None
    prefix: str = ""

    @property
    def modules(self) -> list[nn.Module]:
        return [self.module] if self.run is None else [self.module, self.run]

    def __call__(self, *given: Any) -> Any:
        return self.modules[-1](*given)


@dataclass(frozen=True)
class Part:
    """A block pair; `student` is None where only the teacher runs.

    Attributes:
        where: the student's modules, for errors.
        inputs: indices of the teacher's input tensors that the block reads.
        folded: how many rows of each tensor behind the block belong to one sample; `dtypes`: of these tensors.
        precision: see `Recipe`.
    """

    block: int
    where: str
    teacher: fx.GraphModule
    inputs: tuple[int, ...]
    folded: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    precision: Precision
    student: StudentPart | None

    def teach(self, *given: Tensor) -> tuple[Tensor, ...]:
        """The teacher's tensors behind the block, of those before it and its input tensors."""
        device = next((t.device for t in given), torch.device("cpu"))
        with torch.no_grad(), autocast(device, self.precision):
            output: tuple[Tensor, ...] = self.teacher(*given)
        if self.precision is None:
            return output
        return tuple(t.to(dtype) for t, dtype in zip(output, self.dtypes, strict=True))


def parts_of(split: Split, student: nn.Module, recipe: Recipe, recomputed: Collection[int] = ()) -> list[Part]:
    """Every block pair of `split`, over the modules of its teacher and of `student`, a copy of its student.

    Arguments:
        recomputed: blocks whose activations are computed again in the backward.
    """
    named = dict(student.named_parameters())
    for name in filter(recipe.freezes, named):
        named[name].requires_grad_(False)
    keys = {id(t): name for name, t in (*named.items(), *student.named_buffers())}
    stale = stale_copies(split, named)
    students = split.bind_student(student, stale)
    trained, opaque = trained_names(split, named), split.student.opaque
    before: tuple[Adapter, ...] = ()
    fresh: tuple[int, ...] = ()
    parts = []
    for b, (pair, teacher, module) in enumerate(zip(split.pairs, split.bind_teacher(), students, strict=True)):
        copies = {id(copy): name for name, copy in stale[b].items()}
        own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
        kept_whole = any(n.op == "call_module" and n.target in opaque for n in pair.student.graph.nodes)
        behind = tuple(_without_nodes(a) for a in pair.adapters)
        chosen = recipe.for_block(b, len(split), split.logits)
        again = b in recomputed or chosen.recompute
        parts.append(
            Part(
                b,
                " .. ".join(pair.student.modules),
                teacher,
                pair.teacher.inputs,
                tuple(t.folded for t in pair.teacher.returns),
                tuple(t.dtype for t in pair.teacher.returns),
                chosen.precision,
                StudentPart(
                    module,
                    pair.student.inputs,
                    pair.student.distilled,
                    before,
                    behind,
                    fresh,
                    {path: keys[id(t)] for path, t in own.items() if id(t) in keys and _may_change(t)},
                    {path: copies[id(t)] for path, t in own.items() if id(t) in copies},
                    tuple(trained[b]),
                    any(tie.together and b in tie.blocks for tie in split.ties),
                    chosen,
                    kept_whole,
                    kept_whole or any(n.meta.get("random") for n in pair.student.graph.nodes),
                    kept_whole,
                    recomputing(module, pair.student.graph) if again and not kept_whole else None,
                ),
            )
        )
        before, fresh = behind, pair.student.distilled
    return parts


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[Any]:
    """Run operations in half precision where they are known to bear it."""
    if precision is None:
        return nullcontext()
    return torch.autocast(device.type, {"bf16": torch.bfloat16, "fp16": torch.float16}[precision])


def _may_change(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.Parameter) or tensor.requires_grad


def _without_nodes(adapter: Adapter) -> Adapter:
    """The adapter without the graphs that its tensors come from."""
    return replace(adapter, teacher=without_node(adapter.teacher), student=without_node(adapter.student))


def without_node(tensor: Boundary) -> Boundary:
    return replace(tensor, node=cast(fx.Node, None))


def tensors_at(module: nn.Module, paths: Mapping[str, str]) -> dict[str, Any]:
    """The tensors of a block by their keys in the student."""
    own = dict((*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)))
    return {key: own[path] for path, key in paths.items()}


def on_device(parts: Mapping[int, Part], device: torch.device) -> dict[int, Part]:
    """The parts on a device: themselves if they are there, else copies."""
    moved = dict(parts)
    modules = [p.teacher for p in parts.values()] + [p.student.module for p in parts.values() if p.student is not None]
    if any(t.device != device for m in modules for t in (*m.parameters(), *m.buffers())):
        moved = copy.deepcopy(moved)  # at once, so that what blocks share stays shared
        for part in moved.values():
            part.teacher.to(device)
            if part.student is not None:
                for module in part.student.modules:
                    module.to(device)
    return moved


def held_bytes(parts: Mapping[int, Part]) -> float:
    """Bytes of the weights and buffers of block pairs."""
    modules = [p.teacher for p in parts.values()] + [p.student.module for p in parts.values() if p.student is not None]
    storages = [t.untyped_storage() for m in modules for t in (*m.parameters(), *m.buffers())]
    return float(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
