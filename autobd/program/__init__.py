"""From a plan to what each rank does, as instructions and as the Python generated from them."""

from .instruction import Instruction, Op
from .program import Program, build

__all__ = ["Instruction", "Op", "Program", "build"]
