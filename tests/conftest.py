"""Every test starts from one thread and a fixed seed; nothing here stands in for the package's own parts."""

import pytest
import torch


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
