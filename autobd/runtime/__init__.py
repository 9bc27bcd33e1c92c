"""One rank's state, and the execution of one step."""

from .randomness import student_seed
from .rank import Rank, StepLosses

__all__ = ["Rank", "StepLosses", "student_seed"]
