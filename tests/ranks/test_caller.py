"""`distill(devices=2)` from wherever a user calls it, and whatever happens to the process that called."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed
from networks import mlp
from plain import assert_equal_state, chained, plain_loop
from processes import alive, children, gone, listening, workers

import autobd
from autobd.ranks.local import _MAIN as MAIN
from autobd.specs import load_model

pytestmark = pytest.mark.usefixtures("nothing_open")  # it looks at the processes that there are
TESTS = Path(__file__).parents[1]

# Everything that a script may define itself, and the same training in plain PyTorch beside it.
SCRIPT = textwrap.dedent(
    """
    import copy
    import torch
    from torch import nn
    import autobd
    from plain import assert_equal_state, chained, plain_loop

    torch.set_num_threads(1)

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.a, self.b, self.act = nn.Linear(6, width), nn.Linear(width, 6), lambda x: x.clamp(min=0)

        def forward(self, x):
            return twice(self.b(self.act(self.a(x))))

    def twice(x):
        return 2 * x

    def net(width):
        torch.manual_seed(width)
        return nn.Sequential(Block(width), Block(width), Block(width))

    rows = [(torch.randn(6, generator=torch.Generator().manual_seed(i)), i) for i in range(10)]
    loader = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=lambda b: torch.stack([x for x, _ in b]))
    teacher, student = net(16), net(4)
    expected = copy.deepcopy(student)
    plain_loop(teacher, expected, chained(*"012"), list(loader) * 2)
    loss = lambda s, t: (s - t).square().flatten(1).mean(1) / t.square().mean()
    recipe = autobd.Recipe(block_input="teacher", logits=False)
    autobd.distill(teacher, student, loader, cuts=[("0", "0"), ("1", "1")], devices=DEVICES, strategy="tr+dpu",
                   threads=1, epochs=2, recipe=recipe, progress=False)
    assert_equal_state(student, expected)
    print("equal")
    """
).replace("DEVICES", "2")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}


def run(arguments, text=None, **options):
    return subprocess.run(
        [sys.executable, *arguments], input=text, capture_output=True, text=True, timeout=80, env=environment(),
        **options,
    )  # fmt: skip


WAYS = {
    "script": lambda d: (["script.py"], None),
    "standard input": lambda d: (["-"], SCRIPT),
    "-c": lambda d: (["-c", SCRIPT], None),
    "interpreter": lambda d: (["shell.py"], None),
    "cell": lambda d: (["cell.py"], None),
}
SHELL = """
import code
shell = code.InteractiveInterpreter({"__name__": "__main__"})
shell.runcode(compile(open("script.py").read(), "<input>", "exec"))
"""
CELL = """
import sys, types
main = sys.modules["__main__"] = types.ModuleType("__main__")  # as IPython has it: a module without a file
exec(compile(open("script.py").read(), "<cell>", "exec"), main.__dict__)
"""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(100)
def test_works_without_a_main_guard_with_what_main_defines(way, tmp_path):
    for name, text in (("script", SCRIPT), ("shell", SHELL), ("cell", CELL)):
        (tmp_path / f"{name}.py").write_text(text)
    result = run(*WAYS[way](tmp_path), cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "equal\n", result.stderr
    assert not result.stderr


@pytest.mark.timeout(100)
def test_two_jobs_run_side_by_side(tmp_path):
    jobs = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    assert [job.communicate(timeout=90)[0] for job in jobs] == ["equal\n"] * 2


@pytest.mark.timeout(100)
def test_a_model_of_a_file_that_cannot_be_imported(tmp_path):
    (tmp_path / "own.py").write_text(
        textwrap.dedent(
            """
            from torch import nn
            class Block(nn.Module):
                def __init__(self, width):
                    super().__init__()
                    self.a, self.b = nn.Linear(6, width), nn.Linear(width, 6)
                def forward(self, x):
                    return self.b(act(self.a(x)))
            def act(x):
                return x.relu()
            def net(width):
                return nn.Sequential(Block(width), Block(width), Block(width))
            """
        )
    )
    torch.manual_seed(0)
    teacher, student = (load_model(f"{tmp_path}/own.py:net,width={w}") for w in (16, 4))
    equal_to_plain_loop(teacher, student)


def equal_to_plain_loop(teacher, student, seed=3):
    """Train on two ranks and on none."""
    expected = copy.deepcopy(student)
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(4, 6, generator=generator) for _ in range(4)]
    plain_loop(teacher, expected, chained(*"012"), batches)
    result = autobd.distill(
        teacher, student, batches, cuts=[("0", "0"), ("1", "1")], devices=2, strategy="tr+dpu", threads=1,
        recipe=autobd.Recipe(block_input="teacher", logits=False), progress=False,
    )  # fmt: skip
    assert_equal_state(student, expected)
    return result


def own_threads():
    """Threads of this process: the fewest seen within half a second, as one that was joined may not be gone yet."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.05)
    return min(counts)


def open_files():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(100)
def test_the_callers_process_is_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before, counts = children(), []
    random_state, threads = torch.get_rng_state(), torch.get_num_threads()
    for _ in range(5):
        equal_to_plain_loop(mlp(16), mlp(4, seed=1))
        torch.set_rng_state(random_state)
        counts.append((own_threads(), threading.active_count(), open_files()))
        assert children() == before
        assert not list(tmp_path.glob("autobd-*"))
        assert torch.get_num_threads() == threads
        assert not torch.distributed.is_initialized()
    assert counts[1:] == [counts[1]] * 4, counts


@pytest.mark.timeout(60)
def test_randomness_of_the_caller_is_left_alone():
    teacher, student = mlp(16), mlp(4, seed=1)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    autobd.distill(teacher, student, [torch.ones(4, 6)] * 2, devices=2, threads=1, progress=False)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.timeout(60)
def test_nothing_listens_beyond_this_host():
    seen = []

    def batches():
        for _ in range(3):
            yield torch.randn(4, 6)
            seen.extend(a for pid in (os.getpid(), *workers()) for a in listening(pid))

    before = listening(os.getpid())
    autobd.distill(mlp(16), mlp(4, seed=1), batches(), devices=2, strategy="tr+dpu", threads=1, progress=False)
    assert len(seen) >= 2
    assert set(seen) - before <= {"0100007F"}  # 127.0.0.1


# A long training that says when it is under way, with what it had at the last epoch's end.
LONG = """
import hashlib, os, signal, sys, time
import torch
import autobd
from networks import mlp

torch.set_num_threads(1)
KEEP

def digest(model):
    return hashlib.sha1(b"".join(v.numpy().tobytes() for v in model.state_dict().values())).hexdigest()

class Loader:
    epoch = 0
    def __len__(self):
        return 5
    def __iter__(self):
        print("epoch", self.epoch, digest(student), flush=True)
        self.epoch += 1
        for _ in range(5):
            time.sleep(0.02)
            yield torch.randn(4, 6)

teacher, student = mlp(16), mlp(4, seed=1)
try:
    autobd.distill(teacher, student, DATA, devices=3, strategy="tr+dpu", threads=1, epochs=1000, progress=False,
                   cuts=[("0", "0"), ("1", "1")])
except KeyboardInterrupt:
    print("interrupted", digest(student), flush=True)
    raise
"""


def hears_signals():
    """Where the tests run in the background or under nohup, these are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def begun(text, tmp_path, epoch=3):
    """A long run that has reached an epoch, with the processes that belong to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**environment(), "TMPDIR": str(tmp_path)}, preexec_fn=hears_signals,
    )  # fmt: skip
    assert process.stdout is not None
    lines = []
    while not lines or not lines[-1].startswith(f"epoch {epoch}"):
        lines.append(process.stdout.readline())
        assert lines[-1], process.stderr.read()
    return process, children(process.pid), lines[-1]


WITH_WORKERS = """
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return torch.randn(6)

class Watched(torch.utils.data.DataLoader):
    epoch = 0
    def __iter__(self):
        print("epoch", Watched.epoch, flush=True)
        Watched.epoch += 1
        return super().__iter__()
"""


@pytest.mark.parametrize(
    ("sent", "loader"),
    [
        (signal.SIGKILL, "plain"),
        (signal.SIGTERM, "plain"),
        (signal.SIGHUP, "plain"),
        (signal.SIGKILL, "with processes"),
        (signal.SIGTERM, "with processes"),
    ],
)
@pytest.mark.timeout(60)
def test_no_orphan_when_the_caller_dies(sent, loader, tmp_path):
    text = LONG.replace("KEEP", "").replace("DATA", "Loader()")
    if loader == "with processes":
        watched = "Watched(Rows(), batch_size=4, num_workers=1, persistent_workers=True)"
        text = LONG.replace("KEEP", WITH_WORKERS).replace("DATA", watched)
    process, own, _ = begun(text, tmp_path)
    assert len(own) == 2 + (loader != "plain")
    process.send_signal(sent)
    process.wait(5)
    assert gone(own, 10)
    end = time.monotonic() + 2
    while list(tmp_path.glob("autobd-*")) and time.monotonic() < end:
        time.sleep(0.05)
    assert not list(tmp_path.glob("autobd-*"))


@pytest.mark.timeout(60)
def test_ctrl_c_interrupts_and_the_student_is_as_at_the_last_epoch(tmp_path):
    process, own, line = begun(LONG.replace("KEEP", "").replace("DATA", "Loader()"), tmp_path)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    lines = [line, *output.splitlines()]
    assert process.returncode in (130, -signal.SIGINT)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert lines[-1].startswith("interrupted ")
    assert lines[-2].split()[-1] == lines[-1].split()[-1]
    assert gone(own, 1)
    assert not list(tmp_path.glob("autobd-*"))


@pytest.mark.parametrize("delay", [0.0, 2.0])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.timeout(60)
def test_no_orphan_when_the_caller_is_ended_at_the_start(sent, delay, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", LONG.replace("KEEP", "").replace("DATA", "Loader()")], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env={**environment(), "TMPDIR": str(tmp_path)}, preexec_fn=hears_signals,
    )  # fmt: skip
    while not (own := children(process.pid)):
        time.sleep(0.01)
        assert alive(process.pid)
    time.sleep(delay)
    own |= children(process.pid)
    process.send_signal(sent)
    process.wait(10)
    assert gone(own, 10)


@pytest.mark.timeout(60)
def test_a_rank_whose_meeting_place_is_gone_ends(tmp_path):
    settings = {
        "rank": 1, "devices": ("cpu", "cpu"), "directory": str(tmp_path / "gone"), "caller": os.getpid(),
        "threads": 1, "timeout": 300.0, "path": sys.path,
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-c", MAIN], stdin=subprocess.PIPE, env=environment())
    process.stdin.write(pickle.dumps(settings))
    process.stdin.flush()
    assert process.wait(30) != 0
