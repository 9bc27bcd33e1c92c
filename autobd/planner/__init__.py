"""From costs to a plan."""

from .plan import Assignment, Plan
from .strategies import NAMED, STRATEGIES, plan

__all__ = ["NAMED", "STRATEGIES", "Assignment", "Plan", "plan"]
