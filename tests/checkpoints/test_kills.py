"""Whichever process is killed, and whenever: what is there goes on, and ends as if nothing had happened."""

import os
import random
import signal
import time

import pytest
from processes import gone, workers
from small_training import EPOCHS, STEPS, assert_same_run, distilled, started

KILLS = 50


@pytest.fixture(scope="module")
def whole():
    """The training that nothing has ended."""
    return distilled()


def in_a_save(directory, process):
    """Wait until a checkpoint is being written, or the process has ended."""
    while process.poll() is None and not any(p.name.startswith(".step-") for p in directory.glob(".*")):
        pass


def killed(directory, generator):
    """Kill one process of a training, at any time; None if it was done before that, else what was killed when and how
    many seconds it took until all of them were gone."""
    devices, when = generator.choice([1, 2, 3]), generator.choice(["start", "step", "step", "save"])
    process = started(directory, devices, every=1, sleep=0.02)
    if when == "start":
        time.sleep(generator.uniform(0, 5))
    else:
        for _ in range(generator.randrange(1, STEPS * EPOCHS)):
            process.stdout.readline()
        if when == "step":
            time.sleep(generator.uniform(0, 0.04))
        else:
            in_a_save(directory, process)
    ranks = [process.pid, *workers(process.pid)]
    victim = generator.randrange(len(ranks))
    if process.poll() is not None:
        return None
    os.kill(ranks[victim], signal.SIGKILL)
    began = time.monotonic()
    output, errors = process.communicate(timeout=60)
    seconds = time.monotonic() - began
    assert gone(ranks, 10)
    if "done" in output:
        return None
    assert victim == 0 or f"rank {victim}" in errors or "ranks" in errors, errors
    return f"rank {victim} of {devices} at {when}", seconds


def survived(directory, whole, seed, kills):
    generator, found, number = random.Random(seed), [], 0
    while len(found) < kills:
        number += 1
        place = directory / str(number)
        was = killed(place, generator)
        if was is None:
            continue
        went_on = distilled(devices=generator.choice([1, 1, 2, 3]), checkpoint=place, resume="auto")
        assert_same_run(went_on, whole)
        assert not list(place.glob(".*"))
        found.append(was)
        print(f"{len(found)}/{kills} {was[0]}: over after {was[1]:.1f} s", flush=True)


@pytest.mark.timeout(200)
def test_a_process_that_is_killed_at_any_time_loses_nothing_but_the_last_steps(tmp_path, whole):
    survived(tmp_path, whole, seed=1, kills=2)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_fifty_kills(tmp_path, whole):
    survived(tmp_path, whole, seed=2, kills=KILLS)
