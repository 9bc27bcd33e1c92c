"""The caller's own code hears of steps and epochs, may stop the training, and spoils nothing when it fails."""

import copy

import pytest
import torch
from networks import mlp
from opened import open_ranks
from plain import assert_equal_state

import autobd
from autobd import Callback, Recipe
from autobd.errors import AutobdError, CallbackError

CUTS = [("0", "0"), ("1", "1")]
STEPS = 6


def batches():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(4, 6, generator=generator), torch.zeros(4).long()) for _ in range(STEPS)]


def distilled(*callbacks, student=None, **options):
    options = {"devices": 1, "epochs": 3, "recipe": Recipe(logits=True, block_input="teacher"), **options}
    options["devices"] = open_ranks(options["devices"])
    return autobd.distill(
        mlp(16), mlp(4, seed=1) if student is None else student, batches(), cuts=CUTS, threads=1, progress=False,
        profile="analytic", strategy="tr+dpu", callbacks=callbacks, **options,
    )  # fmt: skip


class Heard(Callback):
    def __init__(self):
        self.seen = []

    def on_start(self, run):
        self.seen.append(("start", run.stage))

    def on_step(self, run):
        assert len(run.history.losses[run.step - 1]) == 3 or run.stage == "finished"
        self.seen.append(("step", run.step))

    def on_epoch(self, run):
        self.seen.append(("epoch", run.epoch, len(run.history.scores)))

    def on_end(self, run):
        self.seen.append(("end", run.step))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", [1, 2])
def test_every_step_is_heard_once_before_the_end_of_its_epoch(devices):
    heard = Heard()
    distilled(heard, devices=devices, epochs=2, validate=batches())
    expected = [("start", "assembled"), *(("step", n) for n in range(1, 7)), ("epoch", 1, 2)]
    assert heard.seen == [*expected, *(("step", n) for n in range(7, 13)), ("epoch", 2, 3), ("end", 12)]


@pytest.mark.timeout(60)
def test_the_end_to_end_part_is_heard_too():
    heard = Heard()
    distilled(heard, epochs=1, finish=1)
    assert [s for s in heard.seen if s[0] in ("start", "end")] == [
        ("start", "assembled"), ("end", 6), ("start", "finished"), ("end", 6),
    ]  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_callback_may_stop_the_training(devices):
    class Enough:
        def on_epoch(self, run):
            run.stop = run.epoch == 2

    result = distilled(Enough(), devices=devices)
    assert result.history.epoch_ends == [6, 12]
    assert_equal_state(result.student, distilled(epochs=2).student)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", [1, 2])
def test_an_epoch_after_which_a_callback_stops_is_the_last_one(devices):
    class Enough:
        def on_epoch(self, run):
            run.stop = run.epoch == 2

    recipe = Recipe(
        logits=True, block_input="teacher", lr=lambda block, progress: 1e-2 if progress < 0.3 else 3.0, keep_best=True
    )
    validate = autobd.Validation(batches(), {"size": lambda output, targets: output.abs().mean()}, every=5)
    stopped = distilled(Enough(), devices=devices, recipe=recipe, epochs=3, validate=validate)
    recipe = Recipe(logits=True, block_input="teacher", lr=1e-2)
    best = distilled(recipe=recipe, epochs=1).student  # what came after it was worse
    assert_equal_state(stopped.student, best)
    (scored,) = stopped.history.of("assembled")
    size = sum(float(stopped.student(x).detach().abs().mean()) for x, _ in batches()) / STEPS
    assert scored.values["size"] == pytest.approx(size)


@pytest.mark.timeout(60)
def test_stopped_at_the_start_it_ends_after_a_step():
    class Enough(Heard):
        def on_start(self, run):
            run.stop = True

    heard = Enough()
    assert distilled(heard).history.steps == 1
    assert heard.seen == [("step", 1), ("epoch", 1, 0), ("end", 1)]


@pytest.mark.parametrize("callbacks", [Callback(), "tensorboard"])
def test_callbacks_that_are_no_list(callbacks):
    with pytest.raises(AutobdError, match="callbacks= is no list"):
        autobd.distill(mlp(16), mlp(4, seed=1), batches(), callbacks=callbacks)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("hook", ["on_start", "on_step", "on_epoch", "on_end"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_callback_that_fails_is_named_and_nothing_is_half_written(hook, devices):
    class Broken:
        pass

    def fail(run):
        if run.epoch == 1 or hook in ("on_start", "on_end"):
            raise OSError("disk full")

    broken, student = Broken(), mlp(4, seed=1)
    setattr(broken, hook, fail)
    with pytest.raises(CallbackError, match=rf"Broken\.{hook} has failed: OSError: disk full"):
        distilled(broken, devices=devices, student=student)
    epochs = {"on_start": 0, "on_step": 1, "on_epoch": 1, "on_end": 3}[hook]
    expected = distilled(epochs=epochs).student if epochs else mlp(4, seed=1)
    assert_equal_state(student, expected)


@pytest.mark.timeout(60)
def test_tensorboard_gets_losses_and_scores(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = distilled(autobd.TensorBoard(tmp_path, every=2), epochs=1, validate=batches(), finish=1)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {f"assembled/relative loss of block {b}" for b in range(3)} <= set(tags)
    written = events.Scalars("assembled/relative loss of block 1")
    assert [e.step for e in written] == [0, 2, 4]
    assert written[1].value == pytest.approx(result.history.relative[2][1])
    for what in ("teacher", "assembled", "finished"):
        assert events.Scalars(f"accuracy/{what}")[0].value == pytest.approx(
            result.history.of(what)[0].values["accuracy"]
        )


@pytest.mark.timeout(60)
def test_the_history_goes_to_csv_and_json(tmp_path):
    import csv
    import json

    history = distilled(epochs=2, finish=1, validate=batches()).history
    history.to_csv(tmp_path / "h.csv")
    with open(tmp_path / "h.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12 * 3 + 6
    assert [int(r["epoch"]) for r in rows if r["block"] == "2"] == [0] * 6 + [1] * 6
    assert float(rows[4]["relative"]) == history.relative[1][1]
    assert [r["stage"] for r in rows[-7:]] == ["blocks"] + ["finish"] * 6
    found = json.loads(history.to_json(tmp_path / "h.json"))
    assert json.loads((tmp_path / "h.json").read_text()) == found
    assert [tuple(step) for step in found["losses"]] == history.losses
    assert found["scores"][0]["what"] == "teacher"


def test_the_history_goes_to_pandas():
    pandas, history = pytest.importorskip("pandas"), distilled(epochs=1).history
    frame = history.to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["relative"]) == [value for step in history.relative for value in step]


@pytest.mark.timeout(60)
def test_the_figure_shows_a_curve_for_each_block_and_a_bar_for_each_model(tmp_path):
    result = distilled(epochs=2, finish=1, validate=batches())
    figure = result.plot()
    losses, scores = figure.axes
    assert [line.get_label() for line in losses.get_lines()] == ["block 0", "block 1", "block 2"]
    assert [t.get_text() for t in scores.get_xticklabels()] == ["teacher", "assembled", "finished"]
    figure.savefig(tmp_path / "figure.png")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["student.pt", "student.safetensors"])
def test_the_student_is_saved_for_its_own_class(name, tmp_path):
    from safetensors.torch import load_file

    result = distilled(epochs=1)
    result.save(tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    state = load_file(tmp_path / name) if name.endswith("s") else torch.load(tmp_path / name, weights_only=True)
    plain = mlp(4, seed=7)
    plain.load_state_dict(state)
    assert_equal_state(plain, result.student)
    with pytest.raises(AutobdError, match="no such directory"):
        result.save(tmp_path / "nowhere" / name)


def test_tied_weights_are_saved_under_all_their_names(tmp_path):
    result = distilled(epochs=1)
    tied = copy.deepcopy(result.student)
    tied[2][0].weight = tied[0][0].weight
    from dataclasses import replace

    replace(result, student=tied).save(tmp_path / "tied.safetensors")
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "tied.safetensors")) == set(tied.state_dict())


def test_what_is_not_installed_is_said(monkeypatch):
    import sys

    result = distilled(epochs=1)
    for name, use in (
        ("matplotlib.figure", result.plot), ("pandas", result.history.to_pandas),
        ("torch.utils.tensorboard", lambda: autobd.TensorBoard("runs")),
    ):  # fmt: skip
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(AutobdError, match="is not installed"):
            use()
