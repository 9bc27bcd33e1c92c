"""What a student may cost whose modules are chosen among candidates: `Budget`."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InputError


@dataclass(frozen=True)
class Budget:
    """Limits of the whole student; None: no limit.

    Arguments:
        parameters: how many it has on the way to its output.
        flops: of its forward, for one row.
        seconds: of its blocks' forwards in training, for one row, as measured on the ranks.

    Errors: InputError for a limit that is no positive number.
    """

    parameters: float | None = None
    flops: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, (int, float)) or not limit > 0):
                raise InputError(
                    f"Budget.{name} is no limit.", given=repr(limit), expected="a positive number, or None"
                )
