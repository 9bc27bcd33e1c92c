"""Batches of other sizes than the first one (trouble report 34): every one is trained on, on any number of ranks."""

import copy

import pytest
import torch
from opened import open_ranks
from plain import assert_equal_state, chained, distilled_like_plain_loop, pair, same
from torch import nn

import autobd
from autobd.errors import InputError


class Sequences(nn.Module):
    """A table of positions as long as the sequence, attention, and a mean over the tokens."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.positions = nn.Embedding(20, 8), nn.Parameter(torch.randn(1, 32, 8))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, width, 0.1, batch_first=True).double() for _ in range(3)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.late(self.early(tokens)).mean(1))

    def early(self, tokens):
        return self.layers[0](self.embed(tokens) + self.positions[:, : tokens.shape[1]])

    def late(self, x):
        return self.layers[2](self.layers[1](x))


STAGES = [
    (lambda m, x, batch: m.early(x), ("embed", "positions", "layers.0")),
    (lambda m, x, batch: m.layers[1](x), ("layers.1",)),
    (lambda m, x, batch: m.head(m.layers[2](x).mean(1)), ("layers.2", "head")),
]
BATCHES = [torch.randint(0, 20, size) for size in ((4, 6), (4, 9), (3, 6), (1, 5), (4, 9))]


def sequences():
    return [model.double() for model in pair(Sequences, 32, 8)]


def test_sequences_of_any_length_are_trained_as_by_a_plain_loop():
    distilled_like_plain_loop(*sequences(), STAGES, BATCHES, same("layers.0", "layers.1"))


@pytest.mark.timeout(180)
def test_ranks_get_blocks_for_other_lengths():
    teacher, student = sequences()
    alone = copy.deepcopy(student)
    options = {"cuts": same("layers.0", "layers.1"), "threads": 1, "progress": False, "epochs": 2}
    autobd.distill(teacher, alone, BATCHES, **options)
    for strategy in ("tr", "ls"):
        trained = copy.deepcopy(student)
        autobd.distill(teacher, trained, BATCHES, devices=open_ranks(3), strategy=strategy, **options)
        assert_equal_state(trained, alone)


def test_images_of_any_size_with_matched_channels():
    def net(width):
        layers = (nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        return nn.Sequential(nn.Sequential(*layers), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4))

    batches = [torch.randn(2, 3, size, size) for size in (8, 12, 8, 9)]
    result = autobd.distill(*pair(net, 8, 4), batches, cuts=same("0"), progress=False)
    assert result.split.pairs[0].adapters[0].kind != "equal"
    assert result.history.steps == 4


def test_a_layer_that_takes_one_size_only_refuses_another_with_the_sizes():
    with pytest.raises(InputError, match=r"another size than the first one(.|\n)*\[4, 6\]"):
        autobd.distill(*pair(lambda w: nn.Sequential(nn.Linear(6, w), nn.Linear(w, 3))),
                       [torch.randn(4, 6), torch.randn(4, 5)], progress=False)  # fmt: skip


def test_a_model_that_does_something_else_at_another_size_refuses_it():
    class Branches(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 3)

        def forward(self, x):
            x = self.one(x)
            return self.three((self.two(x) if x.shape[1] > 5 else x).mean(1))

    with pytest.raises(InputError, match=r"the teacher does something else with it(.|\n)*first difference at"):
        autobd.distill(*pair(Branches), [torch.randn(2, 7, 6), torch.randn(2, 4, 6)], progress=False)


def test_a_few_lengths_are_no_reason_to_warn(recwarn):
    layers = pair(lambda w: nn.Sequential(*(nn.Sequential(nn.Linear(6, w), nn.Linear(w, 6)) for _ in "123")))
    distilled_like_plain_loop(*layers, chained("0", "1", "2"), [torch.randn(2, n, 6) for n in (3, 4)], same("0", "1"))
    assert not [w for w in recwarn if "inputs of" in str(w.message)]
