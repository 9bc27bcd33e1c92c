"""Weights that several blocks use: trained in the first one, or by all together. The oracles are plain loops."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import autobd
from autobd.errors import InputError


class Tied(nn.Module):
    """An embedding that is also the output layer, with two layers between."""

    def __init__(self, width, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(9, 6)
        self.one = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6))
        self.two = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 6))

    def forward(self, tokens):
        return self.two(self.one(self.embed(tokens))) @ self.embed.weight.T


CUTS = [("embed", "embed"), ("one", "one")]
EPOCH = [torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(i)) for i in range(3)]


def plain_loop(teacher, student, together):
    """Two epochs of blockwise distillation of `Tied`, written out."""
    t, stale = copy.deepcopy(teacher).eval(), student.embed.weight.detach().clone()
    groups = [[student.embed.weight], list(student.one.parameters()), list(student.two.parameters())]
    optimizers = [torch.optim.AdamW(g, lr=1e-2) for g in groups]
    scales = None
    for _ in range(2):
        for tokens in EPOCH:
            with torch.no_grad():
                y = [t.embed(tokens), t.one(t.embed(tokens)), t(tokens)]
            scales = scales or [v.square().mean() for v in y]
            head = student.embed.weight if together else stale
            outputs = [student.embed(tokens), student.one(y[0]), student.two(y[1]) @ head.T]
            losses = [(o - v).square().mean() / s for o, v, s in zip(outputs, y, scales, strict=True)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(losses).backward()
            for optimizer in optimizers:
                optimizer.step()
        stale.copy_(student.embed.weight.detach())
    return student


@pytest.mark.parametrize("strategy", ["tr+dpu", "dp"])
@pytest.mark.parametrize("policy", ["first", "together", "auto"])
def test_tied_training_equals_a_plain_loop(policy, strategy):
    teacher, student = Tied(16, 0), Tied(4, 1)
    expected = plain_loop(teacher, copy.deepcopy(student), policy == "together")
    result = autobd.distill(
        teacher, student, EPOCH, cuts=CUTS, ties=policy, strategy=strategy, progress=False,
        recipe=autobd.Recipe(block_input="teacher", lr=1e-2, epochs=2),
    )  # fmt: skip
    (tie,) = result.split.ties
    assert (tie.parameters, tie.blocks, tie.together) == (("embed.weight",), (0, 2), policy == "together")
    for key, value in expected.state_dict().items():
        assert torch.allclose(student.state_dict()[key], value, atol=1e-6), key
    assert "embed.weight: used in blocks 0, 2" in str(result)


def test_a_frozen_shared_weight_is_no_tie():
    student = Tied(4, 1)
    student.embed.weight.requires_grad_(False)
    assert autobd.split(Tied(16, 0), student, EPOCH[0], cuts=CUTS).ties == ()


def test_an_unknown_policy_is_refused():
    with pytest.raises(InputError, match="names no policy"):
        autobd.split(Tied(16, 0), Tied(4, 1), EPOCH[0], cuts=CUTS, ties="sometimes")


def test_statistics_of_a_norm_that_is_called_twice_stay_in_one_block():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                x = functional.relu(layer(x))
                x = self.norm(x) if i in (0, 2) else x
            return x

    split = autobd.split(Twice(), Twice(), torch.randn(4, 6))
    assert sum("norm.weight" in p.student.parameters for p in split.pairs) == 1
    assert split.verify().exact


def gpt2(layers):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=layers, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return GPT2LMHeadModel(config)


def albert():
    from transformers import AlbertConfig, AlbertModel

    config = AlbertConfig(
        vocab_size=50, embedding_size=8, hidden_size=16, num_hidden_layers=6, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return AlbertModel(config)


def tokens(rows=2):
    return {"input_ids": torch.randint(3, 50, (rows, 8)), "attention_mask": torch.ones(rows, 8, dtype=torch.long)}


def test_gpt2_trains_its_embedding_in_the_first_block():
    student = gpt2(2)
    result = autobd.distill(gpt2(4), student, [tokens() for _ in range(2)], blocks=4, progress=False)
    (tie,) = [t for t in result.split.ties if "transformer.wte.weight" in t.parameters]
    assert tie.blocks[0] == 0
    assert tie.blocks[-1] == 3
    assert not tie.together
    assert student.lm_head.weight is student.transformer.wte.weight


def test_albert_trains_its_shared_layers_together():
    torch.manual_seed(0)
    student = albert()
    before = {n: p.detach().clone() for n, p in student.named_parameters()}
    result = autobd.distill(albert(), student, [tokens() for _ in range(3)], progress=False)
    assert len(result.split) >= 4
    assert all(tie.together for tie in result.split.ties)
    shared = [n for n in before if "albert_layers" in n]
    assert all(not torch.equal(before[n], p) for n, p in student.named_parameters() if n in shared)
