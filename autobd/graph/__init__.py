"""From a whole model to an fx graph over its own submodules."""

from .arguments import Arguments, called_as
from .captured import Captured, capture
from .declared import declared_example

__all__ = ["Arguments", "Captured", "called_as", "capture", "declared_example"]
