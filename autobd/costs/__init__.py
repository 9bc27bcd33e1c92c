"""What blocks, links and memory cost."""

from ..hardware import Link
from .analytic import analytic
from .curve import Curve, at_rows
from .measured import profile
from .profiles import FORWARD, BlockCosts, Kind, Profile

__all__ = ["FORWARD", "BlockCosts", "Curve", "Kind", "Link", "Profile", "analytic", "at_rows", "profile"]
