"""From costs to a plan."""

from .plan import Assignment, Plan
from .planned import planned
from .predict import predict
from .replan import Replanned, replan
from .strategies import NAMED, STRATEGIES, plan

__all__ = ["NAMED", "STRATEGIES", "Assignment", "Plan", "Replanned", "plan", "planned", "predict", "replan"]
