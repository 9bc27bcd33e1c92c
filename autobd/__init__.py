"""Automatic pipelined blockwise distillation of any two PyTorch models."""

from .api import distill
from .bench import Bench, bench
from .blocks import Split, split
from .costs import Profile, profile
from .distilled import Distilled
from .errors import AutobdError
from .graph import Captured, capture
from .planner import Assignment, Plan, plan
from .program import simulate
from .recipe import KL, MSE, Budget, CosineDistance, Finish, Recipe, RelativeL1, Schedule, TargetLoss, Weighted
from .report import Report, inspect
from .training import Callback, Checkpoint, Run, TensorBoard, Validation, accuracy

__version__ = "0.1.0"
__all__ = [
    "KL",
    "MSE",
    "Assignment",
    "AutobdError",
    "Bench",
    "Budget",
    "Callback",
    "Captured",
    "Checkpoint",
    "CosineDistance",
    "Distilled",
    "Finish",
    "Plan",
    "Profile",
    "Recipe",
    "RelativeL1",
    "Report",
    "Run",
    "Schedule",
    "Split",
    "TargetLoss",
    "TensorBoard",
    "Validation",
    "Weighted",
    "accuracy",
    "bench",
    "capture",
    "distill",
    "inspect",
    "plan",
    "profile",
    "simulate",
    "split",
]
