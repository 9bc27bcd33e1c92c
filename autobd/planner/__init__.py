"""From costs to a plan."""

from .plan import Assignment, Plan, plan

__all__ = ["Assignment", "Plan", "plan"]
