"""Ranks that stay open from test to test: most tests ask what ranks do, and starting them takes seconds."""

from autobd import ranks
from autobd.cluster import Cluster

_groups = {}


def open_ranks(devices):
    """`devices=` for so many ranks on the CPU with one thread each; what is no number, and 1, as it is."""
    if not isinstance(devices, int) or devices == 1:
        return devices
    group = _groups.get(devices)
    if group is None or group.broken:
        close_ranks(devices)
        group = _groups[devices] = ranks.open(Cluster(("cpu",) * devices), timeout=30, threads=1)
    return group


def close_ranks(*sizes):
    """End the groups of these sizes, or all."""
    for size in sizes or tuple(_groups):
        if size in _groups:
            _groups.pop(size).close()
