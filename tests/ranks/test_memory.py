"""While a run lasts, a rank on a CPU keeps freed memory for the next tensor."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to")
# In a process of its own: how much is given back depends on what was allocated before.
SCRIPT = """
import resource
import torch
from autobd.ranks.memory import memory_kept

SIZE = 1 << 24  # floats: 64 MiB, more than glibc ever keeps by itself

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

torch.ones(SIZE)
before = resident()
with memory_kept(torch.device("cpu")):
    for _ in range(20):
        torch.ones(SIZE)
    inside = resident() - before
# Something small may lie behind a freed tensor, so that the next one has to go elsewhere: two in all, not twenty.
print(inside > 2 * SIZE, inside < 12 * SIZE, resident() < before + SIZE)
"""


def run(**environment):
    given = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**given, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.timeout(60)
def test_freed_memory_is_used_again_and_given_back_at_the_end():
    assert run() == ["True", "True", "True"]


@pytest.mark.timeout(60)
def test_an_environment_that_says_how_to_allocate_is_left_alone():
    assert run(MALLOC_TRIM_THRESHOLD_="131072") == ["False", "True", "True"]
