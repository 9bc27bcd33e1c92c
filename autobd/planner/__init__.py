"""From costs to a plan."""

from .plan import Assignment, Plan
from .strategies import STRATEGIES, plan

__all__ = ["STRATEGIES", "Assignment", "Plan", "plan"]
