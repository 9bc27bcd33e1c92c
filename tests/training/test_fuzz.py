"""Whatever `distill` and model specs are given: they work, or say what is wrong; never another error, never a hang."""

import copy
import math
import string
import warnings

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from networks import assert_same, fingerprint, mlp
from torch import nn

import autobd
from autobd.errors import AutobdError
from autobd.specs import load_model

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [torch.randn(4, 6, generator=GENERATOR) for _ in range(3)]
PAIRS = [(x, torch.arange(4)) for x in BATCHES]
EXAMPLES = 150

JUNK = [
    *(None, True, False, -1, 0, 1, 2, 1.5, math.nan, math.inf, "", "x", "auto", b"", (), [], {}, [None], {"x": 1}),
    *(
        object(),
        len,
        lambda *_: None,
        torch.zeros(2),
        torch.tensor(3),
        nn.Linear(6, 6),
        autobd.Recipe(logits=False),
        int,
    ),
]


class Odd(nn.Module):
    """A forward that cannot be recorded."""

    def forward(self, x):
        return x if x.sum() > 0 else -x


class Raises:
    def __len__(self):
        raise RuntimeError("no length")

    def __iter__(self):
        raise RuntimeError("no data")


def endless():
    while True:
        yield BATCHES[0]


MODELS = [
    *(lambda: mlp(16), lambda: mlp(4, seed=1), lambda: mlp(16, blocks=1), lambda: mlp(16, features=5)),
    *(lambda: nn.Sequential(), lambda: nn.Linear(6, 6), lambda: nn.Identity(), lambda: Odd(), lambda: nn.ReLU()),
    *(lambda: nn.Sequential(nn.Linear(6, 0)), lambda: nn.Linear(6, 6, device="meta"), lambda: mlp(8).half()),
    *(lambda: nn.LSTM(6, 6), lambda: nn.Embedding(6, 6), lambda: nn.Sequential(nn.Flatten(0), nn.Linear(24, 6))),
    *(
        lambda: nn.Linear,
        lambda: None,
        lambda: "resnet18",
        lambda: mlp(4).state_dict(),
        lambda: mlp(4).requires_grad_(False),
    ),
]
GOOD = {
    "data": [
        *(BATCHES, PAIRS, BATCHES[0], [], [BATCHES[0], torch.randn(2, 6)], [BATCHES[0], torch.randn(4, 5)], Raises()),
        *([{"input": x} for x in BATCHES], [x.double() for x in BATCHES], [x * math.nan for x in BATCHES], [(), ()]),
        *([torch.zeros(0, 6)], [torch.zeros(6)], [torch.tensor(1.0)], ["text"], torch.zeros(0, 6)),
        [x.long() for x in BATCHES],
        torch.utils.data.TensorDataset(torch.cat(BATCHES), torch.arange(12)),
    ],
    "devices": [1, "cpu", ["cpu"], ["cpu:0"], "cuda:7", ["mps", "cpu"], "4xA100", -3],
    "strategy": ["tr", "tr+dpu", "dp", "ls", "ir", "ahd", "TR", "best"],
    "profile": ["auto", "analytic", "measured"],
    "threads": [1, 2],
    "timeout": [20.0, 1e-9, -1.0],
    "recipe": [
        *(autobd.Recipe(steps=2), autobd.Recipe(loss=lambda s, t: "x"), autobd.Recipe(loss=lambda s, t: s), ),
        *(autobd.Recipe(optimizer=lambda p, lr: None), autobd.Recipe(optimizer=nn.Linear), autobd.Recipe(lr=1e30)),
        *(autobd.Recipe(groups=lambda n, p: 3), autobd.Recipe(block_input=lambda progress: 7), autobd.Recipe(clip=0.0)),
        *(autobd.Recipe(target_loss="ce"), autobd.Recipe(freeze=["*"]), autobd.Recipe(lr={9: 1.0})),
        *(autobd.Recipe(lr=lambda block, progress: "x"), autobd.Recipe(groups=lambda n, p: 1 / 0)),
        autobd.Recipe(lr=lambda block, progress: 1 / 0),
        autobd.Recipe(precision="bf16", accumulate=2, keep_best=True),
    ],
    "epochs": [1, 2],
    "batch_size": [1, 3, 100],
    "example": [BATCHES[0], PAIRS[0], {"input": BATCHES[0]}, torch.zeros(4, 5), torch.zeros(0, 6)],
    "inputs": [(None, None), (lambda b: b, lambda b: 3), (lambda b: b[0], None), (1, 2, 3)],
    "targets": [lambda b: b[1], lambda b: None, lambda b: "x", lambda b: 1 / 0],
    "own_rows": [True, False],
    "validate": [
        *(PAIRS, autobd.Validation(PAIRS, {"size": lambda o, t: o.norm()}), autobd.Validation([], {})),
        BATCHES,
        Raises(),
    ],
    "recalibrate": [True, 1],
    "finish": [1, autobd.Finish(1), autobd.Finish(1, loss="ce"), autobd.Finish(1, loss=lambda o, t: "x")],
    "blocks": [1, 2, 3, 50],
    "cuts": [
        *([("0", "0")], [("1", "0")], [("0", "0"), ("0", "0")], [("1", "1"), ("0", "0")], [("9", "9")], [("0",)]),
        [(0, 0)],
    ],
    "adapters": ["auto", "matched", "trainable", "none", None],
    "resample": [True],
    "hybrid": [True],
    "callbacks": [
        *([autobd.Callback()], [3], [type("Bad", (), {"on_step": 3})()]),
        [type("RaisesLast", (), {"on_end": lambda s, r: 1 / 0})()],
    ],
    "checkpoint": ["/proc/nothing", 3, autobd.Recipe()],
    "resume": ["auto", "/proc/nothing"],
    "candidates": [
        *({"1": [nn.Linear(6, 6)]}, {"9": [nn.Linear(6, 6)]}, {"1": [nn.Linear(6, 5)]}, {"1": nn.Linear(6, 6)}),
        *({"1": []}, {"": [mlp(4)]}),
    ],
    "budget": [autobd.Budget(parameters=1), autobd.Budget()],
    "ties": ["auto", "first", "together"],
    "init": ["teacher"],
    "seed": [3, -1, 2**70],
    "progress": [False],
}  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Where checkpoints of any name may lie."""
    monkeypatch.chdir(tmp_path)


def named(name):
    return st.sampled_from([*GOOD[name], *JUNK]).map(lambda value: (name, value))


arguments = st.lists(st.sampled_from(sorted(GOOD)), min_size=1, max_size=3, unique=True).flatmap(
    lambda names: st.tuples(*map(named, names)).map(dict)
)


def refusal(what):
    """What the error says that `what` ends with, if it does."""
    try:
        what()
    except AutobdError as error:
        return str(error)


def check(teacher, student, options):
    """Errors are autobd's own; the teacher is as it was, and so is a student that was not trained."""
    options = {"data": BATCHES, "devices": 1, "threads": 1, "progress": False, **options}
    data = options.pop("data")
    watched = [model for model in (teacher, student) if isinstance(model, nn.Module)]
    watched = [model for model in watched if not any(p.is_meta for p in model.parameters())]
    before, states = [fingerprint(m) for m in watched], [copy.deepcopy(m.state_dict()) for m in watched]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = refusal(lambda: autobd.distill(teacher, student, data, **options))
    one_epoch = options.get("epochs") is None and options.get("finish") is None
    if said and watched and watched[-1] is student is not teacher and one_epoch:
        assert_same(before[-1], fingerprint(student))
    if watched and watched[0] is teacher and teacher is not student:
        assert_same(before[0], fingerprint(teacher))
    for model, state in zip(watched, states, strict=True):
        assert list(model.state_dict()) == list(state) or options.get("candidates")


# What a run of the suite tries is the same each time; the slow test goes further, elsewhere each time.
FUZZ = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), max_examples=EXAMPLES)


@pytest.mark.timeout(300)
@FUZZ
@given(arguments)
def test_arguments_are_taken_or_refused(options):
    check(mlp(16), mlp(4, seed=1), options)


@pytest.mark.timeout(300)
@FUZZ
@given(st.sampled_from(MODELS), st.sampled_from(MODELS), st.booleans())
def test_pairs_of_anything_are_taken_or_refused(teacher, student, same):
    teacher = teacher()
    check(teacher, teacher if same else student(), {})


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(FUZZ, derandomize=False, max_examples=40 * EXAMPLES)
@given(st.sampled_from(MODELS), st.sampled_from(MODELS), arguments)
def test_anything_with_anything(teacher, student, options):
    check(teacher(), student(), options)


SPECS = [
    "timm:resnet18",
    "torchvision:vgg11",
    "hf:BertModel",
    f"{__file__}:linear",
    "json:loads",
    "networks:mlp,width=3",
]
pieces = st.sampled_from(
    [*SPECS, ":", ",", "=", "width=3", ",depth=", ".py", "timm", "..", "/", "1", "(", "'", "é", "\0"]
)
specs = st.one_of(
    st.lists(pieces, max_size=4).map("".join),
    st.text(string.printable, max_size=12),
    st.sampled_from(SPECS).flatmap(
        lambda spec: st.tuples(st.integers(0, len(spec)), st.text(":,=./x0'", max_size=3)).map(
            lambda change: spec[: change[0]] + change[1] + spec[change[0] :]
        )
    ),
)


@pytest.mark.timeout(200)
@FUZZ
@given(specs)
@example("timm:")
@example("json:loads,s=x")
def test_specs_name_a_model_or_are_refused(spec):
    assert refusal(lambda: load_model(spec)) != ""
