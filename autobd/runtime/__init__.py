"""One rank's state, and the execution of one step."""

from .evaluation import Evaluation
from .rank import Rank
from .statistics import statistics_note
from .trace import joined

__all__ = ["Evaluation", "Rank", "joined", "statistics_note"]
