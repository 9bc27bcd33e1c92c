"""Models that do something else in train mode, at each step or from call to call: nothing of it is frozen.

The number of a test is that of the report in the project's bank of trouble reports. The oracles are plain PyTorch.
"""

import random
import sys
from collections import Counter, namedtuple
from types import SimpleNamespace

import pytest
import torch
from networks import assert_same, fingerprint
from plain import assert_blocks_are_the_models, chained, distilled_like_plain_loop, hidden, pair
from torch import nn
from torch.nn import functional

import autobd
from autobd.cli import main
from autobd.errors import CaptureError, LossError


class Dropping(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x):
        return x + self.down(functional.dropout(self.up(x).relu(), 0.5, training=self.training))


@pytest.mark.parametrize("teacher_in_train_mode", [False, True])
@pytest.mark.parametrize("student_in_train_mode", [False, True])
def test_09_functional_dropout_is_dead_in_the_teacher_and_drawn_at_each_step_in_the_student(
    teacher_in_train_mode, student_in_train_mode
):
    teacher, student = pair(lambda w: nn.Sequential(Dropping(w), Dropping(w), nn.Linear(6, 3)))
    teacher.train(teacher_in_train_mode), student.train(student_in_train_mode)
    x = torch.randn(4, 6)
    batches = [x, x, x[:3], x[:1]]
    result = distilled_like_plain_loop(teacher, student, chained("0", "1", "2"), batches, [("0", "0"), ("1", "1")])
    assert_blocks_are_the_models(result.split, batches)
    student.eval()
    assert torch.equal(student(x), student(x))
    student.train()
    assert not torch.equal(student(x), student(x))


def test_09_two_passes_of_the_teacher_are_equal_and_two_of_the_student_differ():
    x, seen = torch.randn(64, 6), []
    recipe = autobd.Recipe(
        block_input="teacher", lr=0.0, loss=lambda s, t: seen.append((s.detach(), t)) or (s - t).square().mean()
    )
    autobd.distill(*pair(lambda w: nn.Sequential(Dropping(w))), [x, x], blocks=1, recipe=recipe, progress=False)
    assert torch.equal(seen[0][1], seen[1][1])
    assert not torch.equal(seen[0][0], seen[1][0])


class Skipping(nn.Module):
    """Leaves out layers by Python's dice."""

    def __init__(self, width):
        super().__init__()
        self.layers, self.head = nn.ModuleList(hidden(6, width) for _ in range(4)), nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.5:
                continue
            x = x + layer(x)
        return self.head(x)


class Skipped(nn.Module):
    """A layer that leaves itself out: the remedy."""

    def __init__(self, width):
        super().__init__()
        self.layer = hidden(6, width)

    def forward(self, x):
        return x if self.training and random.random() < 0.5 else x + self.layer(x)


def test_11_a_student_that_throws_dice_in_its_own_code_is_refused_and_left_as_it_was():
    teacher, student = pair(Skipping)
    before = fingerprint(teacher), fingerprint(student), random.getstate()
    with pytest.raises(CaptureError, match=r"Skipping\.forward draws random numbers in Python") as error:
        autobd.distill(teacher, student, [torch.randn(4, 6)], progress=False)
    assert error.match(r"test_trouble_modes\.py:\d+ in forward")
    assert error.match("do: .*switch it off.*submodule of their own")
    assert_same(before[0], fingerprint(teacher)), assert_same(before[1], fingerprint(student))
    assert before[2] == random.getstate()


def test_11_in_submodules_dice_are_thrown_anew_at_each_step_of_the_student_and_never_of_the_teacher():
    teacher = pair(Skipping)[0].train()
    student = pair(lambda w: nn.Sequential(*(Skipped(w) for _ in range(4)), nn.Linear(6, 3)))[1]

    def layer(i):
        return (lambda m, x, _: x + m.layers[i](x) if isinstance(m, Skipping) else m[i](x)), [str(i)]

    x = torch.randn(4, 6)
    stages = [*map(layer, range(4)), ((lambda m, x, _: (m.head if isinstance(m, Skipping) else m[4])(x)), ["4"])]
    cuts = [("add", "0"), ("add_1", "1"), ("add_2", "2"), ("add_3", "3")]
    result = distilled_like_plain_loop(teacher, student, stages, [*[x] * 8, x[:3], x[:1]], cuts)
    assert_blocks_are_the_models(result.split, [x, x[:3], x[:1]])
    skipped = [losses[0] for losses in result.history.losses[:8]]
    (_, times), *learning = Counter(skipped).most_common()
    assert times > 1, "a step that skips the layer gives the loss of the step before that skipped it"
    assert len(learning) > 1, "a step that does not skip it learns"


def test_11_the_dice_do_not_change_how_many_blocks_there_are():
    found = set()
    for seed in range(4):
        random.seed(seed)
        models = pair(lambda w: nn.Sequential(*(Skipped(w) for _ in range(4)), nn.Linear(6, 3)))
        found.add(str(autobd.split(*models, torch.randn(4, 6)).to_dict()["blocks"]))
    assert len(found) == 1


class Counting(nn.Module):
    """Counts its calls and keeps a running mean, which it also uses, in its own buffers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(outputs))

    def forward(self, x):
        self.calls.add_(1)
        x = self.linear(x).relu()
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def counting(width):
    first, last = nn.Sequential(Counting(4, width), Counting(width, 6)), nn.Linear(6, 2)
    return nn.Sequential(first, nn.Sequential(Counting(6, width), Counting(width, 6)), last)


def test_13_a_students_buffers_move_once_a_step_and_the_teachers_come_back():
    batches = [torch.randn(n, 4) for n in (3, 3, 2, 1, 3)]
    result = distilled_like_plain_loop(*pair(counting), chained("0", "1", "2"), batches, [("0", "0"), ("1", "1")])
    assert [int(m.calls) for m in result.student.modules() if isinstance(m, Counting)] == [len(batches)] * 4
    assert all(m.calls == 0 for m in result.split.teacher.model.modules() if isinstance(m, Counting))
    assert_blocks_are_the_models(result.split, batches[-3:])


def test_13_recording_splitting_verifying_and_inspecting_move_no_buffer(monkeypatch, capsys):
    teacher, student = pair(counting)
    before = fingerprint(teacher), fingerprint(student)
    autobd.capture(student, torch.randn(3, 4))
    autobd.split(teacher, student, torch.randn(3, 4)).verify()
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(teacher=lambda: teacher, student=lambda: student))
    for options in ([], ["--verify", "--explain"]):
        assert main(["inspect", "mine:teacher", "mine:student", "--input", "4", *options]) == 0
    assert "identical" in capsys.readouterr().out
    assert_same(before[0], fingerprint(teacher)), assert_same(before[1], fingerprint(student))


def test_11_a_loss_without_gradient_is_still_an_error():
    models = pair(lambda w: nn.Sequential(Skipped(w), Skipped(w)))
    recipe = autobd.Recipe(block_input="teacher", loss=lambda s, t: (s.detach() - t).square().mean())
    with pytest.raises(LossError, match="does not depend on the student's parameters"):
        autobd.distill(*models, [torch.randn(4, 6)] * 9, recipe=recipe, progress=False)


Out = namedtuple("Out", ["logits", "aux"])
Reversed = namedtuple("Reversed", ["aux", "logits"])


class Auxiliary(nn.Module):
    """In train mode it also returns what an auxiliary head says."""

    def __init__(self, width, returns=Out):
        super().__init__()
        self.one, self.two, self.returns = hidden(6, width), hidden(6, width), returns
        self.aux, self.head = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x):
        x = self.one(x)
        aux = self.aux(x) if self.training else None
        logits = self.head(self.two(x))
        return self.returns(logits=logits, aux=aux) if self.training else logits


@pytest.mark.parametrize("returns", [Out, Reversed], ids=["logits first", "auxiliary output first"])
@pytest.mark.parametrize("training", [True, False])
def test_18_the_main_logits_are_distilled_and_the_auxiliary_head_stays_as_it_was(returns, training):
    teacher, student = pair(lambda w: Auxiliary(w, returns))
    teacher.train(training), student.train(training)
    aux = [p.detach().clone() for p in student.aux.parameters()]
    batches = [torch.randn(n, 6) for n in (4, 4, 3, 1)]
    cuts = [("one", "one"), ("two", "two")]
    result = distilled_like_plain_loop(teacher, student, chained("one", "two", "head"), batches, cuts)
    assert_blocks_are_the_models(result.split, batches)
    assert all(torch.equal(a, p) for a, p in zip(aux, student.aux.parameters(), strict=True))
    assert "not on the way to the distilled output, left as they are: aux.weight, aux.bias" in str(result)
    assert "train mode computes more than eval mode (aux)" in str(result)
    x = batches[0]
    assert list(result.split.student.outputs) == ["output"]
    assert torch.equal(student.train()(x).logits, student.eval()(x))


class Both(Auxiliary):
    """Returns what the auxiliary head says in eval mode too, and first."""

    def forward(self, x):
        x = self.one(x)
        return self.aux(x), self.head(self.two(x))


def test_18_which_of_several_outputs_is_distilled_is_told():
    teacher, student = pair(Auxiliary)[0], pair(Both)[1]
    split = autobd.split(teacher, student, torch.randn(4, 6), blocks=1)
    assert "paired: 'output' of the teacher (which returns output) and '0' of the student (which returns 0, 1)" in (
        str(split)
    )
    assert "no name in common" not in str(autobd.split(pair(Both)[0], student, torch.randn(4, 6), blocks=1))
