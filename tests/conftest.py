"""Every test starts from one thread, a fixed seed and no profile of before; nothing here stands in for the package's
own parts."""

import pytest
import torch
from opened import close_ranks


@pytest.fixture(autouse=True)
def deterministic():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nothing_open():
    """For tests that look at the ranks that there are."""
    close_ranks()


@pytest.fixture(autouse=True, scope="session")
def ranks_end_with_the_tests():
    yield
    close_ranks()


@pytest.fixture(autouse=True, scope="session")
def no_profiles_of_before(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOBD_CACHE", str(tmp_path_factory.mktemp("profiles")))
        yield
