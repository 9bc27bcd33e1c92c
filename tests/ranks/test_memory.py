"""While a run lasts, a rank on a CPU keeps freed memory for the next tensor."""

import platform
import resource

import pytest
import torch

from autobd.ranks.memory import memory_kept

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to")
SIZE = 1 << 24  # floats: 64 MiB, more than glibc ever keeps by itself


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(SIZE)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_used_again_and_given_back_at_the_end():
    outside = faults()
    before = resident()
    with memory_kept(torch.device("cpu")):
        faults()
        assert faults() < outside / 4
        assert resident() > before + 2 * SIZE
    assert resident() < before + SIZE
    assert faults() > outside / 4


def test_an_environment_that_says_how_to_allocate_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    before = resident()
    with memory_kept(torch.device("cpu")):
        faults()
        assert resident() < before + SIZE
