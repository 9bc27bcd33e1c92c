"""Costs: curves, profiles from numbers, by analysis and by measuring, and what is kept of them."""

import copy
import json
import math
import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import assert_same, fingerprint, mlp
from profiles import profiles
from torch import nn
from torch.nn.utils import weight_norm

import autobd
from autobd.cluster import Cluster
from autobd.costs import Curve, Kind, Link, Profile, analytic, at_rows, measured
from autobd.errors import AutobdError, InputError

HOME = torch.device("cpu")


@given(st.lists(st.floats(0, 10), min_size=2, max_size=8), st.integers(0, 300))
def test_a_curve_goes_through_what_is_known_in_straight_lines(values, rows):
    curve = Curve.of(values, 1)
    assert [curve.at(1 << i) for i in range(len(values))] == pytest.approx(values)
    assert curve.at(0) == 0
    a, b = curve.at(rows), curve.at(rows + 1)
    assert a >= 0
    assert b >= 0
    known = [r for r in curve.rows if r > rows]
    if known and rows >= 1:
        low = max(r for r in curve.rows if r <= rows)
        share = (rows - low) / (known[0] - low)
        assert a == pytest.approx((1 - share) * curve.at(low) + share * curve.at(known[0]))


def test_what_does_not_fit_is_infinite_from_there_on():
    curve = Curve((1, 2, 4), (1.0, 2.0, math.inf))
    assert curve.at(2) == 2
    assert math.isinf(curve.at(3))
    assert math.isinf(curve.at(9))


@pytest.mark.parametrize("curve", [((), ()), ((2, 1), (1, 1)), ((0, 1), (1, 1)), ((1,), (1, 2)), ((1,), (-1,))])
def test_what_is_no_curve_is_refused(curve):
    with pytest.raises(InputError):
        Curve(*curve)
    with pytest.raises(InputError):
        Curve((1,), (math.nan,))


@settings(max_examples=50, deadline=None)
@given(profiles(kinds=3, nodes=2, limited=True))
def test_a_profile_is_the_same_after_json(profile):
    assert Profile.from_json(profile.to_json()) == profile
    json.loads(profile.to_json(), parse_constant=pytest.fail)  # JSON has no infinity


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"autobd profile": 0}', '{"autobd profile": 1}'])
def test_what_is_no_profile_is_refused(text):
    with pytest.raises(InputError, match="no profile"):
        Profile.from_json(text)


def test_a_profile_from_plain_numbers():
    profile = Profile.of([1.0, [0.1, 0.2]], [3.0, 6.0], 4, 2, boundary=[10.0, 0.0], memory=1e9, within=Link(0.5, 100))
    assert profile.blocks[0].teacher[0].at(2) == 0.5
    assert profile.blocks[1].teacher[0].at(3) == pytest.approx(0.3)
    assert profile.kinds == (Kind("device", 1e9),)
    assert profile.within.seconds(50) == 1.0
    assert "4" in str(profile)
    with pytest.raises(InputError, match="different numbers of blocks"):
        Profile.of([1.0], [1.0, 2.0], 4)


def test_a_ring_all_reduce_sends_everything_twice_but_the_own_part():
    profile = Profile.of([1.0], [1.0], 4, 4, reduce_within=Link(0.0, 100.0))
    assert profile.reduce_seconds((0,), 100) == 0
    assert profile.reduce_seconds((0, 1), 100) == pytest.approx(1.0)
    assert profile.reduce_seconds((0, 1, 2, 3), 100) == pytest.approx(1.5)


def images(width):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 8, 3, padding=1)),
        nn.Sequential(nn.Conv2d(8, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 1)),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 64, 5)),
    )


def pair(rows=8):
    return autobd.split(images(32), images(8), torch.randn(rows, 3, 8, 8), cuts=[("0", "0"), ("1", "1")])


def test_analysis_counts_operations_and_bytes():
    split = pair()
    small, large = analytic(split, Cluster.of("2xA100", HOME), 8), analytic(split, Cluster.of("2xA100", HOME), 80000)
    for a, b in zip(small.blocks, large.blocks, strict=True):
        assert a.teacher[0].at(8) == pytest.approx(b.teacher[0].at(8))
        assert b.teacher[0].at(80000) > a.teacher[0].at(8)
    assert small.blocks[0].boundary == 8 * 8 * 8 * 4
    assert small.blocks[1].student_bytes == sum(p.numel() * 4 for p in split.student.model[1].parameters())
    assert large.blocks[0].student[0].at(80000) < large.blocks[0].teacher[0].at(80000) * 3  # a smaller network
    faster = analytic(split, Cluster.of("2xH100", HOME), 80000)
    assert all(
        f.teacher[0].at(80000) <= b.teacher[0].at(80000) for f, b in zip(faster.blocks, large.blocks, strict=True)
    )


def test_analysis_does_not_know_how_much_memory_devices_that_are_here_have():
    assert analytic(pair(), Cluster(("cpu", "cpu")), 8).kinds == (Kind("CPU", math.inf),)
    assert analytic(pair(), Cluster.of("2xL4", HOME), 8).kinds == (Kind("L4", 24e9),)


@pytest.mark.parametrize(
    ("text", "devices", "nodes"),
    [
        ("4xA6000", ["A6000"] * 4, [0] * 4),
        ("2xa100+2xL4", ["A100", "A100", "L4", "L4"], [0] * 4),
        ("8xH100/2 nodes", ["H100"] * 8, [0] * 4 + [1] * 4),
        (" 2 x V100 + 1 x 2080ti ", ["V100", "V100", "2080Ti"], [0] * 3),
    ],
)
def test_clusters_to_plan_for(text, devices, nodes):
    cluster = Cluster.of(text, HOME)
    assert cluster.devices == tuple(devices)
    assert cluster.hosts == tuple(nodes)
    assert not cluster.exists
    assert Cluster.of(["cpu"] * 2, HOME).exists


@pytest.mark.parametrize("text", ["4xA600", "0xA100", "3xH100/2 nodes", "2xH100/0 nodes", "2xH100/3 nodes"])
def test_clusters_that_nobody_has_are_refused(text):
    with pytest.raises(InputError):
        Cluster.of(text, HOME)


@pytest.mark.timeout(120)
def test_measured_costs_are_of_the_blocks_and_leave_the_models_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOBD_CACHE", str(tmp_path))
    split = pair()
    before = [fingerprint(c.model) for c in (split.teacher, split.student)]
    state = torch.get_rng_state()
    profile = autobd.profile(split, ["cpu"] * 2, 8, threads=1, budget=2, progress=False)
    for whole, captured in zip(before, (split.teacher, split.student), strict=True):
        assert_same(whole, fingerprint(captured.model))
    assert torch.equal(torch.get_rng_state(), state)
    assert profile.source == "measured"
    assert profile.devices == ("cpu", "cpu")
    for block in profile.blocks:
        assert 0 < block.teacher[0].at(8) < 1
        assert 0 < block.student[0].at(8) < 1
        assert block.teacher[0].rows == (4, 8)
    assert 0 < profile.within.bandwidth < 1e12
    files = list(tmp_path.iterdir())
    assert len(files) == 1
    assert autobd.profile(split, ["cpu"] * 2, 8, threads=1, budget=2, progress=False) == profile
    again = autobd.profile(pair(), ["cpu"] * 2, 8, autobd.Recipe(optimizer=torch.optim.SGD), threads=1, budget=1,
                           progress=False)  # fmt: skip
    assert again != profile
    assert len(list(tmp_path.iterdir())) == 2


MEMORY = """
import torch
from torch import nn
import autobd

width, rows, pixels = 32, 16, 64
teacher, student = (
    nn.Sequential(*(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh()) for _ in range(4)))
    for _ in range(2)
)
split = autobd.split(teacher, student, torch.randn(rows, width, pixels, pixels), cuts=[("2", "2")])
found = autobd.profile(split, 1, threads=1, budget=1, cached=False, progress=False).blocks[0].saved.at(rows)
print(found / (rows * width * pixels * pixels * 4))
"""


@pytest.mark.timeout(60)
def test_a_students_memory_is_what_is_kept_for_the_backward_and_a_little_more():
    given_back = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # else what was freed before can hide or add to it
    done = subprocess.run([sys.executable, "-c", MEMORY], env=given_back, capture_output=True, text=True, check=True)
    # Kept: what three convolutions and three activations give. For a while: differences to the teacher, gradients.
    assert 6 <= float(done.stdout) <= 12


@pytest.mark.timeout(60)
def test_a_cache_that_is_broken_or_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    split = autobd.split(mlp(8, 2), mlp(4, 2, seed=1), torch.randn(4, 6), cuts=[("0", "0")])
    monkeypatch.setenv("AUTOBD_CACHE", str(tmp_path))
    first = autobd.profile(split, 1, budget=0.5, progress=False)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert autobd.profile(split, 1, budget=0.5, progress=False).source == first.source
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AUTOBD_CACHE", str(tmp_path / "file" / "no directory"))
    assert autobd.profile(split, 1, budget=0.5, progress=False).source == "measured"


@pytest.mark.timeout(60)
def test_a_loaders_time_is_that_of_a_batch_and_adds_to_the_rank_that_reads():
    split = autobd.split(mlp(8, 2), mlp(4, 2, seed=1), torch.randn(4, 6), cuts=[("0", "0")])

    def batches():
        for _ in range(5):
            time.sleep(0.05)
            yield torch.randn(4, 6)

    found = autobd.profile(split, 1, budget=0.5, progress=False, loader=batches())
    assert 0.05 < found.load < 0.15
    assert autobd.plan(found).prediction.step > found.load
    assert autobd.profile(split, 1, budget=0.5, progress=False).load == 0


@pytest.mark.timeout(60)
def test_a_profile_can_be_given_and_is_refused_for_other_blocks():
    teacher, student, data = mlp(8, 3), mlp(4, 3, seed=1), [torch.randn(4, 6)] * 2
    cuts = [("0", "0"), ("1", "1")]
    split = autobd.split(copy.deepcopy(teacher), copy.deepcopy(student), data[0], cuts=cuts)
    costs = analytic(split, Cluster(("cpu", "cpu")), 4)
    result = autobd.distill(teacher, student, data, devices=["cpu"] * 2, cuts=cuts, profile=costs, progress=False)
    assert result.profile == costs
    with pytest.raises(InputError, match="other blocks or devices"):
        autobd.distill(teacher, student, data, cuts=cuts[:1], profile=costs, progress=False)
    with pytest.raises(InputError, match="profile= is no profile"):
        autobd.distill(teacher, student, data, profile="measure", progress=False)


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True),
    st.lists(st.one_of(st.floats(0, 10), st.just(math.inf)), min_size=5, max_size=5),
    st.lists(st.integers(0, 100), min_size=1, max_size=8),
)
def test_many_curves_at_once_are_each_by_itself(known, values, wanted):
    curve = Curve(tuple(sorted(known)), tuple(values[: len(known)]))
    found = at_rows([curve, Curve((2,), (1.0,))], wanted)[0].tolist()
    assert found == pytest.approx([curve.at(rows) for rows in wanted])
    assert not any(math.isnan(v) for v in found)


@pytest.mark.timeout(60)
def test_layers_that_keep_a_computed_weight_can_be_measured():
    def net(width):
        return nn.Sequential(*(nn.Sequential(weight_norm(nn.Linear(6, width)), nn.Linear(width, 6)) for _ in range(2)))

    teacher, student = net(8), net(4)
    for model in (teacher, student):
        model(torch.randn(2, 6))  # the weight is a tensor with a history now, which deepcopy refuses
    split = autobd.split(teacher, student, torch.randn(4, 6), cuts=[("0", "0")])
    assert autobd.profile(split, 1, budget=0.3, cached=False, progress=False).source == "measured"


@pytest.mark.timeout(60)
def test_shares_that_a_batch_norm_refuses_do_not_fit():
    def net(width):
        block = (nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 6)) for _ in range(2))
        return nn.Sequential(*block)

    split = autobd.split(net(8), net(4), torch.randn(2, 6), cuts=[("0", "0")])
    found = autobd.profile(split, ["cpu"] * 2, threads=1, budget=0.3, cached=False, progress=False)
    assert found.blocks[0].saved.at(1) == math.inf
    assert math.isfinite(found.blocks[0].saved.at(2))
    assert all(len(a.ranks) == 1 for a in autobd.plan(found).assignments)
    with pytest.raises(AutobdError, match="not fit"):
        autobd.plan(found, "ir")


class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, student, teacher):
        self.calls += 1
        return (student - teacher).square().flatten(1).mean(1)


@pytest.mark.timeout(60)
def test_a_loss_that_counts_its_calls_does_not_see_those_of_the_profile():
    split = autobd.split(mlp(8, 2), mlp(4, 2, seed=1), torch.randn(4, 6), cuts=[("0", "0")])
    loss = Counting()
    autobd.profile(split, 1, recipe=autobd.Recipe(loss=loss, logits=False), budget=0.3, cached=False, progress=False)
    assert loss.calls == 0


@pytest.mark.timeout(120)
def test_shares_that_are_not_known_are_measured_and_nothing_else():
    split = autobd.split(mlp(8, 2), mlp(4, 2, seed=1), torch.randn(8, 6), cuts=[("0", "0")])
    first = autobd.profile(split, ["cpu"] * 2, budget=0.5, cached=False, progress=False)
    more = autobd.profile(split, ["cpu"] * 2, known=first, shares=[3, 4, 5], budget=0.5, cached=False, progress=False)
    assert (first.knows(4), first.knows(5), more.knows(5)) == (True, False, True)
    for before, after in zip(first.blocks, more.blocks, strict=True):
        assert (before.student[0].rows, after.student[0].rows) == ((4, 8), (3, 4, 5, 8))
        assert all(after.student[0].at(rows) == before.student[0].at(rows) for rows in (4, 8))
        assert all(0 < after.teacher[0].at(rows) < 1 for rows in (3, 5))
        assert after.update == before.update
    assert (more.within, more.reduce_within) == (first.within, first.reduce_within)


@pytest.mark.timeout(120)
def test_distill_measures_the_shares_of_its_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOBD_CACHE", str(tmp_path))
    monkeypatch.setattr(measured, "numbers_of_rows", lambda batch, ranks: (batch,))  # as if the shares were unusual
    done = autobd.distill(
        mlp(8), mlp(4, seed=1), torch.randn(27, 6), batch_size=9, devices=["cpu"] * 3, strategy="dp", threads=1,
        epochs=1, cuts=[("0", "0"), ("1", "1")], progress=False, replan=False,
    )  # fmt: skip
    assert done.plan.shares == {3}
    assert done.profile.knows(3)
