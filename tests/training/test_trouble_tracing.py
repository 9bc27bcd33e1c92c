"""Models that other tools could not record, or recorded with something frozen: here they work, or stop with a message.

The number of a test is that of the report in the project's bank of trouble reports. The oracles are plain PyTorch.
"""

import math

import pytest
import torch
from plain import assert_blocks_are_the_models, chained, distilled_like_plain_loop, hidden, pair
from torch import nn
from torch.nn import functional

import autobd
from autobd.errors import CaptureError, InputError

HERE = r"test_trouble_tracing\.py:\d+ in forward"


class Squares(nn.Module):
    """Checks its input with `assert` and `if`, as many stems do."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)

    def forward(self, x):
        assert x.shape[1] == 3, "three channels only"
        if x.size(2) != x.size(3):
            raise ValueError("square images only")
        return self.conv(x).relu()


class Guarded(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.head = Squares(), nn.Linear(6, 5)
        self.body = nn.Sequential(nn.Conv2d(6, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 6, 1))

    def forward(self, x):
        assert len(x), "no images"
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def test_01_a_model_that_checks_its_shapes_is_recorded_and_trains_like_a_plain_loop():
    teacher, student = pair(Guarded)
    batches = [torch.randn(n, 3, 8, 8) for n in (4, 4, 3, 1)]
    stages = [*chained("stem", "body"), (lambda m, x, _: m.head(x.mean((2, 3))), ["head"])]
    result = distilled_like_plain_loop(teacher, student, stages, batches, [("stem", "stem"), ("body", "body")])
    assert_blocks_are_the_models(result.split, batches)
    assert not result.split.teacher.opaque
    assert not result.split.student.opaque


@pytest.mark.parametrize(("shape", "message"), [((2, 1, 8, 8), "three channels"), ((2, 3, 8, 6), "square images only")])
def test_01_an_example_that_breaks_the_check_is_an_error_with_module_line_and_remedy(shape, message):
    with pytest.raises(CaptureError, match=rf"module 'stem' fails.*{message}") as error:
        autobd.split(*pair(Guarded), torch.randn(shape))
    assert error.match(HERE)
    assert error.match("do: .*example=")


def test_01_a_later_batch_that_breaks_the_check_is_refused():
    batches = [torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 6)]
    with pytest.raises(InputError, match=r"another size than the first one(.|\n)*8, 6\](.|\n)*8, 8\]"):
        autobd.distill(*pair(Guarded), batches, progress=False)


class Gate(nn.Module):
    """Which half it uses depends on values."""

    def __init__(self, width):
        super().__init__()
        self.easy, self.hard = nn.Linear(6, 6), hidden(6, width)

    def forward(self, x):
        if x.abs().mean() > 1.0:
            return self.hard(x)
        return self.easy(x)


def test_02_both_sides_of_a_branch_on_values_stay_alive():
    teacher, student = pair(lambda w: nn.Sequential(Gate(w), nn.LayerNorm(6), Gate(w), nn.Linear(6, 3)))
    batches = [torch.full((4, 6), 0.1), torch.full((4, 6), 3.0), torch.randn(3, 6) * 9, torch.randn(1, 6) / 9]
    stages = [*chained("0"), (lambda m, x, _: m[2](m[1](x)), ["1", "2"]), *chained("3")]
    result = distilled_like_plain_loop(teacher, student, stages, batches, [("0", "0"), ("2", "2")])
    assert_blocks_are_the_models(result.split, batches)
    for whose, captured in (("teacher", result.split.teacher), ("student", result.split.student)):
        assert list(captured.opaque) == ["0", "2"]
        assert any(n.startswith(f"{whose}: module '0' is kept whole") for n in result.split.notes)


class Exit(nn.Module):
    """Leaves out all of its weights for batches with small values."""

    def __init__(self, width):
        super().__init__()
        self.body = hidden(6, width)

    def forward(self, x):
        return x if x.abs().mean() < 1.0 else x + self.body(x)


def test_02_a_block_whose_weights_a_batch_leaves_out_learns_nothing_from_it():
    models = pair(lambda w: nn.Sequential(Exit(w), nn.Linear(6, 6), Exit(w)))
    batches = [torch.full((4, 6), 0.1), torch.full((4, 6), 3.0), torch.full((3, 6), 0.1), torch.randn(1, 6) * 9]
    result = distilled_like_plain_loop(*models, chained("0", "1", "2"), batches, [("0", "0"), ("1", "1")])
    assert_blocks_are_the_models(result.split, batches)
    assert [losses[0] == 0 for losses in result.history.losses] == [True, False, True, False]


def test_02_a_branch_on_values_in_the_models_own_code_is_an_error_with_line_and_remedy():
    with pytest.raises(CaptureError, match=r"Gate\.forward uses the value of a tensor") as error:
        autobd.split(*pair(Gate), torch.randn(4, 6))
    assert error.match(HERE)
    assert error.match("do: .*submodule of their own")


class Pool(nn.Module):
    def forward(self, x):
        return x.mean(tuple(range(2, len(x.shape)))) if len(x.shape) > 2 else x


def test_03_len_of_a_shape_is_recorded_and_trains_like_a_plain_loop():
    def make(width):
        convs = [nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Conv1d(6, width, 1), nn.ReLU(), nn.Conv1d(width, 6, 1)]
        return nn.Sequential(nn.Sequential(*convs), Pool(), nn.Linear(6, 4), Pool())

    batches = [torch.randn(n, 2, 12) for n in (3, 3, 2, 1)]
    stages = [*chained("0", "1"), (lambda m, x, _: m[3](m[2](x)), ["2"])]
    result = distilled_like_plain_loop(*pair(make), stages, batches, [("0", "0"), ("1", "1")])
    assert_blocks_are_the_models(result.split, batches)


def test_03_a_later_batch_of_other_dimensions_is_refused():
    models = pair(lambda w: nn.Sequential(Pool(), nn.Linear(6, w), nn.Linear(w, 6)))
    assert autobd.split(*models, torch.randn(3, 6), blocks=1).verify().exact
    with pytest.raises(InputError, match="does not fit the teacher"):
        autobd.distill(*models, [torch.randn(3, 6), torch.randn(3, 6, 2)], blocks=1, progress=False)


class Half(nn.Module):
    """Python's arithmetic on sizes."""

    def forward(self, x):
        rows, channels, height, width = x.shape
        x = functional.adaptive_avg_pool2d(x, (int(height * 0.5), int(width * 0.5))) / math.sqrt(channels)
        return torch.stack([x[:, i] * (i + 1) for i in range(channels)], 1).view(rows, channels, -1, width // 2)


def halves(width):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), Half(), nn.Conv2d(4, width, 1), nn.ReLU(), nn.Conv2d(width, 4, 1), Half(),
        nn.Flatten(1), nn.Linear(16, 3),
    )  # fmt: skip


def test_05_int_sqrt_and_range_of_a_size_are_recorded_and_train_like_a_plain_loop():
    batches = [torch.randn(n, 3, 8, 8) for n in (4, 4, 2, 1)]
    stages = [
        (lambda m, x, _: m[1](m[0](x)), ["0"]),
        (lambda m, x, _: m[4](m[3](m[2](x))), ["2", "4"]),
        (lambda m, x, _: m[7](m[6](m[5](x))), ["7"]),
    ]
    result = distilled_like_plain_loop(*pair(halves), stages, batches, [("1", "1"), ("4", "4")])
    assert_blocks_are_the_models(result.split, batches)
    assert not result.split.teacher.opaque


def test_05_where_it_fails_the_error_shows_the_line_in_the_users_forward():
    with pytest.raises(CaptureError, match=r"module '1' fails on the example: ValueError: not enough values") as error:
        autobd.split(*pair(halves), torch.randn(3, 8, 8))
    assert error.match(HERE)


class Masked(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 6), hidden(6, width), nn.Linear(6, 2)

    def forward(self, x, mask=None):
        x = self.first(x)
        if mask is not None:
            x = x * mask
        return self.last(self.body(x))


MASKED_CUTS = [("first", "first"), ("body", "body")]


@pytest.mark.parametrize("targets", [False, True], ids=["x", "x and targets shaped like the mask"])
def test_07_without_the_optional_mask_the_models_run_without_it(targets):
    teacher, student = pair(Masked)
    inputs = [torch.randn(n, 4) for n in (3, 3, 2, 1)]
    batches = [(x, torch.zeros(len(x), 6)) if targets else x for x in inputs]
    seen = []
    recipe = autobd.Recipe(block_input="teacher", loss=lambda s, t: seen.append(t.clone()) or (s - t).square().mean())
    autobd.distill(teacher, student, batches, cuts=MASKED_CUTS, recipe=recipe, progress=False)
    with torch.no_grad():
        assert all(torch.equal(t, teacher.eval()(x)) for t, x in zip(seen[2::3], inputs, strict=True))


def test_07_with_and_without_mask_train_like_a_plain_loop():
    bare = [{"x": torch.randn(n, 4)} for n in (3, 2, 1)]
    masked = [{**b, "mask": torch.rand(len(b["x"]), 6)} for b in bare]
    for batches in (bare, masked):
        first = (lambda m, x, b: m.first(b["x"]) * b["mask"] if "mask" in b else m.first(b["x"])), ["first"]
        cuts = [("mul", "mul"), ("body", "body")] if batches is masked else MASKED_CUTS
        result = distilled_like_plain_loop(*pair(Masked), [first, *chained("body", "last")], batches, cuts)
        assert_blocks_are_the_models(result.split, batches)


def test_07_a_mask_that_appears_later_is_refused():
    x = torch.randn(3, 4)
    for batches in ([{"x": x}, {"x": x, "mask": torch.ones(3, 6)}], [{"x": x, "mask": torch.ones(3, 6)}, {"x": x}]):
        with pytest.raises(InputError, match=r"does not fit the teacher as it was recorded"):
            autobd.distill(*pair(Masked), batches, progress=False)


class Keywords(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 6), hidden(6, width), nn.Linear(6, 2)

    def forward(self, x, **kw):
        return self.last(self.body(self.first(x)) * kw["scale"])


def scaled(rows, scale, **more):
    return {"x": torch.randn(rows, 4), "scale": torch.tensor(scale), **more}


def test_08_of_keyword_arguments_a_block_gets_those_it_reads_at_every_batchs_own_value():
    stages = [
        (lambda m, x, b: m.first(b["x"]), ["first"]),
        *chained("body"),
        (lambda m, x, b: m.last(x * b["scale"]), ["last"]),
    ]
    batches = [scaled(n, s, unread=torch.randn(n)) for n, s in ((3, 0.5), (3, 2.0), (2, -1.0), (1, 0.25))]
    result = distilled_like_plain_loop(*pair(Keywords), stages, batches, MASKED_CUTS)
    assert_blocks_are_the_models(result.split, batches)
    for block in (b for p in result.split.pairs for b in (p.teacher, p.student)):
        assert len(block.returns) == 1
        assert block.returns[0].dtype is torch.float32
    assert [p.student.inputs for p in result.split.pairs] == [(0,), (), (1,)]


def test_08_a_keyword_that_is_no_tensor_holds_for_the_value_it_was_recorded_with():
    first, other = {"x": torch.randn(3, 4), "scale": 0.5}, {"x": torch.randn(3, 4), "scale": 2.0}
    models = pair(Keywords)
    result = autobd.distill(*models, [first], progress=False)
    assert_blocks_are_the_models(result.split, [first, {**first, "x": torch.randn(1, 4)}])
    with pytest.raises(InputError, match=r"does not fit the teacher.*\n.*scale=2\.0.*\n.*scale=0\.5"):
        autobd.distill(*models, [first, other], progress=False)


def test_08_a_keyword_that_is_missing_is_named():
    with pytest.raises(CaptureError, match=rf"KeyError: 'scale'\n.*{HERE}"):
        autobd.split(*pair(Keywords), {"x": torch.randn(3, 4)})
