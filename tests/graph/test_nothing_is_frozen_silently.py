"""What a recording would freeze keeps the smallest module around it whole, or is an error that names the place."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import autobd
from autobd.errors import CaptureError


class Around(nn.Module):
    """`inner`, with a child so that it is no leaf by itself, between two linear layers."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), inner, nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Inner(nn.Module):
    """A module whose forward is `function(self, x)`; it has two children."""

    def __init__(self, function):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 6), nn.Linear(6, 6), Remembering(6, 6)
        self.function = function
        self.register_buffer("state", torch.ones(6))
        self.calls, self.memory, self.log = 0, None, []

    def forward(self, x):
        return self.function(self, x)


class Double(torch.autograd.Function):
    """Twice the input; the gradient is *three* times, so that losing the backward shows."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


bound_earlier = Double.apply


@torch.jit.script
def scripted(x):
    return x * 2 + 1


def value_branch(m, x):
    return m.one(x) if x.mean() > 0 else m.two(x)


def counter(m, x):
    m.calls += 1
    return m.one(x) * m.calls


def memory(m, x):
    m.memory = m.one(x).detach() if m.memory is None else m.memory * 0.5
    return x + m.memory.mean()


def growing_list(m, x):
    y = m.one(x) + (m.log[-1].mean() if m.log else 0.0)
    m.log.append(y.detach())
    return y


class Memo:
    """A cache that a caller makes for each forward pass."""

    seen = 0


class Remembering(nn.Linear):
    def forward(self, x, memo):
        memo.seen += 1
        return super().forward(x) * memo.seen


def rebound_buffer(m, x):
    m.state = m.state * 0.5
    return m.one(x) * m.state


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        return m.one(x).float()


HAZARDS = {
    "custom autograd.Function": lambda m, x: m.two(Double.apply(m.one(x))),
    "custom autograd.Function, bound at import": lambda m, x: m.two(bound_earlier(m.one(x))),
    "jit.script function": lambda m, x: m.two(scripted(m.one(x))),
    "torch.from_numpy": lambda m, x: m.one(x) + torch.from_numpy(np.ones(6, dtype=np.float32)),
    "torch.Tensor(...)": lambda m, x: m.one(x) + torch.Tensor([1.0] * 6),
    "branch on a value": value_branch,
    ".item()": lambda m, x: m.one(x) * x.abs().max().item(),
    ".numpy()": lambda m, x: m.one(x) + float(x.detach().numpy().mean()),
    "torch.equal": lambda m, x: m.one(x) if torch.equal(x, x * 1.5) else m.two(x),
    "Python randomness": lambda m, x: m.one(x) * random.random(),
    "NumPy randomness": lambda m, x: m.one(x) * float(np.random.rand()),
    "torch randomness that steers Python": lambda m, x: m.one(x) if torch.rand(()) < 0.5 else m.two(x),
    "shape that depends on values": lambda m, x: m.one(x) + x[x > 0].sum(),
    "Python counter": counter,
    "Python memory": memory,
    "list that grows": growing_list,
    "object made for each call": lambda m, x: m.three(m.one(x), Memo()),
    "buffer bound anew": rebound_buffer,
    "autocast region": autocast,
    "number that is not linear in the batch": lambda m, x: m.one(x) * (1 / x.shape[0]),
    "operations that depend on the batch": lambda m, x: sum((m.one(x) for _ in range(x.shape[0])), 0 * x),
}


ATTRIBUTES = ("Python counter", "Python memory", "list that grows")


def run(module, x):
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    output = module(x)
    output.sum().backward()
    return output


@pytest.mark.parametrize("name", HAZARDS)
def test_hazard_keeps_its_module_whole_and_stays_alive(name):
    model = Around(Inner(HAZARDS[name])).eval()
    captured = autobd.capture(model, torch.randn(4, 6))
    assert list(captured.opaque) == ["inner"], "the smallest module, and no other"
    assert "inner" in str(captured)
    for x in (torch.randn(4, 6), torch.randn(4, 6) + 3, torch.randn(5, 6) - 3):
        results = []
        for module in (model, captured.module.eval()):
            model.zero_grad()
            model.inner.calls, model.inner.memory, model.inner.log = 0, None, []
            model.inner.state = torch.ones(6)
            results.append((run(module, x), [p.grad for p in model.parameters()]))
        assert torch.equal(results[0][0], results[1][0])
        for a, b in zip(results[0][1], results[1][1], strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name in HAZARDS if name not in ATTRIBUTES])
def test_hazard_in_the_models_own_code_is_an_error_with_the_line(name):
    model = Inner(HAZARDS[name])
    with pytest.raises(CaptureError, match=r"Inner\.forward") as error:
        autobd.capture(model, torch.randn(4, 6))
    if name not in ("buffer bound anew", "Python randomness", "NumPy randomness"):
        assert "test_nothing_is_frozen_silently.py:" in str(error.value)
    assert "submodule" in str(error.value)


def test_without_gradients_stays_without_gradients():
    def frozen_part(m, x):
        with torch.no_grad():
            y = m.one(x)
        return m.two(y + x)

    for model in (Inner(frozen_part), Around(Inner(frozen_part))):
        captured = autobd.capture(model, torch.randn(4, 6))
        assert not captured.opaque
        x, grads = torch.randn(3, 6), []
        for module in (model, captured.module):
            model.zero_grad()
            module(x).sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert [g is None for g in grads[0]] == [g is None for g in grads[1]]
        assert all(a is None or torch.equal(a, b) for a, b in zip(*grads, strict=True))
        with torch.no_grad():
            captured.module(x)
            assert not torch.is_grad_enabled()
        assert torch.is_grad_enabled()


def test_functional_dropout_follows_the_mode():
    def forward(m, x):
        return m.two(functional.dropout(m.one(x), 0.5, m.training) + x)

    model = Inner(forward)
    module = autobd.capture(model, torch.randn(4, 6)).module
    x = torch.randn(8, 6)
    for training in (True, False):
        model.train(training), module.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(module(x), expected)
    assert torch.equal(module.eval()(x), module.eval()(x))
    assert not torch.equal(module.train()(x), module.train()(x))


def masked_by_numpy(m, x):
    if m.training:
        mask = np.random.rand(*x.shape) < 0.2
        x = x.masked_fill(torch.tensor(mask), 0)
    return m.two(m.one(x))


def skipped_by_torch(m, x):
    if m.training and torch.rand([]) < 0.2:
        return x
    return m.two(m.one(x))


@pytest.mark.parametrize("function", [masked_by_numpy, skipped_by_torch])
def test_dice_that_steer_python_are_named_and_no_matter_for_a_teacher(function):
    model = Inner(function)
    with pytest.raises(CaptureError, match=r"Inner\.forward draws random numbers") as error:
        autobd.capture(model, torch.randn(4, 6))
    assert f"in {function.__name__}" in str(error.value)
    assert "switch it off for distillation" in str(error.value)
    assert "submodule" in str(error.value)
    assert not autobd.capture(model, torch.randn(4, 6), train=False).opaque
    whole = autobd.capture(Around(model), torch.randn(4, 6))
    assert "draws random numbers" in whole.opaque["inner"]


def test_a_value_with_dropout_before_it_is_not_taken_for_dice():
    model = Inner(lambda m, x: m.one(x) if functional.dropout(x, 0.5, m.training).mean() > 0 else m.two(x))
    with pytest.raises(CaptureError, match="uses the value of a tensor"):
        autobd.capture(model, torch.randn(4, 6))


def test_a_model_that_fails_on_the_example_says_where():
    with pytest.raises(CaptureError, match=r"module 'inner'.*fails on the example") as error:
        autobd.capture(Around(Inner(lambda m, x: m.one(x[:, :2]))), torch.randn(4, 6))
    assert "float32[4, 6]" in str(error.value)
