"""Small networks for tests, among them random ones from hypothesis."""

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

CHANNELS, SIZE = 6, 6


class Chain(nn.Module):
    """conv - norm - dropout - activation, the last two in place or not."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.act = nn.ReLU(inplace=inplace)
        self.drop = nn.Dropout(dropout, inplace=inplace)

    def forward(self, x):
        return self.act(self.drop(self.norm(self.conv(x))))


class Residual(nn.Module):
    """A shortcut added in place or not."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        self.body = nn.Sequential(Chain(channels, norm, inplace, dropout), nn.Conv2d(channels, channels, 1))
        self.inplace = inplace

    def forward(self, x):
        y = self.body(x)
        if self.inplace:
            y += x
            return y.relu_()
        return (x + y).relu()


class Branches(nn.Module):
    """Two branches, concatenated; functional dropout that reads `self.training`; a root-level scale."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        half = channels // 2
        self.left, self.right = nn.Conv2d(channels, half, 3, padding=1), nn.Conv2d(channels, half, 1)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1) + 0.5)
        self.register_buffer("shift", torch.randn(channels, 1, 1))
        self.p, self.inplace = dropout, inplace

    def forward(self, x):
        y = torch.cat([self.left(x), self.right(functional.relu(x))], 1) * self.scale
        y = functional.dropout(y, self.p, self.training, self.inplace)
        y[:, 0] = y[:, 0] * 0.5
        return y.add_(self.shift) if self.inplace else y + self.shift


class Shared(nn.Module):
    """One convolution and one activation used twice."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        self.conv, self.act = nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return self.act(self.conv(self.drop(self.act(self.conv(x)))))


class Counted(nn.Module):
    """Updates its own buffer in place and reads a size."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        n, c, h, w = x.shape
        return self.conv(x).reshape(n, c, h * w).softmax(-1).view(n, c, h, w) * w


class Positioned(nn.Module):
    """Reads a table made from a trained weight and a position grid, and a mask that its own activation decides."""

    def __init__(self, channels, norm, inplace, dropout):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.table = nn.Embedding(SIZE, channels)
        self.norm = nn.BatchNorm2d(channels) if norm else nn.Identity()
        self.inplace = inplace

    def forward(self, x):
        places = self.table(torch.arange(x.shape[-1], device=x.device)).T[:, None]
        y = self.norm(self.conv(x)) + places
        mask = y.mean(1, keepdim=True) > 0
        return y.masked_fill_(mask, 0.5) if self.inplace else y.masked_fill(mask, 0.5)


class Net(nn.Module):
    """Stem, random parts, classifier; `x` is changed in place on entry if `inplace`. From a second input, if given, the
    root makes a mask that every other part's output is multiplied with."""

    def __init__(self, parts, inplace):
        super().__init__()
        self.inplace = inplace
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.parts = nn.ModuleList(parts)
        self.head = nn.Linear(CHANNELS, 4)

    def forward(self, x, mask=None):
        x = x.sub_(0.1) if self.inplace else x - 0.1
        keep = None if mask is None else (mask > 0.5).to(x.dtype).unsqueeze(1)
        x = self.stem(x)
        for i, part in enumerate(self.parts):
            x = part(x)
            if keep is not None and i % 2 == 0:
                x = x * keep
        return self.head(x.mean((2, 3)))


KINDS = [Chain, Residual, Branches, Shared, Counted, Positioned]


@st.composite
def networks(draw, least=1, most=4, repeats=True):
    """Random networks with equal boundaries; with `repeats` a part may come twice."""
    seed = draw(st.integers(0, 2**16))
    torch.manual_seed(seed)
    options = st.tuples(st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3]))
    chosen = draw(st.lists(options, min_size=least, max_size=most))
    parts = [kind(CHANNELS, norm, inplace, dropout) for kind, norm, inplace, dropout in chosen]
    for i in draw(st.lists(st.integers(0, len(parts) - 1), max_size=1 if repeats else 0)):
        parts.append(parts[i])
    return Net(parts, draw(st.booleans()))


class Stages(nn.Module):
    """A stem, stages of residual layers at halving resolutions with given widths and depths, a classifier."""

    def __init__(self, widths, depths, kind=Residual, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.stages = nn.ModuleList()
        before = widths[0]
        for width, depth in zip(widths, depths, strict=True):
            entry = nn.Sequential(nn.Conv2d(before, width, 3, stride=2, padding=1), nn.ReLU())
            self.stages.append(nn.Sequential(entry, *(kind(width, True, False, 0.0) for _ in range(depth))))
            before = width
        self.head = nn.Linear(before, 4)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


@st.composite
def pairs(draw):
    """A teacher and a student of equal stages but other widths, depths and layers."""
    count = draw(st.integers(2, 3))
    models = []
    for _ in range(2):
        widths = draw(st.lists(st.sampled_from([4, 6, 8]), min_size=count, max_size=count))
        depths = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
        models.append(
            Stages(widths, depths, draw(st.sampled_from([Chain, Residual, Shared])), draw(st.integers(0, 99)))
        )
    return tuple(models)


def images(rows=4):
    return torch.randn(rows, 3, SIZE, SIZE)


def masks(rows=4):
    return torch.rand(rows, SIZE, SIZE)


def mlp(width, blocks=3, seed=0, dropout=0.0, features=6):
    """A Sequential of `blocks` Sequential blocks with boundaries of `features`."""
    torch.manual_seed(seed)

    def block():
        return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, features))

    return nn.Sequential(*(block() for _ in range(blocks)))


def fingerprint(model):
    """Everything of a model that a caller could miss if it changed."""
    tensors = {
        n: (id(t), t.detach().clone(), t.requires_grad) for n, t in [*model.named_parameters(), *model.named_buffers()]
    }
    grads = {n: p.grad for n, p in model.named_parameters()}
    attributes = {
        path: {k: (id(v), len(v) if isinstance(v, (dict, list, set)) else None) for k, v in vars(m).items()}
        for path, m in model.named_modules()
    }
    return tensors, grads, attributes, [m.training for m in model.modules()], list(model.state_dict())


def assert_same(before, after):
    for name, (identity, value, requires_grad) in before[0].items():
        assert after[0][name][0] == identity, name
        assert torch.equal(after[0][name][1], value), name
        assert after[0][name][2] == requires_grad, name
    for name, grad in before[1].items():
        assert after[1][name] is grad, name
    assert before[2] == after[2]
    assert before[3:] == after[3:]
