"""Attributes that a call leaves for the next one: caches are opened, memory keeps its module whole or is refused."""

import copy

import pytest
import torch
from networks import assert_same, fingerprint
from torch import nn
from torch.nn import functional

import autobd
from autobd.errors import CaptureError


class Inner(nn.Module):
    """Two linear layers; its forward is `function(self, x)`."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function
        self.part = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
        self.numbers, self.start = None, torch.ones(6)
        self.table, self.flag, self.rows, self.count, self.seen = None, False, None, 0, {}

    def forward(self, x):
        return self.function(self, x)


def model_with(*functions):
    return nn.Sequential(nn.Linear(6, 6), *(Inner(f) for f in functions), nn.Linear(6, 3))


def doubled(module, args, output):
    return output * 2


def flag_and_hooks(m, x):
    if not m.flag:
        m.part.register_forward_hook(doubled)
        m.flag = True
    return m.two(m.part(x))


def table_of_numbers(m, x):
    if m.numbers is None:
        m.numbers = torch.zeros(6)
        m.numbers[1:] = torch.arange(5).float()
    return m.two(m.one(x) + m.numbers)


def shape_noted(m, x):
    m.height = x.shape[1]
    return m.two(m.one(x)).reshape(-1, m.height)


def activation_kept_for_others_to_look_at(m, x):
    m.table = m.one(x)
    return m.two(m.table)


def activation_in_a_dict(m, x):
    m.seen["one"] = m.one(x)
    return m.two(m.seen["one"])


def weights_in_a_dict(m, x):
    if "bias" not in m.seen:
        m.seen["bias"] = m.one.bias * 2
    return m.two(m.one(x) + m.seen["bias"])


CACHES = [flag_and_hooks, table_of_numbers, shape_noted, activation_kept_for_others_to_look_at]
CACHES += [activation_in_a_dict, weights_in_a_dict]


def hooks_on_a_layer(m, x):
    if not m.one._forward_hooks:
        m.one.register_forward_hook(doubled)
    return m.two(m.one(x))


def hooks_after_the_call(m, x):
    y = m.two(m.part(x))
    if not m.part._forward_hooks:
        m.part.register_forward_hook(doubled)
    return y


def rows_of_the_first_call(m, x):
    m.rows = x.shape[0] if m.rows is None else m.rows
    return m.two(m.one(x) * m.rows)


def table_of_the_first_batch(m, x):
    if m.table is None:
        m.table = torch.full((1,), x.shape[0])
    return m.two(m.one(x) * m.table)


def table_of_weights(m, x):
    if m.table is None:
        m.table = m.one.weight.detach().mean()
        m.one.weight.data.mul_(2)
    return m.two(m.one(x) * m.table)


def table_changed_in_place(m, x):
    if m.table is None:
        m.table = torch.zeros(6)
    m.table.add_(1)
    return m.two(m.one(x) + m.table)


def read_before_it_is_set(m, x):
    y = m.two(m.one(x) + m.start)
    m.start = torch.arange(6).float()
    return y


def activation_read_before_it_is_set(m, x):
    y = m.two(m.one(x) + m.start)
    m.start = y.detach().mean(0)
    return y


def new_buffer(m, x):
    if "late" not in m._buffers:
        m.register_buffer("late", torch.arange(6).float())
    return m.two(m.one(x) + m.late)


def new_parameter(m, x):
    y = m.two(m.one(x))
    m.one.bias = nn.Parameter(torch.ones(6))
    return y


def memory(m, x):
    z = m.one(x) if m.table is None else m.one(x) + m.table
    m.table = z.detach().mean()
    return m.two(z)


def memory_in_a_dict(m, x):
    z = m.one(x) + m.seen["last"] if "last" in m.seen else m.one(x)
    m.seen["last"] = z.detach().mean()
    return m.two(z)


def every_third_call(m, x):
    m.count += 1
    return m.two(m.one(x)) if m.count % 3 else m.one(x)


def counter_in_a_nested_list(m, x):
    m.nested = getattr(m, "nested", [[0]])
    m.nested[0][0] += 1
    return m.two(m.one(x)) if m.nested[0][0] < 4 else m.one(x)


def alternates(m, x):
    m.flag = not m.flag
    return m.two(m.one(x))


def removed_after_the_first_call(m, x):
    if "count" in vars(m):
        del m.count
        return m.one(x)
    return m.two(m.one(x))


MEMORIES = [
    read_before_it_is_set,
    activation_read_before_it_is_set,
    new_buffer,
    new_parameter,
    hooks_on_a_layer,
    rows_of_the_first_call,
    table_of_the_first_batch,
    table_of_weights,
    table_changed_in_place,
    memory,
]
MEMORIES += [memory_in_a_dict, every_third_call, counter_in_a_nested_list, alternates, removed_after_the_first_call]


def assert_calls_are_equal(model, captured):
    """Calls in a row, at several batch sizes, of the model and of its graph over a copy."""
    for training in (False, True):
        whole, parts = copy.deepcopy(model).train(training), copy.deepcopy(model).train(training)
        module = captured.bind(captured.graph, parts)
        for rows in (8, 8, 3, 8, 5, 5):
            x = torch.randn(rows, 6)
            assert torch.equal(whole(x), module(x))


@pytest.mark.parametrize("function", CACHES, ids=lambda f: f.__name__)
def test_a_cache_is_opened(function):
    model = model_with(function)
    before = fingerprint(model)
    captured = autobd.capture(model, torch.randn(8, 6))
    assert not captured.opaque
    assert_same(before, fingerprint(model))
    assert_calls_are_equal(model, captured)


@pytest.mark.parametrize("function", MEMORIES, ids=lambda f: f.__name__)
def test_memory_keeps_its_module_whole(function):
    model = model_with(function)
    before = fingerprint(model)
    captured = autobd.capture(model, torch.randn(8, 6))
    assert list(captured.opaque) == ["1"]
    assert_same(before, fingerprint(model))
    assert_calls_are_equal(model, captured)


@pytest.mark.parametrize("function", MEMORIES, ids=lambda f: f.__name__)
def test_only_the_module_with_memory_is_kept_whole(function):
    model = model_with(flag_and_hooks, function, table_of_numbers, flag_and_hooks)
    captured = autobd.capture(model, torch.randn(8, 6))
    assert list(captured.opaque) == ["2"]
    assert_calls_are_equal(model, captured)


@pytest.mark.parametrize("function", [*CACHES, *MEMORIES], ids=lambda f: f.__name__)
def test_in_the_models_own_code_it_is_exact_or_refused(function):
    model = Inner(function)
    before = fingerprint(model)
    try:
        captured = autobd.capture(model, torch.randn(8, 6))
    except CaptureError:
        assert function not in CACHES
        assert_same(before, fingerprint(model))
        return
    assert_same(before, fingerprint(model))
    if function not in (every_third_call, counter_in_a_nested_list):  # what the model's own calls count is its own
        assert_calls_are_equal(model, captured)


class Reads(nn.Module):
    """Does what an attribute of another module says."""

    def __init__(self, other, layer=None):
        super().__init__()
        self.layer, self.other = layer or nn.Linear(6, 6), [other]

    def forward(self, x):
        return self.layer(x) * (2 if self.other[0].flag else 1)


class ReadsInside(Reads):
    """Likewise, as one operation: it looks at a value."""

    def forward(self, x):
        return super().forward(x) if x.mean() < 100 else x


@pytest.mark.parametrize("kind", [Reads, ReadsInside])
@pytest.mark.parametrize("later", [True, False])
def test_what_another_module_reads_is_set_by_real_code(kind, later):
    setter = Inner(flag_and_hooks)
    reader = kind(setter)
    model = nn.Sequential(*((reader, setter) if later else (setter, reader)), nn.Linear(6, 6))
    captured = autobd.capture(model, torch.randn(8, 6))
    assert_calls_are_equal(model, captured)


def test_hooks_that_are_installed_after_a_call():
    model = model_with(hooks_after_the_call)
    captured = autobd.capture(model, torch.randn(8, 6))
    assert "1" in captured.opaque
    assert_calls_are_equal(model, captured)


def test_an_attribute_that_is_set_on_a_layer_after_its_call():
    class Sets(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x):
            y = self.layer(self.norm(x))
            self.norm.momentum = self.norm.momentum / 2
            return y

    captured = autobd.capture(nn.Sequential(Sets(), nn.Linear(6, 6)), torch.randn(8, 6))
    assert list(captured.opaque) == ["0"]


def test_a_generator_of_the_models_own_still_keeps_its_module_whole():
    model = model_with(lambda m, x: m.two(functional.dropout(m.one(x), 0.5, m.training)), every_third_call)
    assert list(autobd.capture(model, torch.randn(8, 6)).opaque) == ["2"]
