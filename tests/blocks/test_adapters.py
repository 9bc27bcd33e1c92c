"""Adapters: exact maps, every layout, and a student that comes back plain. The oracles are plain PyTorch."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import autobd
from autobd.blocks.adapters import Adapter, adapter
from autobd.blocks.cuts import Boundary
from autobd.blocks.fit import principal_components, select_columns
from autobd.blocks.folding import folded, layers_to_fold_into
from autobd.blocks.layout import Lowest
from autobd.errors import InputError, NonFiniteError, SplitError

FLOAT64 = {"rtol": 0, "atol": 1e-12}


def boundary(shape, channels, dtype=torch.float64):
    return Boundary(None, tuple(shape), dtype, 1, channels, Lowest.UNBOUNDED, image=True)


@given(st.integers(1, 12), st.data())
@settings(deadline=None)
def test_a_map_in_and_its_way_out_are_the_identity(narrow, data):
    wide = data.draw(st.integers(narrow, 16))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    samples = torch.randn(data.draw(st.integers(1, 40)), wide, dtype=torch.float64)
    moments = samples.T @ samples / len(samples)
    columns = select_columns(moments, narrow)
    assert columns.tolist() == sorted(set(columns.tolist()))
    made = adapter(boundary((wide,), 0), boundary((narrow,), 0))
    kind = {"kind": "matched", "teacher": made.teacher, "student": made.student}
    for fitted in (Adapter(**kind, columns=columns), Adapter(**kind, matrix=principal_components(moments, narrow))):
        inward = fitted.initial_map
        identity = torch.eye(narrow, dtype=torch.float64)
        assert torch.allclose(inward @ torch.linalg.pinv(inward), identity, **FLOAT64)
        x = torch.randn(3, wide, dtype=torch.float64)
        assert torch.allclose(fitted(x), x @ inward.T, **FLOAT64)


def test_selected_channels_explain_the_others():
    base = torch.rand(200, 3, dtype=torch.float64)
    samples = torch.stack([base[:, 0], base[:, 0] * 2, base[:, 1], base[:, 1] + base[:, 2], base[:, 2] * 3], 1)
    chosen = samples[:, select_columns(samples.T @ samples, 3)]
    rest = samples - chosen @ torch.linalg.lstsq(chosen, samples).solution
    assert rest.abs().max() < 1e-9


def test_principal_components_keep_the_most():
    torch.manual_seed(0)
    samples = torch.randn(500, 8, dtype=torch.float64) * torch.tensor([5.0, 4, 3, 0.1, 0.1, 0.1, 0.1, 0.1])
    kept = samples @ principal_components(samples.T @ samples, 3).T
    assert kept.square().sum() > 0.99 * samples.square().sum()
    assert kept.square().mean(0).max() < 3 * kept.square().mean(0).min()  # every channel has its share


GRIDS = {  # layout -> (shape of a row, channel axis), for channels and an image of height x width
    "image": lambda c, h, w: ((c, h, w), 0),
    "channels last": lambda c, h, w: ((h, w, c), 2),
    "tokens": lambda c, h, w: ((h * w, c), 1),
    "class token": lambda c, h, w: ((h * w + 1, c), 1),
    "two class tokens": lambda c, h, w: ((h * w + 2, c), 1),
}


def as_pixels(tensor, layout):
    """[rows, pixels, channels] of a tensor without class tokens, pixel by pixel."""
    if layout == "image":
        return torch.stack([tensor[:, :, i, j] for i in range(tensor.shape[2]) for j in range(tensor.shape[3])], 1)
    if layout == "channels last":
        return torch.stack([tensor[:, i, j] for i in range(tensor.shape[1]) for j in range(tensor.shape[2])], 1)
    skip = {"tokens": 0, "class token": 1, "two class tokens": 2}[layout]
    return tensor[:, skip:]


@pytest.mark.parametrize("to", GRIDS)
@pytest.mark.parametrize("source", GRIDS)
@pytest.mark.parametrize("size", [(3, 3), (2, 4), (14, 14)])
def test_every_layout_becomes_every_other_one(source, to, size):
    if "token" in source and "token" in to and source != to and size == (2, 4):
        return  # without an image on either side only a square tells class tokens from others
    (shape, channels), (wanted, axis) = GRIDS[source](6, *size), GRIDS[to](6, *size)
    found = adapter(boundary(shape, channels), boundary(wanted, axis))
    x = torch.randn(5, *shape, dtype=torch.float64)
    y = found(x)
    assert y.shape == (5, *wanted)
    assert y.is_contiguous()
    assert torch.equal(as_pixels(y, to), as_pixels(x, source))
    prefix = {"class token": 1, "two class tokens": 2}
    for i in range(prefix.get(to, 0)):
        mean = as_pixels(x, source).mean(1)
        assert torch.allclose(y[:, i], x[:, i] if i < prefix.get(source, 0) else mean, **FLOAT64)


@pytest.mark.parametrize(
    ("a", "b"),
    [((6, 4, 4), (6, 5, 5)), ((17, 6), (26, 6)), ((6, 4, 4), (6, 1, 1)), ((6,), (6, 1, 1)), ((49, 6), (196, 6))],
)
def test_other_sizes_do_not_go_together_unless_resampled(a, b):
    channels = [0 if len(s) == 3 else len(s) - 1 for s in (a, b)]
    ends = boundary(a, channels[0]), boundary(b, channels[1])
    assert adapter(*ends) is None
    resampled = adapter(*ends, resample=True)
    if min(len(a), len(b)) > 1:
        assert resampled(torch.ones(2, *a, dtype=torch.float64)).shape == (2, *b)
        assert torch.allclose(resampled(torch.ones(2, *a).double()), torch.ones(2, *b).double(), **FLOAT64)
    else:
        assert resampled is None


# ------------------------------------------------------------------ folding


class Reader(nn.Module):
    """Two layers that read one boundary, which `before` makes."""

    def __init__(self, first, second, channels=4):
        super().__init__()
        self.before = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.ReLU())
        self.first, self.second = first, second
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, 5))

    def forward(self, x):
        x = self.before(x)
        return self.head(self.first(x) + self.second(x))


@st.composite
def convolutions(draw):
    kernel = draw(st.sampled_from([1, 3]))
    return nn.Conv2d(
        4,
        4,
        kernel,
        padding=kernel // 2,
        bias=draw(st.booleans()),
        padding_mode=draw(st.sampled_from(["zeros", "circular"])),
    )


@settings(max_examples=15, deadline=None)
@given(convolutions(), convolutions(), st.integers(0, 99))
def test_a_map_folded_into_its_readers_is_exact(first, second, seed):
    torch.manual_seed(seed)
    model = Reader(first, second).double()
    split = autobd.split(copy.deepcopy(model), model, torch.randn(2, 3, 6, 6).double(), cuts=[("before", "before")])
    names = layers_to_fold_into(split.pairs[1].student, 0, split.student)
    assert names == ("first", "second")
    channel_map, x = torch.randn(4, 4).double(), torch.randn(3, 4, 6, 6).double()
    plain = copy.deepcopy(model)
    plain.load_state_dict({**model.state_dict(), **folded(dict(model.named_parameters()), {names: channel_map})})
    block, plain_block = split.bind_student(model)[1], split.bind_student(plain)[1]
    expected = block(torch.einsum("cd,ndhw->nchw", channel_map, x))[0]
    assert torch.allclose(plain_block(x)[0], expected, **FLOAT64)


POOLED = {
    "modules": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 5)),
    "mean": lambda: Mean(),
    "average, then convolution": lambda: nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(4, 3, 3), nn.Flatten()),
}


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(x.mean((2, 3)))


@pytest.mark.parametrize("name", POOLED)
def test_a_map_is_folded_through_averages(name):
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), POOLED[name]()).double().eval()
    split = autobd.split(copy.deepcopy(model), model, torch.randn(2, 3, 8, 8).double(), cuts=[("0", "0")])
    names = layers_to_fold_into(split.pairs[1].student, 0, split.student)
    assert len(names) == 1
    channel_map, x = torch.randn(4, 4).double(), torch.randn(3, 4, 6, 6).double()
    plain = copy.deepcopy(model)
    plain.load_state_dict({**model.state_dict(), **folded(dict(model.named_parameters()), {names: channel_map})})
    assert torch.allclose(plain[1](x), model[1](torch.einsum("cd,ndhw->nchw", channel_map, x)), **FLOAT64)


def test_a_map_is_not_folded_into_a_layer_over_positions():
    model = nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Sequential(nn.Flatten(), nn.Linear(144, 5)))
    split = autobd.split(copy.deepcopy(model), model, torch.randn(2, 3, 8, 8), cuts=[("0", "0")])
    assert layers_to_fold_into(split.pairs[1].student, 0, split.student) == ()


UNFOLDABLE = {
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "norm": lambda: nn.BatchNorm2d(4),
    "shortcut": lambda: nn.Identity(),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1)),
    "weight norm by hook": lambda: old_weight_norm(nn.Conv2d(4, 4, 1)),
    "frozen": lambda: nn.Conv2d(4, 4, 1).requires_grad_(False),
}


def old_weight_norm(layer):
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize("name", UNFOLDABLE)
def test_an_adapter_that_cannot_be_folded_is_refused_or_kept_in_a_hybrid(name):
    torch.manual_seed(0)
    student = Reader(UNFOLDABLE[name](), nn.Conv2d(4, 4, 1))
    teacher = Reader(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), channels=8)
    x = torch.randn(4, 3, 6, 6)
    kwargs = {"cuts": [("before", "before")], "adapters": "trainable", "progress": False}
    with pytest.raises(SplitError, match=r"Block 0.*could not be folded(.|\n)*hybrid=True"):
        autobd.distill(teacher, student, [x], **kwargs)
    keys = list(student.state_dict())
    result = autobd.distill(teacher, student, [x], hybrid=True, **kwargs)
    assert list(student.state_dict()) == keys
    hybrid = result.hybrid.eval()
    first, second = result.split.bind_student()
    for block in (first, second):
        block.training = False
    between = hybrid.adapters["0_0"]
    expected = second(torch.einsum("cd,ndhw->nchw", between, first(x)[0]))[0]
    assert torch.allclose(hybrid(x), expected, atol=1e-6)
    assert not torch.allclose(hybrid(x), student(x), atol=1e-6)


class ReadsTwice(nn.Module):
    """A layer that reads the boundary is called again later, or its weight is read as the output layer."""

    def __init__(self, width, again, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.stem, self.mix, self.again = nn.Linear(6, width), nn.Linear(width, width), again
        self.mid, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.mid(torch.tanh(self.mix(self.stem(x))))
        return self.head(torch.tanh(self.mix(x) if self.again == "called" else x @ self.mix.weight))


@pytest.mark.parametrize("again", ["called", "read"])
def test_a_map_is_not_folded_into_a_layer_that_is_used_elsewhere(again):
    teacher, student = ReadsTwice(8, again, 0).double(), ReadsTwice(5, again, 1).double()
    cuts = [("stem", "stem"), ("mid", "mid")]
    split = autobd.split(teacher, student, BATCHES[0], cuts=cuts)
    assert split.pairs[0].adapters[0].kind == "matched"
    with pytest.raises(SplitError, match="could not be folded"):
        autobd.split(teacher, student, BATCHES[0], cuts=cuts, adapters={0: "trainable"})


def test_fitting_puts_back_what_the_teachers_forward_writes():
    def net(width, most):
        layers = nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
        return nn.Sequential(nn.Embedding(20, width, max_norm=most), layers, nn.Linear(width, 3))

    teacher, tokens = net(8, 0.5), torch.randint(0, 20, (4, 5))
    before = copy.deepcopy(teacher.state_dict())
    split = autobd.split(teacher, net(5, None), tokens, cuts=[("1", "1")], adapters="matched")
    split.fit(tokens)
    autobd.distill(teacher, net(5, None), [tokens], cuts=[("1", "1")], adapters="matched", progress=False)
    assert all(torch.equal(v, before[k]) for k, v in teacher.state_dict().items())


def test_lengths_of_sequences_are_not_taken_for_class_tokens():
    def net(width, padding):
        def layer(i, o):
            return nn.Sequential(nn.Conv1d(i, o, 3, padding=padding), nn.ReLU(), nn.Conv1d(o, o, 3, padding=1))

        return nn.Sequential(
            layer(2, width), layer(width, width), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, 4)
        )

    with pytest.raises(SplitError, match="other sizes, 29 tokens and 27 tokens"):
        autobd.split(net(16, 1), net(16, 0), torch.randn(4, 2, 29))


def test_an_output_with_and_without_a_last_axis_is_refused():
    flat = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    with pytest.raises(SplitError, match="outputs differ"):
        autobd.split(flat, nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 6))


# ------------------------------------------------------------------ training


class Passed(nn.Module):
    """What `one` gives crosses two cuts and is read by a convolution that a map could be folded into."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.one = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.Tanh())
        self.two = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.Tanh())
        self.first, self.second, self.head = nn.Conv2d(width, 4, 1), nn.Conv2d(width, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        one = self.one(x)
        return self.head(self.first(self.two(one)) + self.second(one))


def test_a_tensor_that_crosses_two_cuts_keeps_one_fixed_map():
    x, cuts = torch.randn(4, 3, 6, 6), [("one", "one"), ("two", "two")]
    split = autobd.split(Passed(8, 0), Passed(6, 1), x, cuts=cuts)
    kinds = [{a.student.node.name.split("_")[0]: a.kind for a in p.adapters} for p in split.pairs]
    assert kinds[:2] == [{"one": "matched"}, {"one": "matched", "two": "trainable"}]
    for wanted in ("trainable", {0: "trainable"}, {1: "trainable"}):
        with pytest.raises(SplitError, match=r"cannot be trainable(.|\n)*crosses more than one cut"):
            autobd.split(Passed(8, 0), Passed(6, 1), x, cuts=cuts, adapters=wanted)


def test_the_map_behind_the_last_block_cannot_be_trainable():
    wide, narrow = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, w), nn.Unflatten(1, (1, w))) for w in (8, 4))
    split = autobd.split(wide, narrow, torch.randn(4, 6), adapters="trainable", blocks=2, hybrid=True)
    assert split.pairs[-1].adapters[0].kind == "matched"
    with pytest.raises(SplitError, match=r"Block 1(.|\n)*is the output"):
        autobd.split(wide, narrow, torch.randn(4, 6), adapters={1: "trainable"}, blocks=2, hybrid=True)


def test_maps_are_fitted_on_the_first_batch_whatever_the_models_were_recorded_with():
    batches = [torch.randn(16, 6).double() for _ in range(2)]
    students = []
    for example in (None, torch.zeros(2, 6).double(), torch.full((2, 6), float("nan")).double()):
        student = linear((6, 4, 3), 1)
        autobd.distill(linear((6, 8, 3), 0), student, batches, example=example, adapters="matched", progress=False)
        students.append(student.state_dict())
    for other in students[1:]:
        assert all(torch.equal(students[0][key], other[key]) for key in other)


def test_a_first_batch_that_is_not_finite_is_named():
    with pytest.raises(NonFiniteError, match=r"Block \d: the teacher's tensor '\w+' is not finite on the first batch"):
        autobd.distill(
            linear((6, 8, 3), 0), linear((6, 4, 3), 1), [torch.full((4, 6), torch.nan).double()], progress=False
        )


def test_a_hybrid_student_takes_its_inputs_in_any_order():
    class Two(nn.Module):
        def __init__(self, width, seed):
            super().__init__()
            torch.manual_seed(seed)
            self.one, self.two, self.norm = nn.Linear(6, width), nn.Linear(4, width), nn.LayerNorm(width)
            self.middle, self.head = nn.Linear(width, width), nn.Linear(width, 3)

        def forward(self, a, b):
            return self.head(torch.tanh(self.middle(self.norm(self.one(a) - torch.tanh(self.two(b))))))

    a, b = torch.randn(8, 6), torch.randn(8, 4)
    kwargs = {"adapters": "trainable", "hybrid": True, "progress": False}
    hybrid = autobd.distill(Two(12, 0), Two(7, 1), [(a, b)], **kwargs).hybrid.eval()
    expected = hybrid(a, b)
    for output in (hybrid(a, b=b), hybrid(a=a, b=b), hybrid(b=b, a=a)):
        assert torch.equal(output, expected)
    with pytest.raises(InputError, match="other arguments"):
        hybrid(a)


def linear(widths, seed):
    """A Sequential of two-layer blocks; boundary i has `widths[i]` features."""
    torch.manual_seed(seed)
    ends = [6, *widths]
    blocks = [nn.Sequential(nn.Linear(a, 9), nn.ReLU(), nn.Linear(9, b)) for a, b in itertools.pairwise(ends)]
    return nn.Sequential(*blocks).double()


BATCHES = [torch.randn(8, 6, generator=torch.Generator().manual_seed(i)).double() for i in range(4)]
CUTS = [("0", "0"), ("1", "1")]


def scale(y):
    return y.square().mean()


def test_matched_training_equals_a_plain_loop_on_the_projected_teacher():
    teacher, student = linear([8, 8, 3], 0), linear([4, 12, 3], 1)
    mine = copy.deepcopy(student)
    result = autobd.distill(
        teacher,
        student,
        BATCHES,
        cuts=CUTS,
        recipe=autobd.Recipe(block_input="teacher", lr=1e-2),
        adapters="matched",
        progress=False,
    )
    maps = [p.adapters[0].initial_map.double() for p in result.split.pairs[:2]]
    assert [m.shape for m in maps] == [(4, 8), (12, 8)]
    optimizers = [torch.optim.AdamW(b.parameters(), lr=1e-2) for b in mine]
    scales = [None] * 3
    for x in BATCHES:
        with torch.no_grad():
            given = [x, teacher[0](x) @ maps[0].T, teacher[1](teacher[0](x)) @ maps[1].T]
            wanted = [*given[1:], teacher(x)]
        for b, block in enumerate(mine):
            scales[b] = scale(wanted[b]) if scales[b] is None else scales[b]
            optimizers[b].zero_grad()
            ((block(given[b]) - wanted[b]).square().mean() / scales[b]).backward()
            optimizers[b].step()
    for name, value in mine.state_dict().items():
        assert torch.allclose(student.state_dict()[name], value, rtol=0, atol=1e-10), name


def test_trainable_training_equals_a_plain_loop_and_is_folded_exactly():
    teacher, student = linear([8, 8, 3], 0), linear([4, 5, 3], 1)
    mine = copy.deepcopy(student)
    result = autobd.distill(
        teacher,
        student,
        BATCHES,
        cuts=CUTS,
        adapters="trainable",
        recipe=autobd.Recipe(block_input="teacher", lr=1e-2),
        progress=False,
    )
    assert result.hybrid is None
    start = [p.adapters[0].initial_map.double() for p in result.split.pairs[:2]]
    inward = [nn.Parameter(m.clone()) for m in start]
    outward = [nn.Parameter(torch.linalg.pinv(m)) for m in start]
    trained = [[*mine[b].parameters(), *inward[b - 1 : b] * (b > 0), *outward[b : b + 1]] for b in range(3)]
    optimizers = [torch.optim.AdamW(p, lr=1e-2) for p in trained]
    scales = [None] * 3
    for x in BATCHES:
        with torch.no_grad():
            y = [x, teacher[0](x), teacher[1](teacher[0](x)), teacher(x)]
        for b, block in enumerate(mine):
            scales[b] = scale(y[b + 1]) if scales[b] is None else scales[b]
            optimizers[b].zero_grad()
            output = block(y[b] if b == 0 else y[b] @ inward[b - 1].T)
            output = output if b == 2 else output @ outward[b].T
            ((output - y[b + 1]).square().mean() / scales[b]).backward()
            optimizers[b].step()
    x = torch.randn(5, 6).double()
    value = x
    for b, block in enumerate(mine):
        value = block(value)
        value = value if b == 2 else value @ outward[b].T @ inward[b].T
    assert torch.allclose(student(x), value, rtol=0, atol=1e-10)


def test_the_plain_student_is_the_chain_of_its_blocks():
    teacher, student = linear([8, 8, 3], 0), linear([4, 5, 3], 1)
    for kind in ("matched", "trainable", {0: "trainable", 1: "matched"}):
        fresh = copy.deepcopy(student)
        result = autobd.distill(teacher, student, BATCHES, cuts=CUTS, adapters=kind, progress=False)
        fresh.load_state_dict(result.student.state_dict())
        value = (torch.randn(5, 6).double(),)
        whole = fresh(*value)
        for block in result.split.bind_student():
            value = block(*value)
        assert torch.allclose(value[0], whole, rtol=0, atol=1e-10)


def test_the_rule_trains_maps_that_fold_but_not_behind_the_relu_of_a_narrow_student():
    def net(width, act):
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Conv2d(3, width, 3), act), nn.Conv2d(width, 4, 3), nn.Flatten())

    def kind(wide, narrow, act):
        split = autobd.split(net(wide, act), net(narrow, act), torch.randn(2, 3, 6, 6), cuts=[("0", "0")])
        return split.pairs[0].adapters[0].kind

    assert kind(8, 4, nn.ReLU()) == "trainable"
    assert kind(4, 8, nn.ReLU()) == "trainable"
    assert kind(8, 3, nn.ReLU()) == kind(8, 3, nn.SiLU()) == "matched"
    assert kind(8, 3, nn.Tanh()) == "trainable"
    assert kind(8, 8, nn.ReLU()) == "equal"


@pytest.mark.parametrize(
    ("wanted", "message"), [("glue", "not a kind of adapter"), ({7: "matched"}, "not a kind of adapter")]
)
def test_unknown_adapters_are_refused(wanted, message):
    with pytest.raises(InputError, match=message):
        autobd.split(linear([8, 8, 3], 0), linear([4, 5, 3], 1), BATCHES[0], cuts=CUTS, adapters=wanted)


def vit(**kwargs):
    import timm

    return timm.create_model("test_vit", img_size=32, patch_size=8, num_classes=10, **kwargs)


def cnn(width):
    from timm.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, (1, 1, 1, 1), num_classes=10, channels=(width, width, width, width))


@pytest.mark.parametrize("of", ["ViT to CNN", "CNN to ViT"])
def test_a_vit_teaches_a_cnn_and_the_other_way_round(of):
    torch.manual_seed(0)
    pair = (vit(), cnn(16)) if of == "ViT to CNN" else (cnn(96), vit())
    result = autobd.distill(*pair, torch.randn(12, 3, 32, 32), batch_size=4, progress=False)
    kinds = {str(a).split(",")[0] for p in result.split.pairs for a in p.adapters if str(a)}
    assert kinds & {"tokens to image", "image to tokens"}, str(result.split)
    assert all(v < float("inf") for row in result.history.relative for v in row)


def test_other_image_sizes_are_named_and_resampled_on_request():
    import timm

    teacher = vit()
    student = timm.create_model("test_vit", img_size=48, patch_size=8, num_classes=10)
    inputs = (lambda x: functional.interpolate(x, 32), lambda x: x)
    with pytest.raises(SplitError, match=r"other sizes, 4x4 and 6x6(.|\n)*resample=True"):
        autobd.split(teacher, student, torch.randn(2, 3, 48, 48), inputs=inputs)
    result = autobd.distill(
        teacher, student, [torch.randn(2, 3, 48, 48)] * 2, inputs=inputs, resample=True, progress=False
    )
    assert len(result.split) >= 4
    assert "resampled" in str(result.split)
