"""Faults that people reported of other tools, each as a small pair of models: none happens here.

The number of a test is that of the report in the project's bank of trouble reports.
"""

import copy
import io

import pytest
import torch
from networks import assert_same, fingerprint, mlp
from torch import nn
from torch.nn import functional

import autobd
from autobd.errors import InputError, NonFiniteError, SplitError


class Teacher46(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 1)

    def forward(self, x):
        return x + self.c2(self.c1(x.relu()).relu())


class Student46(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.act, self.c1, self.c2 = nn.ReLU(inplace=True), nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, 4, 1)

    def forward(self, x):
        return self.c2(self.c1(self.act(x)).relu())


def images_net(block, width, seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 1), block(width), block(width), nn.Flatten(1))


def first_losses(teacher, student, x, cuts):
    """Raw losses of the first step, from distill."""
    recipe = autobd.Recipe(block_input="teacher", loss=autobd.MSE(normalised=False))
    result = autobd.distill(teacher, student, [x], cuts=[(c, c) for c in cuts], recipe=recipe, progress=False)
    return result.history.losses[0]


def oracle_losses(teacher, student, x):
    """The same, block after block with every tensor cloned."""
    losses = []
    with torch.no_grad():
        for t, s in zip(copy.deepcopy(teacher).eval(), copy.deepcopy(student).train(), strict=True):
            y = t(x.clone())
            losses.append(functional.mse_loss(s(x.clone()), y).item())
            x = y.clone()
    return pytest.approx(losses, rel=1e-6)


def test_46_a_student_that_starts_in_place_does_not_eat_the_input_it_shares():
    teacher, student, x = images_net(Teacher46, 16, 0), images_net(Student46, 2, 1), torch.randn(2, 3, 6, 6)
    expected, kept = oracle_losses(teacher, student, x), x.clone()
    assert first_losses(teacher, student, x, "012") == expected
    assert torch.equal(x, kept)


IN_PLACE = {
    "ReLU": lambda: nn.ReLU(inplace=True),
    "Hardswish": lambda: nn.Hardswish(inplace=True),
    "dropout": lambda: nn.Dropout(0.0, inplace=True),
    "functional": lambda: Call(lambda x: functional.relu_(x)),
    "mul_": lambda: Call(lambda x: x.mul_(0.5)),
    "+=": lambda: Call(lambda x: x.__iadd__(1.0)),
    "setitem": lambda: Call(lambda x: x.__setitem__((slice(None), 0), 0.0) or x),
    "view": lambda: Call(lambda x: x.flatten(1).clamp_(min=0).view_as(x)),
}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("operation", IN_PLACE)
def test_47_the_next_block_does_not_overwrite_the_target(operation):
    def net(width, seed):
        torch.manual_seed(seed)
        act = IN_PLACE[operation]
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(3, width, 3, padding=1), act(), nn.Conv2d(width, 6, 1), nn.BatchNorm2d(6)),
            nn.Sequential(act(), nn.Conv2d(6, width, 3, padding=1), act(), nn.Conv2d(width, 6, 1)),
            nn.Sequential(act(), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(6, 4)),
        )

    teacher, student, x = net(16, 0), net(4, 1), torch.randn(4, 3, 6, 6)
    expected = oracle_losses(teacher, student, x)
    assert first_losses(teacher, student, x, "01") == expected


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
def test_49_works_inside_inference_mode_and_no_grad(context):
    teacher, student = mlp(32), mlp(4, seed=1)
    before = student[1][0].weight.clone()
    with context():
        autobd.distill(teacher, student, [torch.randn(3, 6)], cuts=[("0", "0"), ("1", "1")], progress=False)
    assert not torch.equal(before, student[1][0].weight)


def test_49_models_made_in_inference_mode_are_refused():
    with torch.inference_mode():
        teacher = mlp(32)
    with pytest.raises(InputError, match=r"The teacher was made inside torch.inference_mode"):
        autobd.distill(teacher, mlp(4), [torch.randn(3, 6)])


def batch_normed(width, seed):
    torch.manual_seed(seed)

    def block(features):
        return nn.Sequential(
            nn.Linear(features, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 6)
        )

    return nn.Sequential(block(4), block(6), block(6))


def test_50_a_teacher_in_train_mode_does_not_drift_and_gives_eval_targets():
    teacher, student, x = batch_normed(32, 0).train(), batch_normed(4, 1), torch.randn(8, 4) + 3
    targets = []
    with torch.no_grad():
        y = x
        for block in copy.deepcopy(teacher).eval():
            targets.append(y := block(y))
    seen = []
    recipe = autobd.Recipe(block_input="teacher", loss=lambda s, t: seen.append(t.clone()) or (s - t).square().mean())
    before = fingerprint(teacher)
    autobd.distill(teacher, student, [x, x], cuts=[("0", "0"), ("1", "1")], recipe=recipe, progress=False)
    assert_same(before, fingerprint(teacher))
    assert all(torch.equal(a, b) for a, b in zip(seen, targets + targets, strict=True))


def test_52_the_callers_teacher_comes_back_with_every_flag():
    teacher = batch_normed(32, 0).train()
    teacher[0].requires_grad_(False)
    teacher[1].eval()
    handle = teacher[2].register_forward_hook(lambda module, arguments, output: None)
    before = fingerprint(teacher)
    autobd.distill(teacher, batch_normed(4, 1), [torch.randn(5, 4)], progress=False)
    assert_same(before, fingerprint(teacher))
    assert all(p.grad is None for p in teacher.parameters())
    assert len(teacher[2]._forward_hooks) == 1
    handle.remove()


def channels(c, width, seed):
    torch.manual_seed(seed)

    def block(i, o):
        return nn.Sequential(nn.Conv2d(i, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, o, 1))

    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(c, 5))
    return nn.Sequential(block(3, c), block(c, c), block(c, c), head)


@pytest.mark.parametrize("kind", ["matched", "trainable"])
def test_57_other_channels_are_adapted_and_the_student_comes_back_plain(kind):
    teacher, student = channels(16, 16, 0), channels(8, 4, 1)
    keys, count = list(student.state_dict()), sum(p.numel() for p in student.parameters())
    result = autobd.distill(
        teacher, student, [torch.randn(16, 3, 8, 8)], cuts=[("0", "0"), ("1", "1")], adapters=kind, epochs=20,
        progress=False,
    )  # fmt: skip
    assert [a.kind for p in result.split.pairs[:2] for a in p.adapters] == [kind, kind]
    assert f"{kind} 16 to 8" in str(result.split)
    assert list(student.state_dict()) == keys
    assert sum(p.numel() for p in student.parameters()) == count
    assert all(b < a for a, b in zip(result.history.relative[0], result.history.relative[-1], strict=True))


def test_59_shapes_that_only_broadcast_are_an_error():
    def net(size):
        first = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.AdaptiveAvgPool2d(size))
        return nn.Sequential(first, nn.Conv2d(6, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(6, 3))

    with pytest.raises(SplitError, match=r"N x 6 x 4 x 4.*N x 6 x 1 x 1"):
        autobd.split(net(4), net(1), torch.randn(2, 3, 8, 8), cuts=[("0", "0")])


class Big(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.f, self.scale = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6)), scale

    def forward(self, x):
        return self.f(x) * self.scale


class Tame(nn.Module):
    def forward(self, x):
        return torch.nan_to_num(x, 0.0, 1.0, -1.0).clamp(-1, 1)


def test_60_a_teacher_that_overflows_is_named_and_no_block_is_spoilt():
    def net(width, scale):
        return nn.Sequential(mlp(width, 1), Big(width, scale), nn.Sequential(Tame(), mlp(width, 1)))

    student = net(4, 1.0)
    before = copy.deepcopy(student)
    cuts = [("0", "0"), ("1", "1")]
    with pytest.raises(NonFiniteError, match=r"Rank 0, block 1 .*step 0: .*the teacher's boundary"):
        autobd.distill(net(32, 1e39), student, [torch.randn(4, 6)], cuts=cuts, progress=False)
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), before.parameters(), strict=True))


def test_62_wrapped_models_are_unwrapped_and_keys_have_no_prefix():
    teacher, student = nn.DataParallel(mlp(32, 2)), nn.DataParallel(nn.DataParallel(mlp(4, 2, seed=1)))
    before = copy.deepcopy(student.module.module)
    result = autobd.distill(teacher, student, [torch.randn(3, 6)], cuts=[("0", "0")], progress=False)
    assert result.student is student.module.module
    assert list(result.student.state_dict()) == list(before.state_dict())
    assert not torch.equal(before[0][0].weight, result.student[0][0].weight)


def test_64_the_result_is_the_student_alone_and_loads_into_a_fresh_one():
    student, plain = batch_normed(4, 1), batch_normed(4, 1)
    result = autobd.distill(batch_normed(128, 0), student, [torch.randn(4, 4)], progress=False)
    assert type(result.student) is nn.Sequential
    assert list(result.student.state_dict()) == list(plain.state_dict())
    files = [io.BytesIO(), io.BytesIO()]
    for file, model in zip(files, (result.student, plain), strict=True):
        torch.save(model.state_dict(), file)
    assert files[0].tell() == files[1].tell()
    plain.load_state_dict(result.student.state_dict(), strict=True)
    x = torch.randn(3, 4)
    assert torch.equal(plain.eval()(x), result.student.eval()(x))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in result.student.modules())


class Numbered(nn.Module):
    def __init__(self, count=6):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))
        with torch.no_grad():
            for i, block in enumerate(self.blocks):
                block.weight.fill_(0.01 * i), block.bias.fill_(i)

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_65_every_layer_comes_back_under_its_own_number():
    student = Numbered()
    recipe = autobd.Recipe(block_input="teacher", lr=0.0, optimizer=torch.optim.SGD)
    autobd.distill(Numbered(), student, [torch.randn(3, 4)], blocks=6, recipe=recipe, progress=False)
    for i, block in enumerate(student.blocks):
        assert (block.bias == i).all()
        assert torch.equal(block.weight, torch.full((4, 4), 0.01 * i))


def test_the_teacher_is_the_student_or_shares_with_it():
    model = mlp(8)
    with pytest.raises(InputError, match="The teacher is the student"):
        autobd.distill(model, model, [torch.randn(3, 6)])
    with pytest.raises(InputError, match="The teacher is the student"):
        autobd.distill(nn.DataParallel(model), model, [torch.randn(3, 6)])
    sharing = nn.Sequential(nn.Linear(6, 6), model[1])
    with pytest.raises(InputError, match=r"shares tensors.*\n.*1\.0\.weight"):
        autobd.distill(model, sharing, [torch.randn(3, 6)])


@pytest.mark.parametrize(
    ("student", "message"),
    [
        (lambda: mlp(4).requires_grad_(False), "no trainable parameter"),
        (lambda: mlp(4).double(), r"different dtypes.*\n.*float32.*float64"),
        (lambda: mlp(4).to("meta"), r"different devices.*\n.*cpu.*meta"),
        (lambda: nn.Sequential(*mlp(4), nn.Linear(6, 5)), r"outputs differ.*\n.*N x 6 float32.*N x 5 float32"),
        (lambda: mlp(4, features=5), "fails on the example"),
        (lambda: "student", "is not a model"),
    ],
)
def test_pairs_that_cannot_be_distilled(student, message):
    with pytest.raises(autobd.AutobdError, match=message):
        autobd.distill(mlp(8), student(), [torch.randn(3, 6)], progress=False)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"cuts": [("0", "7")]}, r"no module or node '7'.*\n.*\n.*one of: "),
        ({"cuts": [("0", "0"), ("0", "1")]}, "does not come after"),
        ({"cuts": ["0"]}, "else than a pair of names"),
        ({"blocks": 99}, r"99 blocks were asked for.*\n.*\n.*at most 6"),
        ({"blocks": 0}, "impossible number"),
    ],
)
def test_cuts_that_cannot_be_made(kwargs, message):
    with pytest.raises(autobd.AutobdError, match=message):
        autobd.split(mlp(8), mlp(4), torch.randn(3, 6), **kwargs)
