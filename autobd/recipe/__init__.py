"""What blocks are trained with."""

from .block_recipe import BlockRecipe, check_tied
from .budget import Budget
from .finish import Finish
from .losses import KL, MSE, CosineDistance, RelativeL1, Weighted
from .recipe import Recipe
from .schedule import Schedule
from .target_loss import TargetLoss

__all__ = [
    "KL",
    "MSE",
    "BlockRecipe",
    "Budget",
    "CosineDistance",
    "Finish",
    "Recipe",
    "RelativeL1",
    "Schedule",
    "TargetLoss",
    "Weighted",
    "check_tied",
]
