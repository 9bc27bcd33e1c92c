"""Automatic pipelined blockwise distillation of any two PyTorch models."""

from .api import Distilled, distill
from .blocks import Split, split
from .errors import AutobdError
from .graph import Captured, capture
from .recipe import KL, MSE, Recipe

__version__ = "0.1.0"
__all__ = ["KL", "MSE", "AutobdError", "Captured", "Distilled", "Recipe", "Split", "capture", "distill", "split"]
