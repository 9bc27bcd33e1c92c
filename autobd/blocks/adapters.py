"""Adapters: from a teacher's tensor at a cut to what the student has there, so that nothing is left in the student.

teacher  [N, 197, 768] --layout--> [N, 768, 14, 14] --channels--> [N, 1024, 14, 14]  student

matched    a fixed map chosen from the teacher's activations; the student block learns the mapped boundary
trainable  the student's tensor is mapped to the teacher's width for the loss, and back for the next block;
           both maps are trained and afterwards multiplied into the next block's linear layers
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from .cuts import Boundary, Cut
from .layout import Lowest

Kind = Literal["equal", "matched", "trainable"]
_MOST_PREFIX = 5  # class and register tokens
_MOST_ENTRIES = 1 << 25  # of a channel map


@dataclass(frozen=True)
class Adapter:
    """What stands between a teacher's and a student's tensor at a cut.

    Attributes:
        teacher, student: the tensors.
        kind: how channels are adapted: "equal" (not at all), "matched" or "trainable".
        folds: the student's layers that a trainable map can be multiplied into; empty: it cannot.
        columns: which teacher channel each student channel is to be; or `matrix`, [student channels, teacher channels].
            Both None until `fit`.
    """

    teacher: Boundary
    student: Boundary
    kind: Kind
    folds: tuple[str, ...] = ()
    columns: Tensor | None = None
    matrix: Tensor | None = None

    @property
    def changes_layout(self) -> bool:
        a, b = self.teacher, self.student
        return a.grid != b.grid or (a.channels != b.channels and bool(a.grid))

    @property
    def resamples(self) -> bool:
        return positions(self.teacher) != positions(self.student)

    def __call__(self, tensor: Tensor) -> Tensor:
        """The teacher's tensor in the student's layout, with the student's channels if the map is fixed: what the
        student block is to give, and what the next one gets."""
        if self.kind == "equal" and not self.changes_layout:
            return tensor.contiguous()  # the student may take a view that the teacher's strides forbid
        a, b = self.teacher, self.student
        tensor = tensor.movedim(a.channels + 1, -1)
        if self.kind == "matched":
            tensor = self._mapped(tensor)
        tensor = _positions_like(tensor, a.grid, b.grid)
        return tensor.movedim(-1, b.channels + 1).contiguous()

    def _mapped(self, tensor: Tensor) -> Tensor:
        if self.columns is not None:
            return tensor.index_select(-1, self.columns)
        assert self.matrix is not None, "the adapter has not been fitted"
        return tensor @ self.matrix.T

    def on(self, like: Tensor) -> Adapter:
        """With the channel map on the device, and in the dtype, of `like`."""
        columns = None if self.columns is None else self.columns.to(like.device)
        return replace(self, columns=columns, matrix=None if self.matrix is None else self.matrix.to(like))

    def map_channels(self, tensor: Tensor, weight: Tensor) -> Tensor:
        """A tensor in the student's layout, its channels mapped by `weight` [channels after, channels before]."""
        axis = self.student.channels + 1
        return (tensor.movedim(axis, -1) @ weight.T).movedim(-1, axis)

    @property
    def initial_map(self) -> Tensor:
        """The fitted channel map as a matrix [student channels, teacher channels]."""
        if self.columns is not None:
            return functional.one_hot(self.columns, self.teacher.width).double()
        assert self.matrix is not None, "the adapter has not been fitted"
        return self.matrix

    def __str__(self) -> str:
        parts = []
        if self.resamples:
            parts.append("resampled")
        elif self.changes_layout:
            parts.append(f"{_layout(self.teacher)} to {_layout(self.student)}")
        a, b = self.teacher.width, self.student.width
        if self.kind != "equal":
            how = "" if self.columns is None and self.matrix is None else self._how()
            parts.append(f"{self.kind} {a} to {b}{how}")
        if self.kind == "trainable":
            parts.append(f"folds into {', '.join(self.folds)}" if self.folds else "cannot be folded")
        return ", ".join(parts)

    def _how(self) -> str:
        if self.columns is None:
            return ", principal components"
        return ", channels repeated" if self.student.width > self.teacher.width else ", channels selected"


def adapter(teacher: Boundary, student: Boundary, resample: bool = False) -> Adapter | None:
    """The adapter between two tensors; None if there is none.

    Tensors go together that are equal in everything but channels and their place: the same positions as an image, as
    channels-last image or as tokens, of which up to five leading ones (class tokens) are set aside.

    Arguments:
        resample: also allow other spatial sizes, which are interpolated.
    """
    if teacher.dtype != student.dtype or teacher.folded != student.folded:
        return None
    if teacher.made_of and student.made_of and teacher.made_of.isdisjoint(student.made_of):
        return None  # of two towers
    if not teacher.distilled:
        return Adapter(teacher, student, "equal") if teacher.shape == student.shape else None
    if not _same_positions(teacher, student) and not (resample and _resamplable(teacher, student)):
        return None
    if teacher.width != student.width and teacher.width * student.width > _MOST_ENTRIES:
        return None
    return Adapter(teacher, student, "equal" if teacher.width == student.width else "matched")


def pair_tensors(teacher: Cut, student: Cut, resample: bool = False) -> tuple[Adapter, ...] | None:
    """Adapters for all tensors of two cuts, in the student's order; None if they do not go together."""
    if len(teacher.tensors) != len(student.tensors):
        return None
    left = list(teacher.tensors)
    chosen = []
    for wanted in student.tensors:
        found = [a for t in left if (a := adapter(t, wanted, resample)) is not None]
        if not found:
            return None
        best = min(  # the first of equals
            found, key=lambda a: (a.changes_layout, a.kind != "equal", a.teacher.made_of != wanted.made_of)
        )
        left.remove(best.teacher)
        chosen.append(best)
    return tuple(chosen)


def positions(tensor: Boundary) -> int:
    """How many spatial positions a tensor has, without class tokens."""
    if len(tensor.grid) != 1:
        return math.prod(tensor.grid)
    (length,) = tensor.grid
    if not _may_hold_class_tokens(tensor):
        return length
    square = math.isqrt(length) ** 2
    return square if square >= 4 and length - square <= _MOST_PREFIX else length


def _may_hold_class_tokens(tensor: Boundary) -> bool:
    return tensor.image and len(tensor.grid) == 1 and tensor.channels == 1


def _same_positions(a: Boundary, b: Boundary) -> bool:
    if a.grid == b.grid:
        return len(a.shape) == len(b.shape)
    if not all(_may_hold_class_tokens(t) for t in (a, b) if len(t.grid) == 1):
        return False
    if not a.grid or not b.grid or not (len(a.grid) == 1 or len(b.grid) == 1):
        return False
    if len(a.grid) == len(b.grid) == 1:
        return positions(a) == positions(b) and positions(a) >= 4
    tokens, image = (a, b) if len(a.grid) == 1 else (b, a)
    return len(image.grid) == 2 and 0 <= tokens.grid[0] - math.prod(image.grid) <= _MOST_PREFIX


def _resamplable(a: Boundary, b: Boundary) -> bool:
    return all(len(t.grid) == 2 or (len(t.grid) == 1 and math.isqrt(positions(t)) ** 2 == positions(t)) for t in (a, b))


def _positions_like(tensor: Tensor, grid: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """`tensor` [rows, *grid, channels] on the grid `wanted`."""
    if grid == wanted:
        return tensor
    width = tensor.shape[-1]
    count = _image_positions(grid, wanted)
    prefix = tensor[:, : grid[0] - count] if len(grid) == 1 else tensor[:, :0].flatten(1, -2)
    body = tensor[:, grid[0] - count :] if len(grid) == 1 else tensor.flatten(1, -2)
    wanted_count = _image_positions(wanted, grid)
    if count != wanted_count:
        size = wanted if len(wanted) == 2 else (math.isqrt(wanted_count),) * 2
        before = grid if len(grid) == 2 else (math.isqrt(count),) * 2
        image = body.reshape(-1, *before, width).movedim(-1, 1)
        body = functional.interpolate(image, size, mode="bilinear", antialias=True).movedim(1, -1).flatten(1, 2)
    if len(wanted) == 2:
        return body.reshape(-1, *wanted, width)
    missing = wanted[0] - wanted_count
    prefix = prefix[:, :missing]
    if missing > prefix.shape[1]:  # a student's class token without a counterpart is to hold the mean of the tokens
        prefix = torch.cat([prefix, body.mean(1, keepdim=True).expand(-1, missing - prefix.shape[1], -1)], 1)
    return torch.cat([prefix, body], 1)


def _image_positions(grid: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of `grid`'s positions are an image's: all but the class tokens, given the grid on the other side."""
    if len(grid) == 2:
        return math.prod(grid)
    if len(other) == 2 and 0 <= grid[0] - math.prod(other) <= _MOST_PREFIX:
        return math.prod(other)
    return math.isqrt(grid[0]) ** 2


def _layout(tensor: Boundary) -> str:
    if len(tensor.grid) == 1:
        return "tokens"
    return "image" if tensor.channels == 0 else "channels-last image"


def needs_nonnegative(adapter: Adapter) -> bool:
    """Whether the student's tensor cannot be negative, so that principal components would be out of its reach."""
    return adapter.student.lowest is not Lowest.UNBOUNDED
