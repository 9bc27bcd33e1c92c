"""What blocks are trained with."""

from .block_recipe import BlockRecipe
from .losses import KL, MSE, CosineDistance, RelativeL1, Weighted
from .recipe import Recipe
from .schedule import Schedule

__all__ = ["KL", "MSE", "BlockRecipe", "CosineDistance", "Recipe", "RelativeL1", "Schedule", "Weighted"]
