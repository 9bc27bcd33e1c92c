"""One rank's state, and the execution of one step."""

from .part import Part, parts_of
from .randomness import student_seed
from .rank import Rank
from .statistics import statistics_note
from .student import ShareLosses
from .trace import Event, Message, Trace, joined

__all__ = [
    "Event",
    "Message",
    "Part",
    "Rank",
    "ShareLosses",
    "Trace",
    "joined",
    "parts_of",
    "statistics_note",
    "student_seed",
]
