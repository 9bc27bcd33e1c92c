"""What blocks are trained with."""

from .losses import KL, MSE
from .recipe import BlockRecipe, Recipe

__all__ = ["KL", "MSE", "BlockRecipe", "Recipe"]
