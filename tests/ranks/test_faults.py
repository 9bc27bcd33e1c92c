"""A rank that fails, dies or stalls: one error in time that names it, no process left, the student as it was."""

import importlib.util
import os
import random
import re
import signal
import sys
import threading
import time

import pytest
import torch
from networks import mlp
from plain import assert_equal_state, chained, plain_loop
from processes import children, workers

import autobd
from autobd.errors import AutobdError, InputError, NonFiniteError, RankError

pytestmark = pytest.mark.usefixtures("nothing_open")  # it looks at the processes that there are
NAMES = "012"
CUTS = [(n, n) for n in NAMES[:-1]]
STEPS = 6  # of an epoch
IN_TIME = 10.0


def models():
    return mlp(16).double(), mlp(4, seed=1).double()


def batches(count=STEPS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(count)]


def states(epochs):
    """The student at the start and after each epoch, from a plain loop."""
    found = []
    for epoch in range(epochs + 1):
        teacher, student = models()
        plain_loop(teacher, student, chained(*NAMES), batches() * epoch)
        found.append(student)
    return found


class Loader:
    """Batches that come slowly; `at(step)` is called before each."""

    def __init__(self, at):
        self.at, self.step = at, 0

    def __len__(self):
        return STEPS

    def __iter__(self):
        for batch in batches():
            self.at(self.step)
            time.sleep(0.02)
            yield batch
            self.step += 1


class Loss:
    """One value per row; calls `trouble()` instead at its call number `at`. To be used for one block."""

    def __init__(self, trouble, at):
        self.trouble, self.left = trouble, at

    def __call__(self, student, teacher):
        self.left -= 1
        if self.left == -1:
            self.trouble()
        return (student - teacher).square().flatten(1).mean(1)


def fails(data, devices=2, expected=RankError, student=None, **options):
    """The error of a run that has to fail, and how it leaves things: no child, the student as given."""
    before = children()
    teacher, given = models()
    student = given if student is None else student
    kept = models()[1]
    options = {"strategy": "tr+dpu", "threads": 1, "epochs": 3, "progress": False, "cuts": CUTS, **options}
    options["profile"] = "analytic"  # to measure the blocks calls their losses, too
    with pytest.raises(expected) as caught:
        autobd.distill(teacher, student, data, devices=devices, **options)
    assert children() == before
    assert_equal_state(student, kept)
    return caught.value


def with_loss(block, trouble, at):
    return autobd.Recipe(block_input="teacher", logits=False, loss={block: Loss(trouble, at)})


def throw(error):
    raise error


@pytest.fixture(scope="module")
def epochs():
    return states(3)


KILLS = range(20)


@pytest.mark.parametrize("number", KILLS)
@pytest.mark.timeout(60)
def test_a_killed_rank_is_named_and_the_student_is_as_at_the_last_epoch(number, epochs):
    dice = random.Random(number)
    size = dice.choice([2, 3])
    victim = dice.randrange(1, size)
    strategy = dice.choice(["tr+dpu", "tr+dpu", "tr", "ls", "dp", "ir", "ahd"])
    at_start = number % 4 == 0
    step, delay = dice.randrange(3 * STEPS - 2), dice.choice([0.0, dice.uniform(0, 0.03)])
    start_delay, killed = dice.uniform(0, 2.5), []

    def kill():
        os.kill(workers()[victim - 1], signal.SIGKILL)
        killed.append(time.monotonic())

    def when_started():
        while len(workers()) < size - 1:
            time.sleep(0.01)
        time.sleep(start_delay)
        kill()

    def at(now):
        if now == step and not at_start:
            threading.Timer(delay, kill).start() if delay else kill()

    before, (teacher, student) = children(), models()
    loader = Loader(at)
    if at_start:
        threading.Thread(target=when_started).start()
    with pytest.raises(RankError) as caught:
        autobd.distill(
            teacher, student, loader, cuts=CUTS, devices=size, strategy=strategy, threads=1, epochs=3, progress=False,
            recipe=autobd.Recipe(block_input="teacher", logits=False),
            profile="analytic",  # a measured one may leave ranks idle
        )  # fmt: skip
    assert time.monotonic() - killed[0] < IN_TIME
    assert f"Rank {victim} " in str(caught.value)
    assert "killed by SIGKILL" in str(caught.value)
    assert children() == before
    exact = loader.step < STEPS or strategy in ("tr+dpu", "tr", "ls")
    # all batches of an epoch may have been read without its end being reached
    done = {loader.step // STEPS, max(loader.step - 1, 0) // STEPS}
    assert any(same_state(student, epochs[e], 0 if exact or not e else 1e-10) for e in done)


def same_state(a, b, close):
    """Equal, or to within `close` where gradients of shares are summed in another order."""
    pairs = zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    return all(torch.allclose(x, y, rtol=0, atol=close) for x, y in pairs)


class Custom(AutobdError):
    """An error of the user's own in the family, which takes other arguments."""

    def __init__(self, number):
        super().__init__(f"custom {number}")


TROUBLES = {
    "an error": (lambda: throw(ValueError("on purpose")), RankError, "ValueError: on purpose"),
    "one of ours": (lambda: throw(NonFiniteError("on purpose")), NonFiniteError, "on purpose"),
    "one of the user's": (lambda: throw(Custom(7)), AutobdError, "custom 7"),
    "out of memory": (lambda: throw(MemoryError("no more")), RankError, "MemoryError: no more"),
    "a runtime error": (lambda: throw(RuntimeError("CUDA out of memory")), RankError, "CUDA out of memory"),
    "Ctrl-C": (lambda: throw(KeyboardInterrupt()), RankError, "KeyboardInterrupt"),
    "leaving": (lambda: sys.exit(3), RankError, "SystemExit: 3"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.timeout(60)
def test_a_rank_that_raises_is_named_with_block_step_and_its_traceback(trouble):
    raises, kind, text = TROUBLES[trouble]
    began = time.monotonic()
    error = fails(batches(), expected=kind, recipe=with_loss(2, raises, 4))
    assert time.monotonic() - began < 20
    assert text in str(error)
    if kind is RankError:
        assert re.search(r"[Rr]ank 1\b.*blocks? .*2", str(error))
    if kind is RankError and trouble not in ("Ctrl-C", "leaving"):
        assert re.search(r"Rank 1, block 2 \(.*\), step 4", str(error))
    assert "rank 1:" in str(error.__cause__)
    assert "in throw" in str(error.__cause__) or trouble == "leaving"
    assert "test_faults.py" in str(error.__cause__)


@pytest.mark.timeout(60)
def test_a_rank_that_leaves_without_a_word_is_named():
    error = fails(batches(), devices=3, recipe=with_loss(2, lambda: os._exit(3), 2))
    assert re.search(r"Rank 2 \(blocks 2; rank 0 is at step \d\) ended with status 3", str(error))


@pytest.mark.timeout(60)
def test_a_custom_loss_that_is_not_finite_names_rank_block_and_step():
    loss = {2: lambda s, t: (s - t).square().flatten(1).mean(1) * float("inf")}
    error = fails(
        batches(), expected=NonFiniteError, recipe=autobd.Recipe(block_input="teacher", logits=False, loss=loss)
    )
    assert re.search(r"Rank 1, block 2 \(.*\), step 0", str(error))


@pytest.mark.timeout(60)
def test_an_error_of_the_callers_own_rank_is_passed_on_and_the_others_end():
    error = fails(Loader(lambda step: throw(ValueError("no such file")) if step == 3 else None), expected=ValueError)
    assert str(error) == "no such file"
    error = fails(batches(), recipe=with_loss(0, lambda: throw(ValueError("on purpose")), 4))
    assert re.search(r"Rank 0, block 0 \(.*\), step 4: ValueError: on purpose", str(error))
    assert isinstance(error.__cause__, ValueError)


@pytest.mark.timeout(60)
def test_a_stalled_rank_is_named_by_edge():
    began = time.monotonic()
    error = fails(batches(), timeout=3, recipe=with_loss(2, lambda: time.sleep(30), 2))
    assert time.monotonic() - began < 25
    assert re.search(r"Rank 0 has waited 3 s for rank 1 to .* \(.*\), step \d", str(error))


@pytest.mark.timeout(60)
def test_a_stopped_process_is_named_by_edge():
    def at(step):
        if step == 2:
            os.kill(workers()[0], signal.SIGSTOP)

    error = fails(Loader(at), timeout=3)
    assert re.search(r"Rank 0 has waited 3 s for rank 1 to .* \(.*\), step \d", str(error))


@pytest.mark.timeout(60)
def test_a_stalled_loader_ends_the_others_and_is_named_by_edge():
    began = time.monotonic()
    error = fails(Loader(lambda step: time.sleep(1000) if step == 2 else None), timeout=3)
    assert time.monotonic() - began < 30
    named = r"rank 0 for the loader's next batch, step 2|Rank 1 has waited 3 s for rank 0 to send \(.*\), step 2"
    assert re.search(named, str(error))


@pytest.mark.timeout(60)
def test_a_model_that_cannot_be_sent_is_refused_by_the_name_of_its_part():
    class Locked(type(torch.nn.ReLU())):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

        def __deepcopy__(self, memory):
            return Locked()

    student = models()[1]
    student[2][1] = Locked()
    error = fails(batches(), expected=InputError, student=student)
    assert re.search(r"rank 1 \(blocks .*2; .*\) cannot be sent", str(error))
    assert re.search(r"2\.1\.lock: TypeError", str(error))


@pytest.mark.timeout(60)
def test_a_model_that_the_other_process_cannot_import_is_a_clear_error(tmp_path):
    (tmp_path / "vanishing.py").write_text("from torch import nn\nclass Own(nn.ReLU):\n    pass\n")
    spec = importlib.util.spec_from_file_location("vanishing", tmp_path / "vanishing.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["vanishing"] = module
    spec.loader.exec_module(module)
    student = models()[1]
    student[2][1] = module.Own()
    try:
        error = fails(batches(), student=student)
    finally:
        del sys.modules["vanishing"]
    assert re.search(r"Rank 1 \(blocks .*2; .*\) failed: ModuleNotFoundError: No module named 'vanishing'", str(error))


@pytest.mark.timeout(60)
def test_a_group_that_has_failed_says_so_and_a_good_one_runs_again():
    with autobd.ranks.open(autobd.cluster.Cluster(("cpu", "cpu")), threads=1) as group:
        for _ in range(2):
            teacher, student = models()
            autobd.distill(teacher, student, batches(), cuts=CUTS, devices=group, strategy="tr+dpu", progress=False,
                           recipe=autobd.Recipe(block_input="teacher", logits=False))  # fmt: skip
            assert_equal_state(student, states(1)[1])
        teacher, student = models()
        recipe = with_loss(2, lambda: throw(ValueError("on purpose")), 1)
        for message in ("ValueError: on purpose", "This group of ranks has failed before"):
            with pytest.raises(RankError, match=message):
                autobd.distill(teacher, student, batches(), cuts=CUTS, devices=group, progress=False, recipe=recipe,
                               strategy="tr+dpu", profile="analytic")  # fmt: skip
