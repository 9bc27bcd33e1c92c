"""From two captured models to matching block pairs."""

from .carve import Block
from .cuts import Cut
from .split import BlockPair, Split, split
from .verify import Verification

__all__ = ["Block", "BlockPair", "Cut", "Split", "Verification", "split"]
