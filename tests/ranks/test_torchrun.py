"""Under `torchrun`, on one node or two, every process gets the student that one process trains."""

import os
import signal
import socket
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import os, sys, torch, autobd
from torch import nn

def net(width, seed):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(6, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, 6)) for _ in "123"]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double()

torch.manual_seed(7)
batches = [torch.randn(rows, 6).double() for rows in (8, 8, 3)]
rank = int(os.environ.get("RANK", 0))
teacher, student = net(16, 0), net(5, 1 + rank)  # rank 0's weights are the ones that count
cuts = [(str(i), str(i)) for i in range(3)]
found = {}
files = []
for strategy in ("tr+dpu", "dp", "tr+dpu", "dp"):
    student = net(5, 1 + rank)
    result = autobd.distill(teacher, student, batches, strategy=strategy, epochs=2, cuts=cuts, threads=1,
                            timeout=60, progress=False)
    assert result.student is student and len(result.split) == 4 and result.verification.exact
    state = {key: value.clone() for key, value in student.state_dict().items()}
    found[strategy] = {**state, "losses": torch.tensor(result.history.losses, dtype=torch.float64)}
    files.append(len(os.listdir("/proc/self/fd")))
assert files[1] == files[3], files  # connections are used again
student, linear = net(5, 1 + rank), nn.Linear(6, 6).double()
result = autobd.distill(teacher, student, batches, strategy="tr+dpu", cuts=cuts, threads=1, timeout=60, progress=False,
                        candidates={"1": [linear]}, budget=autobd.Budget(parameters=250), validate=autobd.Validation(
                            [(x, x) for x in batches], {"size": lambda output, x: output.norm()}))
assert result.candidates.chosen == [(1, 1)] and student[1] is linear and result.split.student.model is student
found["candidates"] = {key: value.clone() for key, value in student.state_dict().items()}
try:
    autobd.distill(teacher, student, [], progress=False)
except autobd.AutobdError as error:  # of rank 0, on every rank
    assert "no batch" in str(error)
else:
    raise AssertionError("not refused")
torch.save(found, sys.argv[1] + str(rank))
"""


def launched(script, out, *options, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script), str(out)]
    environment = {**os.environ, **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def meeting_place():
    """Options of agents that meet at a free port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "nodes", "--local-addr", "127.0.0.1"
    return "--nproc-per-node", "1", "--rdzv-backend", "c10d", *endpoint


def check(process):
    output, _ = process.communicate(timeout=150)
    assert process.returncode == 0, output


def assert_like_one_process(directory, script, ranks):
    subprocess.run([sys.executable, str(script), str(directory / "alone")], check=True, timeout=100)
    expected = torch.load(directory / "alone0")
    for rank in range(ranks):
        found = torch.load(directory / f"out{rank}")
        for strategy, atol in (("tr+dpu", 0), ("dp", 1e-10), ("candidates", 0)):
            for key, value in expected[strategy].items():
                assert torch.allclose(found[strategy][key], value, rtol=0, atol=atol), (rank, strategy, key)


@pytest.mark.timeout(300)
def test_two_processes_on_one_node(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    check(launched(script, tmp_path / "out", "--standalone", "--nproc-per-node", "2"))
    assert_like_one_process(tmp_path, script, 2)


FAILS = """
import os, time, torch, autobd
from torch import nn

class Broken(autobd.Callback):
    def on_epoch(self, run):
        raise ValueError("disk full")

nets = [nn.Sequential(*(nn.Sequential(nn.Linear(6, w), nn.ReLU(), nn.Linear(w, 6)) for _ in "abc")) for w in (16, 4)]
started = time.monotonic()
try:
    autobd.distill(*nets, [torch.randn(4, 6)] * 3, strategy="tr+dpu", threads=1, timeout=60, progress=False,
                   profile="analytic", callbacks=[Broken()])
except autobd.AutobdError as error:
    print("rank", os.environ["RANK"], type(error).__name__, time.monotonic() - started < 30, flush=True)
    os._exit(0)
"""


@pytest.mark.timeout(120)
def test_every_process_hears_what_ended_the_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAILS)
    process = launched(script, tmp_path / "out", "--standalone", "--nproc-per-node", "2")
    output, _ = process.communicate(timeout=100)
    for rank in (0, 1):
        assert f"rank {rank} CallbackError True" in output, output


@pytest.mark.timeout(300)
def test_two_nodes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    meeting = meeting_place()
    agents = [launched(script, tmp_path / "out", "--nnodes", "2", *meeting) for _ in range(2)]
    for agent in agents:
        check(agent)
    assert_like_one_process(tmp_path, script, 2)


RESTARTED = """
import os, signal, sys, threading, time, torch, autobd
from pathlib import Path
from torch import nn

out, rank, attempt = sys.argv[1], int(os.environ.get("RANK", 0)), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
runs = Path(out + "-runs")

def die():
    while not list(runs.glob("step-*")):
        time.sleep(0.01)
    if "DIES" in os.environ:  # the whole node
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

class Slow(autobd.Callback):
    def on_step(self, run):
        time.sleep(0.05)

def net(width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6)) for _ in "1234"))

torch.manual_seed(7)
data = torch.randn(40, 6)
if os.environ.get("DIES") or ("RANK" in os.environ and "DIES" not in os.environ and attempt == 0 and rank == 1):
    threading.Thread(target=die, daemon=True).start()
student = net(4, 1)
result = autobd.distill(net(16, 0), student, data, batch_size=4, epochs=4, threads=1, timeout=60, progress=False,
                        strategy="tr+dpu", profile="analytic", callbacks=[Slow()],
                        checkpoint=autobd.Checkpoint(runs, 5) if "RANK" in os.environ else None,
                        resume="auto" if "RANK" in os.environ else None)
torch.save({"attempt": attempt, "losses": result.history.losses, **student.state_dict()}, out + str(rank))
"""


@pytest.mark.timeout(300)
def test_a_worker_that_is_killed_restarts_the_group_and_training_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    check(launched(script, tmp_path / "out", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"))
    subprocess.run([sys.executable, str(script), str(tmp_path / "alone")], check=True, timeout=100)
    expected = torch.load(tmp_path / "alone0")
    for rank in range(2):
        found = torch.load(tmp_path / f"out{rank}")
        assert found.pop("attempt") == 1
        assert found.pop("losses") == expected["losses"]
        for key, value in found.items():
            assert torch.equal(value, expected[key]), (rank, key)


@pytest.mark.timeout(300)
def test_when_a_node_dies_training_goes_on_with_those_that_are_left(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTED)
    meeting = "--nnodes", "1:2", "--max-restarts", "2", *meeting_place()
    waits = "last_call_timeout=3,keep_alive_interval=1"
    stays = launched(script, tmp_path / "out", *meeting, "--rdzv-conf", f"is_host=1,{waits}", DIES="")
    dies = launched(script, tmp_path / "out", *meeting, "--rdzv-conf", f"is_host=0,{waits}", DIES="yes")
    check(stays)
    assert dies.wait(10) == -signal.SIGKILL
    subprocess.run([sys.executable, str(script), str(tmp_path / "alone")], check=True, timeout=100)
    expected, found = torch.load(tmp_path / "alone0"), torch.load(tmp_path / "out0")
    assert not (tmp_path / "out1").exists()
    assert found.pop("losses") == expected["losses"]
    assert found.pop("attempt") == 1
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key
