"""Programs that once gave silently wrong numbers, a crash or a changed model: each is exact, whole or an error."""

import contextlib
import copy
import random
from collections import deque

import numpy as np
import pytest
import torch
from networks import assert_same, fingerprint
from torch import nn
from torch.nn import functional

import autobd
from autobd.blocks.cuts import candidates
from autobd.blocks.dataflow import Dataflow
from autobd.blocks.verify import run_blocks, set_mode
from autobd.errors import AutobdError
from autobd.graph import Arguments


class Model(nn.Module):
    """Two linear layers, a token, a buffer and a leaf; its forward is `function(self, x)`."""

    def __init__(self, function):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.token = nn.Parameter(torch.randn(6))
        self.register_buffer("running", torch.zeros(6))
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.leaf, self.reader = Scaled(), Reader()
        self.function, self.count, self.state = function, 0, None

    def forward(self, x):
        return self.function(self, x)


class Scaled(nn.Module):
    """A leaf with tensors of its own that others read."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inverse", torch.rand(6), persistent=False)
        self.plain = torch.rand(6)

    def forward(self, x):
        return x * self.inverse * self.plain


class Stepper(nn.Module):
    """A leaf that counts in Python."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * self.calls


def token_in_training(m, x):
    h = m.a(x)
    if m.training:
        h[::2] = m.token
    return m.b(h)


def view_in_training(m, x):
    h = m.a(x)
    if m.training:
        v = h[:, :3]
        v.mul_(2)
    return m.b(h)


def update_in_training(m, x):
    if m.training:
        m.running.add_(1)
    return m.b(m.a(x))


def counted(m, x):
    m.count += 1
    return m.b(m.a(x) * m.count)


def remembered(m, x):
    z = m.a(x) + (0 if m.state is None else m.state.mean())
    m.state = z.detach()
    return m.b(z)


def seeded(m, x):
    torch.manual_seed(0)
    return m.b(m.a(x) + torch.randn_like(x))


def seeded_inside(m, x):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        noise = torch.randn_like(x)
    return m.b(m.a(x) + noise)


def padded(m, x):
    h = functional.pad(m.a(x), (0, 0, 0, -x.shape[0] % 4))
    return m.b(h)[: x.shape[0]]


def positions(m, x):
    position = torch.zeros_like(x)
    position[:, :2] = m.token[:2]
    return m.c(m.b(m.a(x) + position) + position)


def noise_table(m, x):
    table = torch.zeros_like(x)
    table[:, 0] = torch.rand(x.shape[0])
    return m.c(m.b(m.a(x) + table) + table)


def activation_table(m, x):
    h = m.a(x)
    table = torch.zeros_like(x)
    table[:, 0] = h[:, 0]
    return m.c(m.b(h + table) + table)


def normalised_input(m, x):
    z = m.norm(x)
    return m.c(m.b(m.a(z)) + z)


def read_before_update(m, x):
    mean = m.norm.running_mean * 1
    return m.c(m.b(m.norm(m.a(x))) + mean)


def gradient_branch(m, x):
    h = m.a(x)
    return m.b(h * 2 if torch.is_grad_enabled() else h)


def detached(m, x):
    h = m.a(x)
    y = m.b(h)
    y.detach_()
    return m.c(y + h)


def hooked(m, x):
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: 0.1 * g)
    return m.b(h)


def context_for_a_leaf(m, x):
    m.reader.context = x.mean()
    return m.b(m.reader(m.a(x)))


def called_with_other_weights(m, x):
    return m.b(torch.func.functional_call(m.a, {"weight": m.c.weight, "bias": m.token}, (x,)))


def momentum_set_on_the_way(m, x):
    m.norm.momentum = 0.5
    y = m.norm(m.a(x))
    m.norm.momentum = 0.1
    return m.b(y)


class Reader(nn.Module):
    """A leaf that reads what its caller has set."""

    context = 0.0

    def forward(self, x):
        return x + self.context


FUNCTIONS = [context_for_a_leaf, called_with_other_weights, momentum_set_on_the_way]
FUNCTIONS += [
    token_in_training,
    view_in_training,
    update_in_training,
    counted,
    remembered,
    seeded,
    seeded_inside,
    padded,
]
FUNCTIONS += [positions, noise_table, activation_table, normalised_input, read_before_update, gradient_branch]
FUNCTIONS += [detached, hooked]
PROGRAMS = {f.__name__: f for f in FUNCTIONS}
PROGRAMS |= {
    "parity": lambda m, x: m.b(m.a(x) * (2 if x.shape[0] % 2 == 0 else 1)),
    "cap": lambda m, x: m.b(m.a(x) * min(x.shape[0], 4)),
    "numpy_float": lambda m, x: m.b(m.a(x) / np.sqrt(6)),
    "leaf_buffer_read_outside": lambda m, x: m.b(m.leaf(m.a(x)) * m.leaf.inverse.cos()),
    "leaf_tensor_read_outside": lambda m, x: m.b(m.leaf(m.a(x)) * m.leaf.plain.cos()),
    "dropout_then_in_place": lambda m, x: m.b(m.a(functional.dropout(x, 0.3, m.training).add_(1)) + x),
}


def observed(module, run, x, training, gradients):
    """Two calls in a row, and what the second left behind."""
    module.train(training)
    torch.manual_seed(11), random.seed(11), np.random.seed(11)
    with torch.set_grad_enabled(gradients):
        run(x.clone())
        output = run(x.clone())
    module.zero_grad()
    if gradients:
        output.sum().backward()
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return output, grads, {n: b.clone() for n, b in module.named_buffers()}


def assert_equal(a, b):
    assert torch.equal(a[0], b[0])
    for one, two in zip(a[1:], b[1:], strict=True):
        assert one.keys() == two.keys()
        assert all(torch.allclose(one[n], two[n], 0, 1e-6) for n in one)


def assert_exact_or_refused(make, rows):
    """Blocks, at every cut, do what the model does in two calls in a row, or making them is an AutobdError."""
    model = make()
    before, example = fingerprint(model), torch.randn(rows, 6)
    try:
        split = autobd.split(copy.deepcopy(model), model, example)
        split.verify()
    except AutobdError:
        assert_same(before, fingerprint(model))
        return
    assert_same(before, fingerprint(model))
    for size in (3, 7, 8):
        x = torch.randn(size, 6)
        for training, gradients, blocks in [
            (False, True, "student"), (True, True, "student"), (False, False, "teacher"),
        ]:  # fmt: skip
            whole, parts = copy.deepcopy(model), copy.deepcopy(model)
            pairs = [getattr(p, blocks) for p in split.pairs]
            bound = [b.bind(getattr(split, blocks), parts) for b in pairs]
            set_mode(bound, training)
            expected = observed(whole, whole, x, training, gradients)
            got = observed(parts, lambda y, b=bound, p=pairs: run_blocks(b, p, Arguments((y,))), x, training, gradients)
            assert_equal(expected, got)


@pytest.mark.parametrize("rows", [4, 5, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_the_models_own_code(name, rows):
    torch.manual_seed(0)
    assert_exact_or_refused(lambda: Model(PROGRAMS[name]), rows)


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_in_a_submodule(name):
    torch.manual_seed(0)
    assert_exact_or_refused(lambda: nn.Sequential(nn.Linear(6, 6), Model(PROGRAMS[name]), nn.Linear(6, 6)), 8)


@pytest.mark.parametrize(
    "name",
    [
        "numpy_float", "leaf_buffer_read_outside", "leaf_tensor_read_outside", "positions", "noise_table",
        "activation_table", "normalised_input", "read_before_update", "gradient_branch",
    ],
)  # fmt: skip
def test_ordinary_programs_are_not_refused(name):
    model = Model(PROGRAMS[name])
    assert autobd.split(copy.deepcopy(model), model, torch.randn(8, 6), blocks=1).verify()


@pytest.mark.parametrize("name", ["positions", "noise_table", "activation_table", "normalised_input"])
def test_what_is_made_once_is_carried_or_keeps_cuts_away(name):
    model = Model(PROGRAMS[name])
    split = autobd.split(copy.deepcopy(model), model, torch.randn(8, 6), blocks=1)
    flows = Dataflow(split.teacher, "output", trained=False), Dataflow(split.student, "output", trained=True)
    of_both = set.intersection(*({cut.aliases[-1] for cut in candidates(flow)} for flow in flows))
    assert of_both
    for name in of_both:
        assert autobd.split(copy.deepcopy(model), model, torch.randn(8, 6), cuts=[(name, name)]).verify().exact


def test_a_child_that_is_called_by_its_forward_is_watched_too():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.child, self.b = nn.Linear(6, 6), Model(counted), nn.Linear(6, 6)

        def forward(self, x):
            return self.b(self.child.forward(self.a(x)))

    assert_exact_or_refused(Outer, 8)
    assert_exact_or_refused(lambda: nn.Sequential(nn.Linear(6, 6), Outer(), nn.Linear(6, 6)), 8)


def test_a_leaf_that_counts_runs_once_wherever_it_stands():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.step, self.a, self.b = Stepper(), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            z = self.step(x)
            return self.b(self.a(z)) + z

    assert_exact_or_refused(Counting, 8)


class OwnDice(nn.Module):
    """Drops its layer by a generator of its own."""

    def __init__(self, generator):
        super().__init__()
        self.layer, self.generator = nn.Linear(6, 6), generator

    def forward(self, x):
        return x if self.training and self.generator.random() < 0.2 else self.layer(x)


@pytest.mark.parametrize("make", [lambda: random.Random(0), lambda: np.random.default_rng(1)])
def test_generators_of_the_models_own_are_noticed_and_not_advanced(make):
    model = nn.Sequential(nn.Linear(6, 6), OwnDice(make()), nn.Linear(6, 6))
    captured = autobd.capture(model, torch.randn(4, 6))
    assert list(captured.opaque) == ["1"]
    assert model[1].generator.random() == make().random()


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.a.weight.data.clamp_(-0.1, 0.1),
        lambda m: m.leaf.plain.add_(1),
        lambda m: m.a.weight.data.copy_(torch.renorm(m.a.weight.data, 2, 0, 0.1)),
    ],
    ids=["parameter data", "plain tensor", "max norm"],
)
def test_what_a_forward_writes_into_its_tensors_is_undone_by_verify_and_for_the_teacher(write):
    def forward(m, x):
        with torch.no_grad():
            write(m)
        return m.b(m.leaf(m.a(x)))

    teacher, student = Model(forward), Model(lambda m, x: m.b(m.leaf(m.a(x))))
    before = fingerprint(teacher), teacher.leaf.plain.clone()
    with contextlib.suppress(AutobdError):
        autobd.distill(teacher, student, [torch.randn(4, 6)], blocks=1, progress=False)
    assert_same(before[0], fingerprint(teacher))
    assert torch.equal(before[1], teacher.leaf.plain)


class Clamped(nn.Module):
    """A leaf that reads a value, so that it is run on real tensors, and writes its own weight."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def forward(self, x):
        self.weight.data.clamp_(-x.abs().max().item() / 100, 0.01)
        return x * self.weight


def test_a_leaf_that_capture_runs_for_real_keeps_its_weights():
    model = nn.Sequential(nn.Linear(6, 6), Clamped(), nn.Linear(6, 6))
    before = fingerprint(model)
    autobd.capture(model, torch.randn(4, 6))
    assert_same(before, fingerprint(model))


class Box:
    seen = 0


def test_nested_containers_and_objects_come_back_too():
    def forward(m, x):
        m.nested["k"][0] += 1
        m.box.seen += 1
        m.box.log.append(x)
        m.queue.append(1)
        return m.b(m.a(x))

    model = Model(forward)
    model.nested, model.box, model.queue = {"k": [0]}, Box(), deque([0])
    model.box.log = []
    for make in (lambda: autobd.capture(model, torch.randn(4, 6)), lambda: verified(model)):
        with contextlib.suppress(AutobdError):
            make()
        assert model.nested == {"k": [0]}
        assert model.box.seen == 0
        assert model.box.log == []
        assert list(model.queue) == [0]


def verified(model):
    return autobd.split(copy.deepcopy(model), model, torch.randn(4, 6), blocks=1).verify()
