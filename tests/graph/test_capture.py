"""`capture`: inputs and outputs of every kind, the user's own submodules, and a model that comes back untouched."""

import dataclasses
import logging
import random
from collections import namedtuple

import pytest
import torch
from networks import Branches, Net, Residual, assert_same, fingerprint, images
from torch import nn

import autobd
from autobd.errors import InputError
from autobd.graph.merge import Merger

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple = ()
    loss: torch.Tensor | None = None


class Flexible(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.embed, self.head, self.make = nn.Linear(4, 8), nn.Linear(8, 2), make

    def forward(self, x, mask=None, *, scale=1.0, extra=None):
        h = self.embed(x if not isinstance(x, dict) else x["a"] + x["b"][0])
        if mask is not None:
            h = h * mask
        if extra is not None:
            h = h + extra
        return self.make(self.head(h) * scale, h)


@pytest.mark.parametrize(
    "example",
    [
        torch.randn(3, 4),
        (torch.randn(3, 4), torch.ones(3, 1)),
        {"x": torch.randn(3, 4), "scale": 2.0},
        {"x": torch.randn(3, 4), "mask": torch.ones(3, 1), "extra": torch.tensor(0.5)},
        ({"a": torch.randn(3, 4), "b": [torch.randn(3, 4)]},),
    ],
    ids=["tensor", "tuple", "keywords", "keywords with a scalar tensor", "nested"],
)
def test_inputs_of_every_kind(example):
    model = Flexible(lambda y, h: y)
    captured = autobd.capture(model, example)
    arguments = captured.example
    assert torch.equal(captured.module(*arguments.tensors), model(*arguments.args, **arguments.kwargs))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda y, h: y, ["output"]),
        (lambda y, h: (y, [h]), ["0", "1.0"]),
        (lambda y, h: {"logits": y, "all": (h, y)}, ["logits", "all.0", "all.1"]),
        (Pair, ["0", "1"]),
        (lambda y, h: Output(y, (h,)), ["logits", "hidden.0"]),
    ],
    ids=["tensor", "tuple", "dict", "namedtuple", "dataclass"],
)
def test_outputs_of_every_kind_come_back_in_their_own_type(make, names):
    model = Flexible(make)
    captured = autobd.capture(model, torch.randn(3, 4))
    assert list(captured.outputs) == names
    x = torch.randn(5, 4)
    expected, got = model(x), captured.module(x)
    assert type(got) is type(expected)
    flat = [torch.utils._pytree.tree_leaves(vars(o) if dataclasses.is_dataclass(o) else o) for o in (expected, got)]
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True) if isinstance(a, torch.Tensor))


def test_a_returned_object_that_a_graph_cannot_make_is_left_out_and_noted():
    class Cache:
        def __init__(self, keys):
            self.keys = keys

    for make in (Cache, lambda h: Cache([Cache(Cache(h))])):
        captured = autobd.capture(Flexible(lambda y, h, m=make: {"logits": y, "cache": m(h)}), torch.randn(3, 4))
        assert list(captured.outputs) == ["logits"]
        assert "Cache" in captured.notes[0]


def test_graph_holds_the_users_own_submodules_and_parameters():
    model = Net([Residual(6, True, True, 0.1), Branches(6, False, True, 0.1)], False)
    captured = autobd.capture(model, images())
    for node in captured.graph.nodes:
        if node.op == "call_module":
            assert captured.module.get_submodule(node.target) is model.get_submodule(node.target)
    assert {id(p) for p in captured.module.parameters()} == {id(p) for p in model.parameters()}


def test_nodes_know_shape_dtype_flops_and_parameter_bytes():
    captured = autobd.capture(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(128, 5)), images(4))
    nodes = {n.name: n for n in captured.graph.nodes}
    conv, linear = (n for name, n in nodes.items() if n.op == "call_module" and n.meta["flops"])
    assert conv.meta["shape"] == (4, 8, 4, 4)
    assert conv.meta["dims"] == ((1, 0), (0, 8), (0, 4), (0, 4))
    assert conv.meta["dtype"] is torch.float32
    assert conv.meta["flops"] == 2 * 4 * 8 * 4 * 4 * 27
    assert conv.meta["parameter_bytes"] == 4 * 8 * 27
    assert linear.meta["flops"] == 2 * 4 * 128 * 5
    assert captured.flops == conv.meta["flops"] + linear.meta["flops"]


def test_flops_agree_with_torchs_own_counter():
    from torch.utils.flop_counter import FlopCounterMode
    from torchvision.models import resnet18

    model = resnet18().eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.randn(2, 3, 64, 64))
    assert autobd.capture(model, torch.randn(2, 3, 64, 64)).flops == counter.get_total_flops()


class Caching(nn.Module):
    """Fills a cache and a list of hooks on its first call, as LeViT and transformers do."""

    def __init__(self):
        super().__init__()
        self.bias, self.proj = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
        self.cache = {}

    def forward(self, x):
        if "bias" not in self.cache:
            self.cache["bias"] = self.bias * 2
        return self.proj(x) + self.cache["bias"]


def test_the_model_comes_back_untouched():
    model = nn.Sequential(Net([Residual(6, True, True, 0.1)], True), nn.Sequential(Caching(), nn.BatchNorm1d(4)))
    model[0].parts[0].eval()
    model[0].stem.requires_grad_(False)
    model[1][1].weight.grad = torch.ones(4)
    example = images()
    before, rng = fingerprint(model), torch.get_rng_state()
    captured = autobd.capture(model, example)
    assert_same(before, fingerprint(model))
    assert torch.equal(rng, torch.get_rng_state())
    assert not captured.opaque
    assert nn.Module.__call__.__qualname__.startswith("Module.")


def test_what_train_mode_alone_keeps_whole_is_whole_in_eval_mode_too():
    class Dice(Caching):
        def forward(self, x):
            return super().forward(x) * (random.random() if self.training else 1.0)

    captured = autobd.capture(nn.Sequential(nn.Linear(4, 4), nn.Sequential(Dice())), torch.randn(3, 4))
    assert list(captured.opaque) == ["1.0"]


def test_a_failed_capture_leaves_the_model_untouched_too():
    class Broken(Caching):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no such input")

    model = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(Broken()))
    before = fingerprint(model)
    with pytest.raises(autobd.errors.CaptureError, match="no such input"):
        autobd.capture(model, torch.randn(3, 4))
    assert_same(before, fingerprint(model))


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda m: nn.DataParallel(nn.DataParallel(m)), torch.compile])
def test_wrapped_models_are_unwrapped(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert autobd.capture(wrap(model), torch.randn(3, 4)).model is model


def test_auxiliary_heads_use_the_eval_graph_and_say_so():
    from torchvision.models import googlenet

    captured = autobd.capture(googlenet(num_classes=5, init_weights=False), torch.randn(2, 3, 64, 64))
    assert not captured.same_in_train
    assert "aux1" in captured.notes[0]


@pytest.mark.parametrize(
    ("model", "example", "message"),
    [
        (nn.LazyLinear(3), torch.randn(2, 4), "has no shape yet"),
        (nn.Sequential(nn.Linear(4, 4)), "text", "cannot be passed to a model"),
        (nn.Sequential(nn.Linear(4, 4)), torch.randn(0, 4), "no rows"),
        (nn.Sequential(nn.Linear(4, 4)), torch.tensor(1.0), "no tensor with a batch dimension"),
        ("model", torch.randn(2, 4), "Not a model"),
    ],
)
def test_input_that_cannot_be_captured(model, example, message):
    with pytest.raises(InputError, match=message):
        autobd.capture(model, example)


def test_an_example_that_does_not_fit_is_one_clear_error_and_no_log_entry():
    log, entries = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = entries.append
    log.addHandler(handler)
    try:
        with pytest.raises(autobd.errors.CaptureError, match=r"fails on the example.*RuntimeError"):
            autobd.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(3, 5))
        assert not entries
        with torch._subclasses.FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(3, 5) @ torch.ones(4, 2)
        assert entries, "torch's log is as it was"
    finally:
        log.removeHandler(handler)


def test_a_parameter_that_is_handed_to_a_layer_is_not_taken_for_changed():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.drop, self.layer = nn.Embedding(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)
            with torch.no_grad():
                self.table.weight.mul_(2)

        def forward(self, x):
            for _ in range(3):
                x = self.layer(x) @ self.drop(self.table.weight)
            return x

    model = Table()
    captured = autobd.capture(model, torch.randn(3, 6))
    assert not any(n.meta["mutates"] for n in captured.graph.nodes)
    x, results = torch.randn(4, 6), []
    for module in (model, captured.module):
        module.train()
        torch.manual_seed(1)
        results.append(module(x))
    assert torch.equal(*results)


class Pathed(nn.Module):
    """A drop path that draws in its own code, in train mode alone, between two layers."""

    def __init__(self, p):
        super().__init__()
        self.first, self.path, self.last = nn.Linear(6, 6), DropPath(p), nn.Linear(6, 6)

    def forward(self, x):
        return x + self.path(self.last(self.first(x)))


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or not self.p:
            return x
        return x * (torch.rand(x.shape[0], 1) >= self.p) / (1 - self.p)


class Scaling(nn.Module):
    """Does something else in each mode, and has children."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(x.relu()) if self.training else self.layer(x)


def test_the_smallest_module_that_differs_by_mode_is_kept_whole_and_all_alike_at_once(monkeypatch):
    model = nn.Sequential(*(nn.Sequential(Pathed(p), Scaling(), nn.ReLU()) for p in (0.0, 0.1, 0.2, 0.3)))
    attempts = []
    merge = Merger.merge
    monkeypatch.setattr(Merger, "merge", lambda self: (attempts.append(self), merge(self))[1])
    captured = autobd.capture(model, torch.randn(4, 6))
    assert sorted(captured.opaque) == ["0.1", "1.0.path", "1.1", "2.0.path", "2.1", "3.0.path", "3.1"]
    assert len(attempts) == 2
    x = torch.randn(5, 6)
    for training in (False, True):
        results = []
        for module in (model, captured.module):
            module.train(training), model.train(training)
            torch.manual_seed(1)
            results.append(module(x))
        assert torch.equal(*results)


def test_what_one_mode_does_in_vain_is_no_difference():
    class Slices(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last, self.scale = nn.Linear(6, 6), nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x):
            state = None
            if not self.training:
                state = torch.zeros(len(x), 6)
                state.copy_(x)  # nobody reads it
            x = self.layer(x)
            x = x if self.training else x[:, -6:]  # all of it
            return self.last(x) * self.scale

    model = Slices()
    captured = autobd.capture(model, torch.randn(4, 6))
    assert [n.op for n in captured.graph.nodes].count("call_module") == 2
    for training in (False, True):
        captured.module.train(training), model.train(training)
        x, grads, results = torch.randn(5, 6), [], []
        for module in (model, captured.module):
            model.zero_grad()
            results.append(module(x))
            results[-1].sum().backward()
            grads.append([p.grad for p in model.parameters()])
        assert torch.equal(*results)
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_slice_that_stops_gradients_is_a_difference():
    class Detaches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.layer(x)
            return self.last(x.detach() if self.training else x)

    model = nn.Sequential(Detaches(), nn.Linear(6, 6))
    assert list(autobd.capture(model, torch.randn(4, 6)).opaque) == ["0"]


def test_captures_inside_inference_mode_and_no_grad():
    for context in (torch.inference_mode(), torch.no_grad()):
        with context:
            captured = autobd.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4))
        assert captured.module(torch.randn(2, 4)).requires_grad


def test_operators_are_recorded_under_the_names_that_run():
    class Arithmetic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            y = self.layer(x) ** 2
            y **= 3
            z = -(2**y) + (1 - y) / 2 - 3 // (abs(y) + 1) + 1 / (y + 2)
            z @= self.layer.weight
            return (z % 3) * (z > 0) ^ (z < 1) if z.dtype == torch.bool else z % 3 + (y >= 1) * z

    model, x = Arithmetic(), torch.randn(4, 3)
    captured = autobd.capture(model, torch.randn(2, 3))
    assert torch.equal(captured.module(x), model(x))
