"""One rank's state, and the execution of one step."""

from .part import Part, parts_of
from .randomness import student_seed
from .rank import Rank
from .student import ShareLosses

__all__ = ["Part", "Rank", "ShareLosses", "parts_of", "student_seed"]
