"""From a plan to what each rank does, as instructions and as the Python generated from them."""

from .build import again, build
from .evaluation import evaluation
from .instruction import Edge, Instruction, Op
from .program import Program
from .simulate import simulate
from .timeline import Event, Message, Trace

__all__ = [
    "Edge",
    "Event",
    "Instruction",
    "Message",
    "Op",
    "Program",
    "Trace",
    "again",
    "build",
    "evaluation",
    "simulate",
]
