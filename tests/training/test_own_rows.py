"""`own_rows=True`: every rank loads its own rows of a map-style dataset, and the student is the same."""

import copy

import pytest
import torch
from opened import open_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import autobd
from autobd.errors import AutobdError, InputError
from autobd.planner import Assignment, Plan

pytestmark = pytest.mark.timeout(120)
DEVICES = ("cpu",) * 3
ROWS = 22  # a last batch of 6


def network(width):
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(a, width), nn.ReLU(), nn.Linear(width, 8)) for a in (5, 8, 8, 8))
    ).double()


class Noted(Dataset):
    """Notes who reads which rows, in a file."""

    def __init__(self, path):
        self.path, self.rows = path, torch.randn(ROWS, 5, dtype=torch.float64)

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        import os

        with open(self.path, "a") as file:
            file.write(f"{os.getppid() if torch.utils.data.get_worker_info() else os.getpid()} {index}\n")
        return self.rows[index], index % 3


PLANS = {
    "replicas": Plan(
        "ahd", 8, DEVICES, (Assignment((0, 1), (0, 1), (5, 3), "relay"), Assignment((2, 3), (2,), (8,), "relay"))
    ),
    "rank 0 last": Plan(
        "ahd", 8, DEVICES, (Assignment((0, 1), (2, 1), (5, 3), "relay"), Assignment((2, 3), (0,), (8,), "relay"))
    ),
    "few rows": Plan("ahd", 8, DEVICES, (Assignment((0, 1, 2, 3), (0, 1, 2), (1, 1, 6), "relay"),)),
}


@pytest.fixture
def group():
    return open_ranks(len(DEVICES))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("strategy", ["dp", "ls", "ir", "replicas", "rank 0 last", "few rows"])
def test_the_student_is_the_same_and_nobody_reads_what_another_rank_needs(group, tmp_path, strategy, workers):
    teacher, students = network(16), [network(6)]
    students.append(copy.deepcopy(students[0]))
    results, plan = [], PLANS.get(strategy, strategy)
    path = tmp_path / "read"
    dataset = Noted(path)
    for student, own_rows in zip(students, (False, True), strict=True):
        path.write_text("")
        loader = DataLoader(dataset, 8, shuffle=True, generator=torch.Generator().manual_seed(3), num_workers=workers)
        results.append(
            autobd.distill(
                teacher,
                student,
                loader,
                devices=group,
                strategy=plan,
                blocks=4,
                epochs=2,
                own_rows=own_rows,
                progress=False,
            )
        )
    # A product's last bit may depend on where a worker's memory begins.
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(results[0].history.losses, results[1].history.losses, **close)
    torch.testing.assert_close(students[0].state_dict(), students[1].state_dict(), **close)
    read = [line.split() for line in path.read_text().splitlines()]
    readers = {pid for pid, _ in read}
    if strategy == "ir":
        # The first batch is also read whole, to split the models with.
        assert len(readers) == 3
        assert len(read) == 2 * ROWS + 8
    if strategy == "rank 0 last":
        assert len(readers) == 3
        assert len(read) == 2 * ROWS + 8 + 2 * 3  # rank 0: one row of each batch


def test_rows_of_unequal_sizes_are_refused_with_the_rank(tmp_path):
    class Ragged(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.randn(3 + (index > 3), 5)

    def padded(rows):
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mlp = [nn.Sequential(nn.Linear(5, w), nn.ReLU(), nn.Linear(w, 5)) for w in (8, 4)]
    pair = [nn.Sequential(copy.deepcopy(m), copy.deepcopy(m)) for m in mlp]
    with pytest.raises(AutobdError, match=r"Rank 1, step 0: this rank's rows of the batch do not look like"):
        autobd.distill(
            *pair,
            DataLoader(Ragged(), 8, collate_fn=padded),
            devices=open_ranks(2),
            strategy="ir",
            own_rows=True,
            progress=False,
        )


def test_data_that_has_no_rows_to_choose_from_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield torch.randn(4, 5)

    for data in (Stream(), [torch.randn(4, 5)], DataLoader(Stream(), None)):
        with pytest.raises(InputError, match="Not every rank can load its own rows"):
            autobd.distill(network(8), network(4), data, own_rows=True, progress=False)


@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_ranks_go_on_with_their_own_rows_when_blocks_get_the_own_boundary(group, epochs, tmp_path):
    found = []
    for own in (True, False):
        torch.manual_seed(0)
        teacher, student = network(16), network(4)
        data = DataLoader(Noted(tmp_path / "rows"), 8, shuffle=True, generator=torch.Generator().manual_seed(1))
        data.dataset.rows = torch.randn(ROWS, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        result = autobd.distill(
            teacher, student, data, devices=group, strategy=PLANS["replicas"], own_rows=own, progress=False,
            recipe=autobd.Recipe(epochs=epochs, block_input="teacher-then-student", logits=False),
            cuts=[("0", "0"), ("1", "1"), ("2", "2")],
        )  # fmt: skip
        found.append((result.history.losses, copy.deepcopy(student.state_dict())))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name])
