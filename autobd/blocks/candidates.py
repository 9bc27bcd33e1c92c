"""Other modules for a place in the student: the student with one of them there, cut at the same places."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..errors import InputError, nearest
from ..graph import capture
from .align import CutPair
from .carve import Block, carve
from .cuts import Boundary, boundary, cut_at, obstacle
from .dataflow import Dataflow, flows_of
from .ties import find_ties

if TYPE_CHECKING:
    from .split import Split


@dataclass(frozen=True)
class Candidate:
    """Another module for a place in the student.

    Attributes:
        path: the place; `number`: which of its candidates, from 1 on (0 is the student's own module); `module`: itself.
        block: number of the block that the place is in.
        split: of the teacher and the student with the module in that place, at the same cuts.
    """

    path: str
    number: int
    module: nn.Module
    block: int
    split: Split

    @property
    def student(self) -> Block:
        """The student block that it makes."""
        return self.split.pairs[self.block].student

    def fitted(self, split: Split) -> Candidate:
        """With the channel maps of `split`, which has them chosen."""
        own = self.split.pairs
        pairs = [
            replace(
                p, adapters=tuple(replace(f, student=a.student) for f, a in zip(q.adapters, p.adapters, strict=True))
            )
            for p, q in zip(own, split.pairs, strict=True)
        ]
        return replace(self, split=replace(self.split, pairs=tuple(pairs)))

    def __str__(self) -> str:
        return f"block {self.block}, candidate {self.number} for '{self.path}'"


def with_candidates(split: Split, given: Mapping[str, Sequence[nn.Module]]) -> Split:
    """`split` with other modules for the places of these paths in its student.

    Errors: InputError for a place that is not in one block or shares it with another place, a module that does not fit
    there, and a block whose weights or channel maps belong to others too.
    """
    flow = flows_of(split.teacher, split.student, split.outputs)[1]
    found: list[Candidate] = []
    models = split.student.model, split.teacher.model
    known = {id(t) for model in models for t in (*model.parameters(), *model.buffers())}
    for path, modules in given.items():
        known |= _check_modules(known, path, modules)
        block = place(flow, split.alignment.pairs, path)
        _check_block(split, path, block)
        others = [c.path for c in found if c.block == block]
        if others:
            raise InputError(
                f"Two places with candidates are in block {block}.",
                given=f"'{others[0]}' and '{path}'",
                expected="one in a block",
                do="cut between them with cuts=, or make one module of both",
            )
        for number, module in enumerate(modules, 1):
            found.append(Candidate(path, number, module, block, replaced(split, path, module, number)))
    return replace(split, candidates=tuple(found))


def place(flow: Dataflow, pairs: Sequence[CutPair], path: str) -> int:
    """The block that the module of the student at `path` is in. Errors: InputError if it is in none or in several."""
    if path not in flow.extent:
        paths = [p for p in flow.extent if p]
        raise InputError(
            "candidates= names no module on the way to the student's output.",
            given=repr(path),
            expected=f"the path of one, such as {nearest(str(path), paths, 3)}",
        )
    first, last = flow.extent[path]
    parting = [p.student.name for p in pairs if first <= p.student.position < last]
    if parting:
        raise InputError(
            f"'{path}' has candidates and lies in several blocks.",
            given=f"a cut after '{parting[0]}'",
            expected="all of it in one block",
            do=f"split elsewhere with cuts=, or give the parts of '{path}' candidates of their own",
        )
    return sum(p.student.position < first for p in pairs)


def replaced(split: Split, path: str, module: nn.Module, number: int) -> Split:
    """`split` for its student with another module at `path`, at the same cuts; the student itself stays as it is.

    Errors: InputError, which calls it candidate `number`, if it does not fit there.
    """
    what = f"Candidate {number} for '{path}' does not fit there"
    try:
        captured = capture(with_module(split.student.model, path, module), split.student.example)
    except Exception as error:
        raise InputError(
            f"{what}: the student cannot be recorded with it.",
            given=f"{type(module).__name__}: {error}",
            expected=f"a module that takes and gives what '{path}' does",
        ) from error
    old, new = (flows_of(split.teacher, c, split.outputs)[1] for c in (split.student, captured))
    if path not in new.extent or _around(old, path) != _around(new, path):
        raise InputError(
            f"{what}: the student does something else around it.",
            given=type(module).__name__,
            expected="the same operations before and behind it",
        )
    longer = len(new.order) - len(old.order)
    pairs = []
    for pair in split.alignment.pairs:
        cut = pair.student
        position = cut.position + (longer if cut.position >= old.extent[path][1] else 0)
        problem = obstacle(new, position)
        if problem is not None:
            raise InputError(f"{what}: at cut '{cut.name}', {problem}.", given=type(module).__name__)
        own = replace(cut_at(new, position), name=cut.name)
        _check_alike(own.tensors, cut.tensors, what)
        adapters = tuple(replace(a, student=t) for a, t in zip(pair.adapters, own.tensors, strict=True))
        pairs.append(replace(pair, student=own, adapters=adapters))
    end = boundary(new, new.output, len(new.order) - 1)
    _check_alike([end], [split.pairs[-1].adapters[0].student], what)
    behind = [*(p.student.tensors for p in pairs), (end,)]
    blocks = carve(new, [p.student for p in pairs])
    return replace(
        split,
        student=captured,
        pairs=tuple(
            replace(
                pair,
                student=block,
                adapters=tuple(replace(a, student=t) for a, t in zip(pair.adapters, tensors, strict=True)),
            )
            for pair, block, tensors in zip(split.pairs, blocks, behind, strict=True)
        ),
        alignment=replace(split.alignment, pairs=tuple(pairs)),
        ties=find_ties(captured.model, blocks, "auto"),
        candidates=(),
    )


def assembled(split: Split, chosen: Collection[tuple[int, int]]) -> Split:
    """`split` without candidates, after its student has been given the `chosen` ones: block and number of each."""
    found = replace(split, candidates=())
    for c in split.candidates:
        if (c.block, c.number) in chosen:
            found = replaced(found, c.path, c.module, c.number)
    install(split, chosen)
    return replace(found, student=replace(found.student, model=split.student.model))


def install(split: Split, chosen: Collection[tuple[int, int]]) -> None:
    """Put the chosen candidates into the student, in the mode of what they replace."""
    student = split.student.model
    for c in split.candidates:
        if (c.block, c.number) in chosen:
            c.module.train(student.get_submodule(c.path).training)
            student.set_submodule(c.path, c.module)


def with_module(model: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """`model` with another module at `path`; all others are the same objects."""
    name, _, rest = path.partition(".")
    changed = copy.copy(model)
    own = dict(model._modules)
    own[name] = with_module(model.get_submodule(name), rest, module) if rest else module
    changed.__dict__["_modules"] = own
    return changed


def _check_modules(known: Collection[int], path: str, modules: Any) -> set[int]:
    """Returns: identities of their tensors, which are to be in none of the `known` ones."""
    if isinstance(modules, (str, nn.Module)) or not isinstance(modules, Sequence) or not modules:
        raise InputError(
            f"The candidates for '{path}' are no list.", given=type(modules).__name__, expected="[module, ...]"
        )
    found: set[int] = set()
    for number, module in enumerate(modules, 1):
        if not isinstance(module, nn.Module):
            raise InputError(f"Candidate {number} for '{path}' is no module.", given=type(module).__name__)
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        if not own.isdisjoint({*known, *found}):
            raise InputError(
                f"Candidate {number} for '{path}' shares weights or buffers with a model or another candidate.",
                given=type(module).__name__,
                do="pass a copy (copy.deepcopy)",
            )
        found |= own
    return found


def _check_block(split: Split, path: str, block: int) -> None:
    tied = [str(tie) for tie in split.ties if block in tie.blocks]
    if tied:
        raise InputError(
            f"'{path}' has candidates, and its block {block} shares weights with others.",
            given="; ".join(tied),
            do="cut elsewhere with cuts=, so that the shared weights are in another block",
        )
    beside = [*(split.pairs[block - 1].adapters if block else ()), *split.pairs[block].adapters]
    if any(a.kind == "trainable" for a in beside):
        raise InputError(
            f"'{path}' has candidates, and next to its block {block} a channel map is trained.",
            given="a trainable adapter",
            do='pass adapters="matched"',
        )


def _around(flow: Dataflow, path: str) -> list[tuple[str, str]]:
    """The operations before and behind a module."""
    first, last = flow.extent[path]
    return [*map(_operation, flow.order[:first]), ("", path), *map(_operation, flow.order[last + 1 :])]


def _operation(node: fx.Node) -> tuple[str, str]:
    return node.op, str(node.target)


def _check_alike(own: Sequence[Boundary], wanted: Sequence[Boundary], what: str) -> None:
    def told(tensors: Sequence[Boundary]) -> str:
        return " + ".join(map(str, tensors))

    if told(own) != told(wanted):
        raise InputError(f"{what}: a tensor behind it is another.", given=told(own), expected=told(wanted))
