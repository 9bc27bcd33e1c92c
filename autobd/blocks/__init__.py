"""From two captured models to matching block pairs."""

from .adapters import Adapter
from .candidates import Candidate
from .carve import Block
from .cuts import Boundary, Cut
from .split import BlockPair, Split, split
from .ties import Tie
from .verify import Verification

__all__ = ["Adapter", "Block", "BlockPair", "Boundary", "Candidate", "Cut", "Split", "Tie", "Verification", "split"]
