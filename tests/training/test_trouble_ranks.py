"""Trouble reports about several ranks, written anew: on one, two and three ranks the result is a plain loop's.

The number of a test is that of the report in the project's bank of trouble reports.
"""

import copy
import random
import time

import pytest
import torch
from networks import assert_same, fingerprint, mlp
from opened import open_ranks
from plain import assert_equal_state, chained, plain_loop
from torch import nn
from torch.nn import functional

import autobd
from autobd import ranks
from autobd.cluster import Cluster
from autobd.errors import AutobdError, InputError

SIZES = (1, 2, 3)
STAGES = ("tr+dpu", "tr", "ls")  # nothing is replicated: bit for bit
SHARED = ("ahd", "dp", "ir")  # the batch is split


@pytest.fixture
def groups():
    """One open group of each size."""
    return {size: group_of(size) for size in SIZES}


@pytest.fixture(params=SIZES)
def group(request):
    return group_of(request.param)


def group_of(size):
    return ranks.open(Cluster(("cpu",)), threads=1) if size == 1 else open_ranks(size)


def distilled(teacher, student, data, group, names, strategy="tr+dpu", **options):
    """Train on a group, cut behind all but the last of these modules."""
    before, keys = fingerprint(teacher), list(student.state_dict())
    options = {"recipe": autobd.Recipe(block_input="teacher", logits=False), **options}
    result = autobd.distill(
        teacher, student, data, cuts=[(n, n) for n in names[:-1]], devices=group, strategy=strategy, progress=False,
        **options,
    )  # fmt: skip
    assert_same(before, fingerprint(teacher))
    assert list(student.state_dict()) == keys
    return result


def like_plain_loop(teacher, student, data, group, names, strategy="tr+dpu", batches=None, close=None, **options):
    """The same with `plain_loop`, which gets the `batches` of `data`: bit for bit, or to within `close`."""
    expected = copy.deepcopy(student)
    losses = plain_loop(teacher, expected, chained(*names), data if batches is None else batches)
    result = distilled(teacher, student, data, group, names, strategy, **options)
    if close is None:
        assert result.history.losses == losses
        assert_equal_state(student, expected)
    else:
        torch.testing.assert_close(torch.tensor(result.history.losses), torch.tensor(losses), rtol=close, atol=close)
        for key, value in expected.state_dict().items():
            torch.testing.assert_close(student.state_dict()[key], value, rtol=0, atol=close)
    return result


def ten_samples(batch_size):
    rows = torch.randn(10, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    data = torch.utils.data.TensorDataset(rows, torch.zeros(10))
    return torch.utils.data.DataLoader(data, batch_size=batch_size), list(rows.split(batch_size))


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.parametrize("batch_size", [4, 1])
@pytest.mark.timeout(60)
def test_33_the_last_batch_is_smaller(group, batch_size, strategy):
    loader, batches = ten_samples(batch_size)
    close = None if strategy in STAGES or group.size == 1 else 1e-10
    teacher, student = mlp(32).double(), mlp(4, seed=1).double()
    result = like_plain_loop(teacher, student, loader, group, "012", strategy, batches, close)
    assert result.history.steps == len(batches)


class Encoder(nn.Module):
    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8)) for _ in range(3)
        )
        self.head = nn.Linear(8, 20)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_34_each_batch_has_its_own_length(group, strategy):
    teacher, student = Encoder(32, 0).double(), Encoder(4, 1).double()
    batches = [torch.randint(0, 20, (rows, n)) for rows, n in ((2, 7), (2, 7), (2, 5), (1, 9), (2, 5))]
    alone = copy.deepcopy(student)
    options = {
        "blocks": 3,
        "threads": 1,
        "progress": False,
        "recipe": autobd.Recipe(block_input="teacher", logits=False),
    }
    autobd.distill(teacher, alone, batches, **options)
    autobd.distill(teacher, student, batches, devices=group, strategy=strategy, **options)
    for key, value in student.state_dict().items():
        assert torch.allclose(value, alone.state_dict()[key], rtol=0, atol=1e-10 if strategy in SHARED else 0), key


class Plus(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_35_inputs_and_targets_are_of_the_same_batch(group, strategy):
    teacher, student = (nn.Sequential(*(Plus() for _ in range(4))) for _ in range(2))
    batches = [(torch.full((4, 4), float(k)), torch.tensor([k] * 4)) for k in range(12)]
    recipe = autobd.Recipe(
        block_input="teacher", loss=autobd.MSE(normalised=False), optimizer=torch.optim.SGD, logits=False
    )
    result = distilled(teacher, student, batches, group, "0123", strategy, recipe=recipe)
    assert result.history.losses == [(0.0,) * 4] * 12


class View(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "transposed":
            return x.transpose(1, 2)
        if self.kind == "sliced":
            return x[:, ::2]
        return x.mean(1, keepdim=True).expand(-1, 4, -1)


def views(width, seed):
    torch.manual_seed(seed)

    def hidden(features):
        return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, features))

    return nn.Sequential(
        nn.Sequential(hidden(6), View("transposed")),
        nn.Sequential(hidden(4), View("sliced")),
        nn.Sequential(hidden(4), View("expanded")),
        hidden(4),
    )


def alike(groups, make, batches, names, strategy="tr+dpu"):
    """One, two and three ranks give the same, bit for bit, and a plain loop's but for the layout of tensors."""
    found = []
    for size in SIZES:
        teacher, student = make(32, 0), make(4, 1)
        result = like_plain_loop(teacher, student, batches, groups[size], names, strategy, close=1e-10)
        found.append((result.history.losses, student))
    for losses, student in found[1:]:
        assert losses == found[0][0]
        assert_equal_state(student, found[0][1])


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.timeout(60)
def test_37_boundaries_that_are_views(groups, strategy):
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randn(2, 4, 6, generator=generator, dtype=torch.float64) for _ in range(3)]
    alike(groups, lambda width, seed: views(width, seed).double(), batches, "0123", strategy)


@pytest.mark.timeout(60)
def test_37_channels_last_images_cross_as_they_are(groups):
    def net(width, seed):
        torch.manual_seed(seed)
        layers = (nn.Conv2d(3, 4, 1), *(mixed(width) for _ in range(2)), nn.Conv2d(4, 4, 1))
        return nn.Sequential(*layers).to(torch.float64, memory_format=torch.channels_last)

    def mixed(width):
        return nn.Sequential(nn.Conv2d(4, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 4, 1))

    batches = [torch.randn(2, 3, 6, 6, dtype=torch.float64).to(memory_format=torch.channels_last) for _ in range(3)]
    alike(groups, net, batches, "0123")


class Masked(nn.Module):
    """A mask crosses beside the hidden state."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.middle = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    def forward(self, x):
        keep = x.abs().sum(-1, keepdim=True) > 1
        return self.last(self.middle(self.first(x)).masked_fill(~keep, 0.0))


MASKED = [
    (lambda m, x, batch: m.first(x), ("first",)),
    (lambda m, x, batch: m.middle(x).masked_fill(~(batch.abs().sum(-1, keepdim=True) > 1), 0.0), ("middle",)),
    (lambda m, x, batch: m.last(x), ("last",)),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.timeout(60)
def test_39_every_dtype_crosses_and_a_mask_beside_it(group, dtype):
    teacher, student = Masked(32, 0).to(dtype), Masked(4, 1).to(dtype)
    expected = copy.deepcopy(student)
    batches = [torch.randn(3, 4).to(dtype) for _ in range(3)]
    losses = plain_loop(teacher, expected, MASKED, batches)
    result = autobd.distill(
        teacher, student, batches, cuts=[("first", "first"), ("masked_fill", "masked_fill")], devices=group,
        strategy="tr+dpu", recipe=autobd.Recipe(block_input="teacher", logits=False), progress=False,
    )  # fmt: skip
    assert result.history.losses == losses
    assert_equal_state(student, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.timeout(60)
def test_39_gradients_of_every_dtype_are_summed_over_replicas(groups, size, dtype):
    teacher, student = mlp(32).to(dtype), mlp(4, seed=1).to(dtype)
    batches = [torch.randn(6, 6).to(dtype) for _ in range(3)]
    like_plain_loop(teacher, student, batches, groups[size], "012", "ir", close=2e-2 if dtype.itemsize < 8 else 1e-10)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))

    def forward(self, x):
        return x + self.inner(x)


def mixed_precision(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(20, 8), Residual(width), nn.Linear(8, 8), Residual(width), nn.Linear(8, 3))


@pytest.mark.timeout(60)
def test_40_under_autocast_all_ranks_compute_as_a_plain_loop_does(group):
    batches = [torch.randint(0, 20, (3, 6)) for _ in range(4)]
    teacher, student = mixed_precision(32, 0), mixed_precision(4, 1)
    expected = copy.deepcopy(student)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        losses = plain_loop(teacher, expected, chained(*"01234"), batches)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = distilled(teacher, student, batches, group, "01234")
    assert all(p.dtype is torch.float32 for p in student.parameters())
    assert result.history.losses == losses
    assert_equal_state(student, expected)


def tanh_net(width, seed, blocks=3):
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 6)) for _ in range(blocks))
    ).double()


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_42_the_step_has_the_same_size_on_any_number_of_ranks(group, strategy):
    teacher, student, x = tanh_net(32, 0), tanh_net(4, 1), torch.randn(8, 6, dtype=torch.float64)
    expected, y = copy.deepcopy(student), x
    for t, s in zip(teacher, expected, strict=True):
        with torch.no_grad():
            target = t(y)
        optimizer = torch.optim.SGD(s.parameters(), 0.1)
        functional.mse_loss(s(y), target).backward()
        optimizer.step()
        y = target
    recipe = autobd.Recipe(
        block_input="teacher", loss=autobd.MSE(normalised=False), optimizer=torch.optim.SGD, lr=0.1, logits=False
    )
    distilled(teacher, student, [x], group, "012", strategy, recipe=recipe)
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(student.state_dict()[key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [(5, 3), (1, 7), (3, 3, 2), (6, 1, 1)])
@pytest.mark.timeout(60)
def test_43_uneven_shares_weigh_as_their_rows(groups, rows):
    devices = ("cpu",) * len(rows)
    whole = autobd.planner.Assignment((0, 1), tuple(range(len(rows))), rows, "store")
    plan = autobd.planner.Plan("ir", 8, devices, (whole,))
    teacher, student = tanh_net(32, 0, 2), tanh_net(4, 1, 2)
    batches = [torch.randn(n, 6, dtype=torch.float64) for n in (8, 8, 5, 1)]
    like_plain_loop(teacher, student, batches, groups[len(rows)], "01", plan, close=1e-10)


class Slow(nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.linear, self.seconds = nn.Linear(4, 4), seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return self.linear(x)


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.timeout(60)
def test_45_a_rank_that_is_done_early_waits_for_the_others(group, slow):
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(*(Slow(0.1 * (i == slow) * s) for i in range(3))) for s in (0, 1))
    batches = [torch.randn(2, 4) for _ in range(3)]
    like_plain_loop(teacher, student, batches, group, "012")


def cumulative(width, seed):
    torch.manual_seed(seed)

    def block():
        return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width, momentum=None), nn.ReLU(), nn.Linear(width, 6))

    return nn.Sequential(block(), block())


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.timeout(60)
def test_54_batch_norm_counts_batches_on_the_teachers_features(group, strategy):
    teacher, student = cumulative(16, 0), cumulative(4, 1)
    batches = [torch.randn(8, 6) + 1 for _ in range(5)]
    with torch.no_grad():
        before = copy.deepcopy(teacher).eval()[0]
        expected = torch.stack([student[1][0](before(x)).mean(0) for x in batches]).mean(0)
    recipe = autobd.Recipe(block_input="teacher", lr=0.0, optimizer=torch.optim.SGD, logits=False)
    distilled(teacher, student, batches, group, "01", strategy, recipe=recipe)
    torch.testing.assert_close(student[1][1].running_mean, expected, rtol=0, atol=1e-5)
    assert student[1][1].num_batches_tracked == 5


@pytest.mark.timeout(60)
def test_54_replicas_count_batches_not_ranks(groups):
    teacher, student = cumulative(16, 0), cumulative(4, 1)
    distilled(teacher, student, [torch.randn(8, 6) for _ in range(5)], groups[2], "01", "ir")
    assert [student[i][1].num_batches_tracked.item() for i in range(2)] == [5, 5]


@pytest.mark.timeout(60)
def test_56_synchronised_batch_norm_is_one_clear_error_or_plain_batch_norm(group):
    torch.manual_seed(1)
    student = nn.SyncBatchNorm.convert_sync_batchnorm(cumulative(4, 1))
    keys = list(student.state_dict())
    try:
        autobd.distill(
            cumulative(16, 0), student, [torch.randn(4, 6)], cuts=[("0", "0")], devices=group, threads=1,
            progress=False,
        )  # fmt: skip
    except AutobdError as error:
        assert "0.1" in str(error) or "SyncBatchNorm" in str(error)  # noqa: PT017
    assert list(student.state_dict()) == keys


class Liar:
    """Says that it has seven batches and has five."""

    def __len__(self):
        return 7

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            yield torch.randn(4, 6, generator=generator, dtype=torch.float64), torch.zeros(4)


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_69_the_feeding_rank_says_when_an_epoch_ends(group, strategy):
    batches = [x for x, _ in Liar()] * 2
    teacher, student = mlp(32).double(), mlp(4, seed=1).double()
    close = None if strategy in STAGES or group.size == 1 else 1e-10
    result = like_plain_loop(teacher, student, Liar(), group, "012", strategy, batches, close, epochs=2)
    assert result.history.epoch_ends == [5, 10]


class Unseeded(torch.utils.data.Dataset):
    """Rows that carry their number, in an order that differs from process to process and from epoch to epoch."""

    def __init__(self):
        self.order = list(range(12))
        random.SystemRandom().shuffle(self.order)

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((4,), float(self.order[i])), self.order[i]


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_71_every_block_sees_every_sample_once_per_epoch(group, strategy, tmp_path):
    def seen(student, teacher):
        with open(tmp_path / "seen", "a") as file:  # one line at once, from any process
            file.write(" ".join(str(int(v)) for v in teacher[:, 0].round()) + "\n")
        return (student - teacher).square().flatten(1).mean(1)

    teacher = nn.Sequential(*(Plus() for _ in range(3)))
    with torch.no_grad():
        for block, shift in zip(teacher, (100, 200, 400), strict=True):
            block.shift.fill_(shift)
    student = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    loader = torch.utils.data.DataLoader(Unseeded(), batch_size=4, shuffle=True)
    recipe = autobd.Recipe(block_input="teacher", loss=seen, optimizer=torch.optim.SGD, lr=0.0, logits=False)
    distilled(teacher, student, loader, group, "012", strategy, recipe=recipe, epochs=2, profile="analytic")
    values = sorted(int(v) for v in (tmp_path / "seen").read_text().split())
    assert values == sorted(offset + i for offset in (100, 300, 700) for i in range(12) for _ in range(2))


def local(width):
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, width), nn.Linear(width, 6)
            self.act = lambda x: x.clamp(min=0)

        def forward(self, x):
            return self.second(self.act(self.first(x)))

    return Local()


@pytest.mark.timeout(60)
def test_73_models_of_a_function_that_hold_lambdas(group):
    torch.manual_seed(0)
    teacher, student = (nn.Sequential(local(w), local(w), local(w)) for w in (32, 4))
    like_plain_loop(teacher, student, [torch.randn(3, 6) for _ in range(3)], group, "012")


@pytest.mark.timeout(60)
def test_74_a_loader_that_cannot_be_pickled(group, tmp_path):
    with open(tmp_path / "log", "w") as log:
        samples = [(torch.randn(6), k) for k in range(8)]

        def collate(rows):
            log.write(f"{len(rows)} rows\n")
            return torch.stack([x for x, _ in rows])

        loader = torch.utils.data.DataLoader(samples, batch_size=4, collate_fn=lambda rows: collate(rows))
        batches = [torch.stack([x for x, _ in samples[i : i + 4]]) for i in (0, 4)]
        like_plain_loop(mlp(32), mlp(4, seed=1), loader, group, "012", batches=batches)
    assert (tmp_path / "log").read_text().count("4 rows") == 2


@pytest.mark.parametrize("strategy", [*STAGES, *SHARED])
@pytest.mark.timeout(60)
def test_80_more_ranks_than_blocks(groups, strategy):
    teacher, student = tanh_net(32, 0, 2), tanh_net(4, 1, 2)
    batches = [torch.randn(4, 6, dtype=torch.float64) for _ in range(3)]
    close = None if strategy in STAGES else 1e-10
    like_plain_loop(teacher, student, batches, groups[3], "01", strategy, close=close)
    # and those that had nothing to do take part in the next run
    teacher, student = tanh_net(32, 0), tanh_net(4, 1)
    like_plain_loop(teacher, student, batches, groups[3], "012", strategy, close=close)


@pytest.mark.timeout(60)
def test_80_more_gpus_than_there_are_is_said_before_anything_starts():
    count = torch.cuda.device_count() + 1
    with pytest.raises(InputError, match="No such GPU"):
        autobd.distill(mlp(8), mlp(4), [torch.randn(3, 6)], devices=[f"cuda:{i}" for i in range(count)])
