"""The generated Python is what runs: it is readable, respects the instructions' edges, and shows in tracebacks."""

import gc
import linecache
import traceback

import pytest
import torch
from networks import mlp

import autobd
from autobd.program import Op, build

CUTS = [("0", "0"), ("1", "1")]


def result(strategy="auto"):
    return autobd.distill(mlp(16), mlp(4), [torch.randn(4, 6)], cuts=CUTS, strategy=strategy, progress=False)


@pytest.mark.parametrize("strategy", ["tr+dpu", "dp"])
def test_instructions_come_after_what_they_need(strategy):
    (instructions,) = result(strategy).program.ranks
    for position, instruction in enumerate(instructions):
        assert all(earlier < position for earlier in instruction.after)
    assert sorted(i.block for i in instructions if i.op is Op.UPDATE) == [0, 1, 2]


def test_teacher_relaying_runs_each_teacher_block_once_and_dp_repeats_the_prefix():
    def teachers(strategy):
        return [i.block for i in result(strategy).program.ranks[0] if i.op is Op.TEACHER_FORWARD]

    assert teachers("tr+dpu") == [0, 1, 2]
    assert teachers("dp") == [0, 0, 1, 0, 1, 2]


def test_all_teachers_of_a_stage_run_before_its_students():
    operations = [i.op for i in result().program.ranks[0]]
    assert operations.index(Op.STUDENT_FORWARD) > max(i for i, o in enumerate(operations) if o is Op.TEACHER_FORWARD)


def test_the_printed_code_is_the_code_that_runs():
    program = result().program
    code = program.code(0)
    assert code in str(program)
    calls = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *arguments: calls.append(name) or name

    program.compile(0)(Recorder(), "batch")
    assert calls == [i.op.value for i in program.ranks[0]]
    assert [line.split("rank.")[1].split("(")[0] for line in code.splitlines()[1:] if "rank." in line] == calls


def test_boundaries_are_dropped_after_their_last_use():
    lines = result().program.code(0).splitlines()
    last_use = max(i for i, line in enumerate(lines) if "student_forward(1" in line)
    assert "del x0" in lines[last_use + 1]


def test_source_is_forgotten_with_the_function():
    program = result().program
    before = set(linecache.cache)
    step = program.compile(0)
    assert step.__code__.co_filename in linecache.cache
    del step
    gc.collect()
    assert set(linecache.cache) <= before


def test_a_traceback_shows_the_generated_line():
    program = result().program

    class Failing:
        def __getattr__(self, name):
            if name == "student_backward":
                raise RuntimeError("here")
            return lambda *arguments: None

    with pytest.raises(RuntimeError) as error:
        program.compile(0)(Failing(), "batch")
    assert "rank.student_backward(0, loss0)" in "".join(traceback.format_exception(error.value))


def test_a_plan_can_be_built_again_and_gives_the_same_program():
    done = result()
    assert build(done.plan, done.split) == done.program
