"""Show what would run, and what did."""

from .chrome import chrome_trace
from .gantt import gantt
from .report import Report, inspect

__all__ = ["Report", "chrome_trace", "gantt", "inspect"]
