"""From a plan to what each rank does, as instructions and as the Python generated from them."""

from .build import build
from .instruction import Edge, Instruction, Op
from .program import Program

__all__ = ["Edge", "Instruction", "Op", "Program", "build"]
