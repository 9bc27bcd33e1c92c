"""A training that was ended by anything goes on where it was, and ends as if nothing had happened."""

import copy
import os
import re
import shutil
import signal
import time
from itertools import islice
from pathlib import Path

import numpy
import pytest
import torch
from opened import open_ranks
from plain import assert_equal_state
from small_training import CUTS, EPOCHS, STEPS, Shaken, assert_same_run, distilled, net, started
from torch import nn

import autobd
from autobd import Checkpoint, Finish, Recipe
from autobd.checkpoints import saved
from autobd.errors import CallbackError, CheckpointError, InputError


class Dies(autobd.Callback):
    def __init__(self, step, stage="assembled"):
        self.step, self.stage = step, stage

    def on_step(self, run):
        time.sleep(0.03)  # for what is written meanwhile
        if run.stage == self.stage and run.step == self.step:
            raise RuntimeError("the power is gone")


@pytest.fixture(scope="module")
def whole():
    """The training that nothing has ended."""
    return distilled()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("first", "then", "every", "dies"),
    [(1, 1, "1 epoch", 7), (1, 2, 3, 14), (2, 1, "1 epoch", 12), (3, 2, "2 steps", 8), (2, 3, 4, 11)],
)  # fmt: skip
def test_it_goes_on_on_any_number_of_ranks_and_ends_the_same(tmp_path, whole, first, then, every, dies):
    checkpoint = Checkpoint(tmp_path / "run", every)
    assert distilled(devices=first, checkpoint=checkpoint, callbacks=[Dies(dies)])[1] is None
    found = saved(tmp_path / "run")
    assert found
    assert 0 < found[-1].step < STEPS * EPOCHS
    assert_same_run(distilled(devices=then, checkpoint=checkpoint, resume="auto"), whole)
    assert len(saved(tmp_path / "run")) <= 3
    assert not list((tmp_path / "run").glob(".*"))


@pytest.mark.timeout(120)
def test_it_may_be_ended_again_and_again(tmp_path, whole):
    for dies in (4, 6, 9, 13):
        checkpoint = Checkpoint(tmp_path, 1, keep=1)
        distilled(checkpoint=checkpoint, resume="auto", callbacks=[Dies(dies)], devices=1 + dies % 2)
    assert_same_run(distilled(checkpoint=tmp_path, resume="auto"), whole)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("dies", [2, 6])
def test_training_end_to_end_goes_on_too(tmp_path, dies):
    options = {"finish": Finish(2, "kd"), "validate": list(islice(Shaken().images.split(8), 2)), "recalibrate": 2}
    options["validate"] = [(x, torch.zeros(len(x)).long()) for x in options["validate"]]
    expected = distilled(**options)
    checkpoint = Checkpoint(tmp_path, "2 steps")
    assert distilled(checkpoint=checkpoint, callbacks=[Dies(dies, "finished")], **options)[1] is None
    found = distilled(checkpoint=checkpoint, resume="auto", **options)
    assert_same_run(found, expected)
    again = distilled(checkpoint=checkpoint, resume="auto", **options)  # nothing is left to do
    assert_same_run(again, expected)
    with pytest.raises(CheckpointError, match="while the whole student was trained"):
        distilled(checkpoint=checkpoint, resume="auto", **{**options, "finish": None})


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(logits=True, epochs=EPOCHS, accumulate=2),
        Recipe(logits=True, epochs=EPOCHS, block_input="teacher"),
        Recipe(logits=True, epochs=EPOCHS, keep_best=True, patience=1, lr=0.3),
        Recipe(logits=True, epochs=EPOCHS, optimizer=torch.optim.RMSprop, precision="bf16"),
    ],
)  # fmt: skip
def test_whatever_the_recipe_is(tmp_path, recipe):
    expected = distilled(recipe=recipe)
    checkpoint = Checkpoint(tmp_path, 1)
    distilled(recipe=recipe, checkpoint=checkpoint, callbacks=[Dies(11)], devices=2)
    assert saved(checkpoint.path)[-1].step % STEPS % recipe.accumulate == 0
    found = distilled(recipe=recipe, checkpoint=checkpoint, resume="auto")
    assert_equal_state(found[0], expected[0])
    assert found[1].history.losses == expected[1].history.losses


@pytest.mark.timeout(120)
def test_replicas_go_on_within_rounding(tmp_path):
    """In double precision and without norms and dropout, which are local to a rank's rows."""

    def run(**options):
        torch.manual_seed(1)
        layers = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Flatten()
        student = nn.Sequential(*layers).double()
        torch.manual_seed(0)
        teacher = copy.deepcopy(student)
        for p in teacher.parameters():
            nn.init.normal_(p)
        data = [x.double() for x in Shaken().images.split(8)]
        options = {"devices": 2, "strategy": "ir", "threads": 1, "progress": False, **options}
        options["devices"] = open_ranks(options["devices"])
        try:
            autobd.distill(teacher, student, data, cuts=CUTS, recipe=Recipe(logits=False, epochs=3), **options)
        except CallbackError:
            return None
        return student

    expected = run()
    checkpoint = Checkpoint(tmp_path, 2)
    assert run(checkpoint=checkpoint, callbacks=[Dies(8)]) is None
    found = run(checkpoint=checkpoint, resume="auto", devices=3, strategy="dp")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=1e-10)


@pytest.mark.timeout(120)
def test_candidates_go_on_too(tmp_path):
    def run(**options):
        torch.manual_seed(3)
        other = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))
        budget = autobd.Budget(parameters=1400)
        return *distilled(candidates={"1": [other]}, budget=budget, finish=1, **options), other

    expected = run()
    assert expected[1].candidates.chosen == [(1, 1)]
    for dies, devices in ((Dies(7), 2), (Dies(3, "finished"), 1)):  # end to end, replicas have norms of their own
        checkpoint = Checkpoint(tmp_path / dies.stage, 2)
        assert run(checkpoint=checkpoint, callbacks=[dies], devices=devices)[1] is None
        found = run(checkpoint=checkpoint, resume="auto")
        assert_same_run(found[:2], expected[:2])
        assert found[1].candidates.chosen == [(1, 1)]
        assert found[0][1] is found[2]


def once_only():
    return iter([(x, torch.zeros(len(x)).long()) for x in Shaken().images.split(4)])


@pytest.mark.timeout(120)
def test_data_that_is_read_once_goes_on_too(tmp_path):
    recipe = Recipe(logits=True, epochs=1, optimizer=torch.optim.SGD, lr=1e-2)
    expected = distilled(recipe=recipe, data=once_only())
    checkpoint = Checkpoint(tmp_path, 2)
    assert distilled(recipe=recipe, data=once_only(), checkpoint=checkpoint, callbacks=[Dies(7)])[1] is None
    with pytest.raises(CheckpointError, match="further on in the data than this data goes"):
        distilled(recipe=recipe, data=islice(once_only(), 2), checkpoint=checkpoint, resume="auto")
    assert_same_run(distilled(recipe=recipe, data=once_only(), checkpoint=checkpoint, resume="auto"), expected)


def test_another_generator_of_numpys_is_no_hindrance():
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        assert distilled()[1] is not None
    finally:
        numpy.random.set_bit_generator(before)


# -------------------------------------------------------------------- what is refused

OTHERS = [
    ({"recipe": Recipe(logits=True, epochs=EPOCHS, lr=1e-2)}, r"Recipe\.lr: "),
    (
        {"recipe": Recipe(logits=True, epochs=EPOCHS + 1)},
        rf"Recipe\.epochs: {EPOCHS} in the checkpoint, {EPOCHS + 1} now",
    ),
    ({"student": net(7, 1)}, "the student: Sequential with"),
    ({"cuts": CUTS[:2]}, "the blocks: "),
    ({"seed": 5}, "the seed: 0 in the checkpoint, 5 now"),
    (
        {"data": [(torch.randn(8, 3, 6, 6), torch.zeros(8).long())] * 9},
        "the number of batches: 5 in the checkpoint, 9 now",
    ),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    directory = tmp_path_factory.mktemp("begun")
    distilled(recipe=Recipe(logits=True, epochs=EPOCHS), checkpoint=Checkpoint(directory, 3), callbacks=[Dies(8)])
    return directory


@pytest.mark.parametrize("other", range(len(OTHERS)))
def test_another_training_is_refused_with_the_difference(begun, other):
    options, text = OTHERS[other]
    options = {"recipe": Recipe(logits=True, epochs=EPOCHS), **options}
    with pytest.raises(CheckpointError, match="is of another training") as error:
        distilled(checkpoint=begun, resume="auto", **options)
    assert re.search(text, str(error.value)), str(error.value)
    assert str(error.value).count("in the checkpoint") == (2 if "cuts" in options else 1)


def test_a_directory_that_is_in_use_is_not_written_to(begun):
    with pytest.raises(InputError, match="has checkpoints of an earlier training"):
        distilled(checkpoint=begun)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"checkpoint": 3}, "checkpoint= is no checkpoint"),
        ({"checkpoint": f"{__file__}/run"}, "Checkpoints cannot be written there"),
        ({"resume": "auto"}, "looks where checkpoints are written"),
        ({"resume": "/nowhere"}, "There is no checkpoint"),
        ({"resume": 7}, "resume= is no place"),
    ],
)
def test_what_says_nothing_is_refused(options, text):
    with pytest.raises(autobd.AutobdError, match=text):
        distilled(**options)


@pytest.mark.parametrize("every", ["1 day", "0 steps", "", 0, True, "epoch"])
def test_a_time_is_a_number_of_epochs_steps_or_minutes(every):
    with pytest.raises(InputError, match=r"Checkpoint\.every says no time"):
        Checkpoint("run", every)


def test_a_damaged_one_is_refused_and_the_one_before_can_be_taken(begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    newest, before = saved(tmp_path / "run")[-1], saved(tmp_path / "run")[-2]
    file = newest.path / "block-2.safetensors"
    file.write_bytes(file.read_bytes()[:-9] + b"123456789")
    recipe = Recipe(logits=True, epochs=EPOCHS)
    with pytest.raises(CheckpointError, match=r"block-2\.safetensors: other contents"):
        distilled(recipe=recipe, checkpoint=tmp_path / "run", resume="auto")
    with pytest.raises(InputError, match="has later checkpoints than the one to go on from"):
        distilled(recipe=recipe, checkpoint=tmp_path / "run", resume=str(before.path))
    found = distilled(recipe=recipe, resume=str(before.path))
    assert_same_run(found, distilled(recipe=recipe))


# -------------------------------------------------------------------- signals and disks


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "devices"), [("SIGTERM", 2), ("SIGUSR1", 1), ("SIGINT", 2)])
def test_a_signal_saves_within_the_step_and_ends_in_order(tmp_path, whole, number, devices):
    process = started(tmp_path, devices)
    while process.stdout.readline() != "3\n":
        assert process.poll() is None, process.stderr.read()
    if devices > 1 and number == "SIGTERM":  # a scheduler tells every process
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
    process.send_signal(getattr(signal, number))
    output, errors = process.communicate(timeout=60)
    assert "done" not in output
    assert f"{number}: saved in {tmp_path}" in errors
    assert (process.returncode == 0) == (number != "SIGINT"), errors
    step = saved(tmp_path)[-1].step
    assert 3 <= step <= 9
    assert_same_run(distilled(checkpoint=tmp_path, resume="auto"), whole)


@pytest.mark.timeout(120)
def test_a_signal_at_the_end_of_a_stage_is_not_lost(tmp_path):
    class Asks(autobd.Callback):
        def on_epoch(self, run):
            if run.epoch == EPOCHS:
                signal.raise_signal(signal.SIGTERM)

    expected = distilled(finish=1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        distilled(finish=1, checkpoint=tmp_path, callbacks=[Asks()])
    assert ended.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert saved(tmp_path)[-1].step == STEPS * EPOCHS
    found = distilled(finish=1, checkpoint=tmp_path, resume="auto")
    assert_same_run(found, expected)
    assert any(note.startswith(f"went on from {tmp_path}") for note in found[1].notes)


@pytest.mark.timeout(120)
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    process = started(tmp_path, sleep=5)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert time.monotonic() - began < 4
    assert process.returncode != 0


@pytest.mark.timeout(120)
def test_a_full_disk_is_a_warning_and_training_goes_on(tmp_path, whole):
    """The largest file that the process may write is smaller than a block."""
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))"
    process = started(tmp_path / "run", every="2 steps", sleep=0, before=limit)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert output.endswith("done\n")
    assert "could not be written, training goes on" in errors
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.timeout(60)
def test_a_directory_that_disappears_is_a_warning_and_training_goes_on(tmp_path, whole):
    class Moves(autobd.Callback):
        def on_step(self, run):
            time.sleep(0.03)
            if run.step == 4:
                (tmp_path / "run").rename(tmp_path / "elsewhere")
                (tmp_path / "run").write_text("no directory")

    with pytest.warns(UserWarning, match="could not be written, training goes on"):
        found = distilled(checkpoint=Checkpoint(tmp_path / "run", 1), callbacks=[Moves()])
    assert_same_run(found, whole)
    before = saved(tmp_path / "elsewhere")[-1]
    assert 1 <= before.step <= 4
    assert_same_run(distilled(resume=str(before.path)), whole)


@pytest.mark.timeout(60)
def test_the_clock_may_be_set_while_it_runs(tmp_path, whole, monkeypatch):
    now, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + shift[0])

    class Sets(autobd.Callback):
        def on_step(self, run):
            time.sleep(0.03)
            shift[0] = {4: -1e9, 8: 1e9}.get(run.step, shift[0])

    found = distilled(devices=2, checkpoint=Checkpoint(tmp_path / "minutes", "1 minute"), callbacks=[Sets()])
    assert_same_run(found, whole)
    assert [s.step for s in saved(tmp_path / "minutes")] == [STEPS * EPOCHS]  # that of the end
    found = distilled(devices=2, checkpoint=Checkpoint(tmp_path / "steps", 1), callbacks=[Sets()])
    assert_same_run(found, whole)
    assert saved(tmp_path / "steps")[-1].step == STEPS * EPOCHS
