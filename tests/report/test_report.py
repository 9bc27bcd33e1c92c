"""Reports: what would run, as text, page and trace."""

import json
import re
from html.parser import HTMLParser

import pytest
import torch
from networks import mlp

import autobd
from autobd.cli import main
from autobd.costs import Link, Profile
from autobd.report import chrome_trace, gantt
from autobd.report.gantt import idle, steady

BLOCKS = 4
SPLIT = autobd.split(
    mlp(16, BLOCKS), mlp(4, BLOCKS, seed=1), torch.randn(8, 6), cuts=[(str(i), str(i)) for i in range(BLOCKS - 1)]
)
PROFILE = Profile.of(
    [4.0, 1.0, 1.0, 1.0], [8.0, 2.0, 2.0, 2.0], 8, 3, boundary=[10.0] * 4, weights=[1e3] * 4, within=Link(0.01, 1e4)
)


def report(strategy="auto"):
    return autobd.inspect(SPLIT, PROFILE, strategy)


def test_every_strategy_is_compared_by_one_function():
    found = report()
    assert found.strategies[0].name == found.plan.strategy
    assert {s.name for s in found.strategies} == {"dp", "ls", "tr", "tr+dpu", "ir", "ahd"}
    assert all(found.strategies[0].step <= s.step for s in found.strategies)
    for strategy in found.strategies:
        assert strategy.throughput == pytest.approx(8 / strategy.step)
        assert strategy.name in str(found)


def test_the_text_gantt_shows_who_works_when_and_waits():
    found = report("tr+dpu")
    lines = gantt(found.timeline, width=60).splitlines()
    assert len(lines) == 1 + 3
    begin, end = steady(found.timeline)
    step = found.plan.prediction.step
    assert end - begin == pytest.approx(2 * step)
    for rank, waits in idle(found.timeline, begin, end).items():
        assert f"{waits:.0%} waiting" in lines[1 + rank]
        assert waits == pytest.approx(1 - found.plan.prediction.busy[rank] / step, abs=0.02)
        drawn = re.match(r"rank \d+ +([TFBUAR.]{60})", lines[1 + rank]).group(1)
        assert drawn.count(".") / 60 == pytest.approx(waits, abs=0.1)
        assert {"T", "F", "B"} <= set(drawn)


class Page(HTMLParser):
    """Notes tags and whether every one is closed."""

    EMPTY = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else():
    found = report()
    page = Page(found.html())
    assert page.open == []
    assert page.links == []
    assert page.seen.count("svg") == 1
    assert page.seen.count("table") == 3
    drawn = sum(e.instruction.op.value != "load" for e in found.timeline.events)
    assert 0 < page.seen.count("rect") <= drawn
    assert "prefers-color-scheme: dark" in found.html()
    assert "width=device-width" in found.html()


def test_names_of_models_are_escaped():
    class Net(type(mlp(4, 2))):
        pass

    Net.__name__ = "<b>"
    teacher, student = mlp(8, 2), mlp(4, 2, seed=1)
    teacher.__class__ = Net
    split = autobd.split(teacher, student, torch.randn(4, 6), cuts=[("0", "0")])
    text = autobd.inspect(split, Profile.of([1.0, 1.0], [1.0, 1.0], 4, 2)).html()
    assert "<b>" not in text
    assert "&lt;b&gt;" in text


def test_a_chrome_trace_has_every_instruction_and_message():
    trace = report().timeline
    found = json.loads(chrome_trace({"plan": trace, "run": trace}))["traceEvents"]
    slices = [e for e in found if e["ph"] == "X"]
    assert len(slices) == 2 * len(trace.events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in slices)
    assert sum(e["ph"] == "s" for e in found) == sum(e["ph"] == "f" for e in found) == 2 * len(trace.messages)
    assert {e["args"]["name"] for e in found if e["ph"] == "M" and e["name"] == "process_name"} == {"plan", "run"}


def test_a_real_run_is_drawn_the_same_way():
    data = [torch.randn(8, 6)] * 6
    result = autobd.distill(mlp(16, 3), mlp(4, 3, seed=1), data, progress=False)
    assert "rank 0" in gantt(result.trace)
    found = result.report()
    assert (found.plan, found.run) == (result.plan, result.trace)
    for text in (str(found), found.html()):
        assert text.index("As planned") < text.index("As it ran")
        assert "It took" in text
    assert Page(found.html()).seen.count("svg") == 2
    names = [e["args"]["name"] for e in json.loads(found.chrome_trace())["traceEvents"] if e["name"] == "process_name"]
    assert names == ["plan", "run"]


MODELS = """
from torch import nn

def net(width=8):
    block = lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6))
    return nn.Sequential(block(), block(), block())
"""


def run(capsys, *arguments):
    status = main(["inspect", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_inspect_plans_for_machines_that_are_not_here(capsys, tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    pair = (f"{path}:net,width=16", f"{path}:net", "--input", "6", "--batch-size", "32")
    status, out, _ = run(capsys, *pair, "--devices", "2xA100+2xL4", "--html", str(tmp_path / "r.html"),
                         "--trace", str(tmp_path / "r.json"), "--code", "0")  # fmt: skip
    assert status == 0
    for text in ("analytic costs", "predicted", "waiting", "over dp", "def step(rank, batch):  # rank 0"):
        assert text in out
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert json.loads((tmp_path / "r.json").read_text())["traceEvents"]
    status, out, _ = run(capsys, *pair, "--devices", "4xA6000", "--json")
    values = json.loads(out)
    assert status == 0
    assert values["plan"]["devices"] == ["A6000"] * 4
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(values["plan"]))
    status, out, _ = run(capsys, *pair, "--devices", "4xA6000", "--strategy", str(plan), "--json")
    assert status == 0
    assert json.loads(out)["plan"] == values["plan"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "4xA600"], "perhaps you meant A6000"),
        (["--devices", "2xL4", "--code", "2"], "--code names no rank"),
        (["--devices", "2xL4", "--strategy", "fast"], "No such strategy"),
        (["--devices", "2xL4", "--memory", "1e-9"], "does not fit"),
    ],
)
def test_what_cannot_be_planned_is_an_error(capsys, tmp_path, options, message):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    status, _, err = run(capsys, f"{path}:net,width=16", f"{path}:net", "--input", "6", *options)
    assert status == 1
    assert message in err
