"""Block pairs cut loose from their two models: what a rank holds, and how one student block is trained."""

from .part import Part, StudentPart, parts_of
from .randomness import student_seed
from .student import BlockState, ShareLosses, Student

__all__ = ["BlockState", "Part", "ShareLosses", "Student", "StudentPart", "parts_of", "student_seed"]
