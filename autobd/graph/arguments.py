"""What a model is called with: from a batch or an example to positional and keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import InputError

TARGET_NAMES = frozenset({"label", "labels", "target", "targets"})


@dataclass(frozen=True)
class Arguments:
    """The arguments of one forward call.

    Arguments:
        args: positional arguments, tensors or nested tuples, lists and dicts of them.
        kwargs: keyword arguments, likewise.

    Attributes:
        tensors: every tensor, in a fixed order: positional first, then keywords.
        constants: every other value, in the same order; a recording holds for these values only.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor] = field(init=False, repr=False, compare=False)
    constants: list[Any] = field(init=False, repr=False, compare=False)
    _structure: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:  # a batch comes in every step, and mostly holds tensors alone
        leaves: list[Any] = [*self.args, *self.kwargs.values()]
        structure: Any = (len(self.args), tuple(self.kwargs))
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            leaves, structure = pytree.tree_flatten((self.args, self.kwargs))
        object.__setattr__(self, "tensors", [leaf for leaf in leaves if isinstance(leaf, Tensor)])
        object.__setattr__(self, "constants", [leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        object.__setattr__(self, "_structure", structure)

    @classmethod
    def of(cls, example: Any, model: nn.Module) -> Arguments:
        """`example` taken literally: a tensor or tuple is positional, a mapping gives keywords that `model` accepts."""
        if isinstance(example, Arguments):
            return example
        if isinstance(example, Tensor):
            return cls((example,))
        if isinstance(example, Mapping):
            return cls((), _accepted(dict(example), model))
        if isinstance(example, (tuple, list)):
            return cls(tuple(example))
        raise InputError(
            "The example cannot be passed to a model.",
            given=type(example).__name__,
            expected="a tensor, a tuple of positional arguments or a dict of keyword arguments",
        )

    @classmethod
    def from_batch(cls, batch: Any, model: nn.Module, positional: int | None = None) -> Arguments:
        """What `model` needs of a loader's batch; targets that follow the inputs are left out.

        Arguments:
            batch: a tensor, `(inputs, targets)`, several inputs, or a mapping.
            positional: how many positional arguments to take; default: those that `model.forward` requires.
        """
        if not isinstance(batch, (tuple, list)):
            return cls.of(batch, model)
        if not batch:
            raise InputError("A batch is empty.", given=repr(batch), expected="a tensor, (inputs, targets) or a dict")
        if isinstance(batch[0], (tuple, list, Mapping)):
            return cls.of(batch[0], model)
        return cls(tuple(batch[: positional or max(1, _required(model))]))

    @property
    def keys(self) -> list[str]:
        """Where each tensor stands: "[0][1]" is the second positional argument, "[1]['mask']" a keyword."""
        leaves = pytree.tree_leaves_with_path((self.args, self.kwargs))
        return [pytree.keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor)]

    def names_equal(self, other: Arguments) -> bool:
        """Whether both have the same structure: as many positional arguments, the same keywords and nested keys."""
        return self._structure == other._structure

    @property
    def rows(self) -> int:
        """The batch size: the first dimension of the first tensor that has one."""
        for tensor in self.tensors:
            if tensor.ndim:
                return tensor.shape[0]
        raise InputError(
            "The model's arguments hold no tensor with a batch dimension.",
            given=self.describe(),
            expected="at least one tensor whose first dimension is the batch",
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Arguments:
        """The same arguments with `function` applied to each tensor."""
        args, kwargs = pytree.tree_map_only(Tensor, function, (self.args, self.kwargs))
        return Arguments(args, kwargs)

    def on(self, device: torch.device) -> Arguments:
        """The same on `device`, as ordinary tensors also where they were made in inference mode."""
        return self.map(lambda t: t.clone().to(device) if t.is_inference() else t.to(device))

    def resized(self, rows: int, instead_of_meta: torch.device) -> Arguments:
        """Empty tensors of the same kind with `rows` rows; tensors without the batch dimension keep their shape, those
        on the meta device are made elsewhere."""
        batch = self.rows

        def empty(tensor: Tensor) -> Tensor:
            scales = tensor.ndim > 0 and tensor.shape[0] == batch
            size = (rows, *tensor.shape[1:]) if scales else tuple(tensor.shape)
            return torch.empty(size, dtype=tensor.dtype, device=instead_of_meta if tensor.is_meta else tensor.device)

        return self.map(empty)

    def head(self, rows: int) -> Arguments:
        """The first `rows` rows of every tensor that carries the batch, from the start again if there are fewer."""
        batch = self.rows

        def taken(tensor: Tensor) -> Tensor:
            if not tensor.ndim or tensor.shape[0] != batch:
                return tensor
            return tensor[:rows] if rows <= batch else tensor[torch.arange(rows, device=tensor.device) % batch]

        return self.map(taken)

    def names(self, model: nn.Module) -> list[str]:
        """A name for each tensor: the parameter of `model.forward` that takes it, numbered where it is nested."""
        try:
            bound = inspect.signature(model.forward).bind_partial(*self.args, **self.kwargs).arguments
        except (TypeError, ValueError):
            bound = {**{f"input_{i}": a for i, a in enumerate(self.args)}, **self.kwargs}
        names = []
        for key, value in bound.items():
            leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
            names += [key] if len(leaves) == 1 else [f"{key}_{i}" for i in range(len(leaves))]
        return names

    def describe(self) -> str:
        """Shapes and dtypes, as text for an error."""

        def text(leaf: Any) -> str:
            if isinstance(leaf, Tensor):
                return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            return repr(leaf)

        shown = [pytree.tree_map(text, a) for a in self.args]
        shown += [f"{k}={pytree.tree_map(text, v)}" for k, v in self.kwargs.items()]
        return "(" + ", ".join(str(s) for s in shown) + ")"


def called_as(model: nn.Module) -> nn.Module:
    """A module that takes the same arguments as `model` and has nothing else of it."""

    def forward(*args: Any, **kwargs: Any) -> None:
        return None

    signature = inspect.signature(model.forward)
    bare = [
        p.replace(annotation=p.empty, default=p.empty if p.default is p.empty else None)
        for p in signature.parameters.values()
    ]
    bare_signature = signature.replace(parameters=bare, return_annotation=signature.empty)
    vars(forward)["__signature__"] = bare_signature
    stand_in = nn.Module()
    stand_in.forward = forward
    return stand_in


def _positional(model: nn.Module) -> list[inspect.Parameter]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _required(model: nn.Module) -> int:
    return sum(p.default is p.empty for p in _positional(model))


def _accepted(kwargs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    parameters = inspect.signature(model.forward).parameters
    keeps_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    kept = [k for k in kwargs if k not in TARGET_NAMES and (keeps_all or k in parameters)]
    order = {name: i for i, name in enumerate(parameters)}
    return {k: kwargs[k] for k in sorted(kept, key=lambda k: (order.get(k, len(order)), k))}
