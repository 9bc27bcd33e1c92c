"""One rank's state, and the execution of one step."""

from .rank import Rank
from .statistics import statistics_note
from .trace import joined

__all__ = ["Rank", "joined", "statistics_note"]
