"""What blocks, links and memory cost."""

from .analytic import analytic
from .curve import Curve
from .measured import profile
from .profiles import BlockCosts, Kind, Link, Profile

__all__ = ["BlockCosts", "Curve", "Kind", "Link", "Profile", "analytic", "profile"]
