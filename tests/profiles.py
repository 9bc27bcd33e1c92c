"""Random costs for the planner and the simulator."""

import math

from hypothesis import strategies as st

from autobd.costs import BlockCosts, Curve, Kind, Link, Profile

SECONDS = st.floats(0.1, 4.0)
LINKS = st.builds(Link, st.floats(0, 0.2), st.floats(20, 500))


FEW = st.integers(1, 4)


@st.composite
def profiles(draw, blocks=FEW, devices=4, kinds=1, nodes=1, limited=False):
    """Costs that grow with the rows, not always in proportion; where memory is `limited`, some activations can be
    computed again."""
    number, ranks = draw(blocks), draw(st.integers(1, devices))
    batch, types = draw(st.integers(1, 8)), draw(st.integers(1, kinds))

    def curve():
        base, slope = draw(st.floats(0, 0.5)), draw(SECONDS)
        return Curve((1, 2, 4, 8), tuple(base + slope * rows / 8 for rows in (1, 2, 4, 8)))

    def size():
        return draw(st.floats(0, 4))

    def memory_curves():
        saved = size()
        again = draw(st.sampled_from([None, 0.1, 0.5])) if limited else None
        return Curve((1,), (saved,)), None if again is None else Curve((1,), (saved * again,))

    curves = [memory_curves() for _ in range(number)]
    costs = tuple(
        BlockCosts(
            tuple(curve() for _ in range(types)), tuple(curve() for _ in range(types)),
            tuple(draw(st.floats(0, 0.2)) for _ in range(types)),
            size(), size(), size(), size(), saved, size(), size(), again,
        )
        for saved, again in curves
    )  # fmt: skip
    memory = draw(st.floats(5, 60)) if limited else math.inf
    kind_of = tuple(draw(st.integers(0, types - 1)) for _ in range(ranks))
    hosts = tuple(sorted(draw(st.integers(0, nodes - 1)) for _ in range(ranks)))
    return Profile(
        batch, costs, tuple(f"d{i}" for i in range(ranks)),
        tuple(Kind(f"k{i}", memory) for i in range(types)), kind_of, hosts,
        draw(LINKS), draw(LINKS), draw(LINKS), draw(LINKS), input_bytes=size(),
    )  # fmt: skip
