"""Checkpoints are there whole or not at all, and damage is found."""

import os
import signal
import stat
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autobd.checkpoints import Draft, clear, prune, saved
from autobd.checkpoints import tensors as files
from autobd.errors import CheckpointError

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape, dtype = draw(st.lists(st.integers(0, 3), max_size=3)), draw(st.sampled_from(DTYPES))
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    return values.transpose(0, 1) if values.ndim > 1 and draw(st.booleans()) else values


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4)
states = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states)
def test_any_state_comes_back_as_it_was(tmp_path, state):
    files.write(tmp_path / "state", state)
    assert_equal(files.read(tmp_path / "state"), state)


def test_an_optimizers_state_comes_back(tmp_path):
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    files.write(tmp_path / "state", optimizer.state_dict())
    assert_equal(files.read(tmp_path / "state"), optimizer.state_dict())


def test_tensors_that_share_storage_are_written_one_by_one(tmp_path):
    whole = torch.arange(6.0)
    files.write(tmp_path / "state", [whole, whole[2:4], whole.view(2, 3).T])
    assert_equal(files.read(tmp_path / "state"), [whole, whole[2:4], whole.view(2, 3).T])


def test_what_has_no_form_is_refused(tmp_path):
    with pytest.raises(TypeError, match="object cannot be written"):
        files.write(tmp_path / "state", {"a": object()})
    assert not (tmp_path / "state").exists()


def made(directory, step, value=1.0):
    draft = Draft(directory, step, "me")
    draft.begin()
    draft.write("a.safetensors", {"x": torch.full((3,), value)})
    draft.write("b.safetensors", [step])
    return draft.commit()


def test_a_draft_is_no_checkpoint_until_it_is_done(tmp_path):
    draft = Draft(tmp_path / "runs", 7, "me")
    draft.begin()
    draft.write("a.safetensors", {"x": torch.ones(3)})
    assert saved(tmp_path / "runs") == []
    assert stat.S_IMODE(draft.path.stat().st_mode) == 0o700
    found = draft.commit()
    assert saved(tmp_path / "runs") == [found]
    found.check()
    assert torch.equal(found.read("a.safetensors")["x"], torch.ones(3))
    assert found.names() == ["a.safetensors"]
    draft.drop()
    assert saved(tmp_path / "runs") == [found]


def test_the_newest_ones_are_kept_and_one_of_the_same_step_is_replaced(tmp_path):
    for step in (1, 12, 3, 100000000 - 1):
        made(tmp_path, step)
    assert [s.step for s in saved(tmp_path)] == [1, 3, 12, 99999999]
    made(tmp_path, 12, 5.0)
    prune(tmp_path, 2)
    assert [s.step for s in saved(tmp_path)] == [12, 99999999]
    assert saved(tmp_path)[0].read("a.safetensors")["x"][0] == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000012", "step-99999999"]


def test_what_a_killed_run_has_left_behind_is_cleared_away(tmp_path):
    made(tmp_path, 5)
    Draft(tmp_path, 6, "killed").begin()
    (tmp_path / ".step-00000004.old").mkdir()
    clear(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["a.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [cut_short, flipped, os.remove, lambda p: p.write_bytes(b"")])
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_offered(tmp_path, name, damage):
    made(tmp_path, 5)
    found = made(tmp_path, 9)
    damage(found.path / name)
    with pytest.raises(CheckpointError) as error:
        found.check()
    assert str(found.path) in str(error.value)
    assert name in str(error.value)
    assert f'resume="{tmp_path / "step-00000005"}"' in str(error.value)


def test_one_of_another_form_is_refused(tmp_path):
    found = made(tmp_path, 5)
    manifest = found.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"autobd checkpoint": 1', '"autobd checkpoint": 99'))
    with pytest.raises(CheckpointError, match="another version"):
        found.check()


WRITER = """
import sys, torch
from pathlib import Path
from autobd.checkpoints import Draft, prune
for step in range(10**6):
    draft = Draft(Path(sys.argv[1]), step, "me")
    draft.begin()
    for name in "abc":
        draft.write(f"{name}.safetensors", {"x": torch.full((20000,), float(step))})
    draft.commit()
    prune(Path(sys.argv[1]), 2)
    print(step, flush=True)
"""


@pytest.mark.timeout(120)
def test_67_whenever_the_writer_is_killed_what_is_there_is_whole(tmp_path):
    for kill in range(6):
        directory = tmp_path / str(kill)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout.readline() == "0\n"
        time.sleep(0.013 * kill)
        writer.send_signal(signal.SIGKILL)
        last = [0, *(int(line) for line in writer.communicate()[0].split())][-1]
        found = saved(directory)
        assert found[-1].step >= last
        for one in found:
            one.check()
            assert all((one.read(name)["x"] == one.step).all() for name in one.names())
