"""Models of transformers, timm and torch.nn that torch.fx cannot trace, or only as one piece: split and trained here.

The number of a test is that of the report in the project's bank of trouble reports. The oracles are plain PyTorch.
"""

import sys

import pytest
import torch
from networks import assert_same, fingerprint
from plain import assert_blocks_are_the_models, chained, distilled_like_plain_loop, hidden, pair, teacher_boundaries
from torch import nn

import autobd
from autobd.errors import SplitError


def bert(width):
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=width,
        max_position_embeddings=32, num_labels=3, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def texts(*lengths):
    """A batch of texts of these lengths, padded to 9 tokens."""
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(0, 60, (len(lengths), 9)), "attention_mask": mask}


LAYERS = [f"bert.encoder.layer.{i}" for i in range(3)]
BATCHES = [(9, 5, 7, 9), (4, 9, 9, 3), (9, 9, 9), (2,)]


def test_14_a_hugging_face_encoder_is_cut_between_its_layers_and_gives_its_own_hidden_states():
    teacher, student = pair(bert)
    split = autobd.split(teacher, student, texts(9, 5, 7, 9))
    assert [c.teacher.name for c in split.alignment.pairs] == LAYERS
    assert [c.student.name for c in split.alignment.pairs] == LAYERS
    for lengths in BATCHES:
        batch = texts(*lengths)
        with torch.no_grad():
            whole = teacher.eval()(**batch, output_hidden_states=True)
        expected = [*whole.hidden_states[1:4], whole.logits]
        assert all(torch.equal(a, b) for a, b in zip(teacher_boundaries(split, batch), expected, strict=True))


def test_14_every_block_gets_the_attention_mask():
    split = autobd.split(*pair(bert), texts(9, 5, 7, 9))
    mask = list(texts(9)).index("attention_mask")
    assert all(mask in block.inputs for p in split.pairs for block in (p.teacher, p.student))
    batch = texts(5, 3)
    other = {**batch, "input_ids": batch["input_ids"].where(batch["attention_mask"] > 0, 1)}
    assert not torch.equal(batch["input_ids"], other["input_ids"])
    a, b = teacher_boundaries(split, batch), teacher_boundaries(split, other)
    assert torch.equal(a[-1], b[-1]), "what is padded does not count"


def test_14_a_hugging_face_encoder_trains_like_a_plain_loop_over_its_layers():
    def allowed(batch):
        return batch["attention_mask"][:, None, None, :].bool().expand(-1, 1, 9, -1)

    def layer(i):
        return (lambda m, x, b: m.bert.encoder.layer[i](x, allowed(b))), [f"bert.encoder.layer.{i}"]

    stages = [
        (lambda m, x, b: layer(0)[0](m, m.bert.embeddings(b["input_ids"]), b), ["bert.embeddings", LAYERS[0]]),
        layer(1),
        layer(2),
        (
            lambda m, x, b: m.classifier(m.dropout(m.bert.pooler(layer(3)[0](m, x, b)))),
            ["bert.encoder.layer.3", "bert.pooler", "classifier"],
        ),
    ]
    batches = [texts(*lengths) for lengths in BATCHES]
    result = distilled_like_plain_loop(*pair(bert), stages, batches, [(n, n) for n in LAYERS])
    assert_blocks_are_the_models(result.split, batches, lambda y: y.logits)


def test_15_a_timm_vision_transformer_trains_like_a_plain_loop_over_its_blocks():
    import timm

    def make(width):
        return timm.create_model("test_vit", pretrained=False, num_classes=7, img_size=64, mlp_ratio=width / 16)

    def embed(m, x, _):
        return m.blocks[0](m.norm_pre(m.patch_drop(m._pos_embed(m.patch_embed(x)))))

    def head(m, x, _):
        return m.forward_head(m.norm(m.blocks[5](x)))

    stages = [
        (embed, ["patch_embed", "cls_token", "pos_embed", "blocks.0"]),
        *chained(*(f"blocks.{i}" for i in range(1, 5))),
        (head, ["blocks.5", "norm", "fc_norm", "head"]),
    ]
    batches = [torch.randn(n, 3, 64, 64) for n in (3, 3, 2, 1)]
    cuts = [(f"blocks.{i}", f"blocks.{i}") for i in range(5)]
    result = distilled_like_plain_loop(*pair(make, 32, 16), stages, batches, cuts)
    assert_blocks_are_the_models(result.split, batches[1:])


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [
        ("mobilevit_xxs", {}, 32),
        ("convit_tiny", {"img_size": 32, "depth": 2}, 32),
        ("naflexvit_base_patch16_gap", {"depth": 2, "embed_dim": 32, "num_heads": 2}, 32),
    ],
)
def test_15_other_stock_transformers_of_timm_are_split_exactly_at_their_blocks(name, options, size):
    import timm

    teacher, student = pair(lambda w: timm.create_model(name, pretrained=False, num_classes=7, **options))
    before = fingerprint(teacher), fingerprint(student)
    batches = [torch.randn(n, 3, size, size) for n in (3, 1)]
    split = autobd.split(teacher, student, batches[0], blocks=2)
    assert split.verify().exact
    assert_same(before[0], fingerprint(teacher)), assert_same(before[1], fingerprint(student))
    expected = teacher.eval()(batches[1])
    assert torch.equal(teacher_boundaries(split, batches[1])[-1], expected)


def test_15_timm_is_not_needed_for_models_that_are_not_of_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError):
        import timm  # noqa: F401
    batches = [torch.randn(n, 4) for n in (3, 1)]
    models = pair(lambda w: nn.Sequential(hidden(4, w), hidden(4, w)))
    distilled_like_plain_loop(*models, chained("0", "1"), batches, [("0", "0")])


class Encoder(nn.Module):
    def __init__(self, width, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, width, batch_first=True, **options)
        self.first, self.encoder, self.head = nn.Linear(6, 16), nn.TransformerEncoder(layer, 4), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.encoder(self.first(x)).mean(1))


@pytest.fixture
def ordinary_path():
    """The oracle's layers take the path that every gradient takes, so that it can be compared bit for bit."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(fused)


CUTS_16 = [(f"encoder.layers.{i}",) * 2 for i in range(3)]


def test_16_torchs_encoder_is_cut_between_its_layers_and_gives_the_untouched_teachers_values():
    teacher, student = pair(Encoder)
    split = autobd.split(teacher, student, torch.randn(3, 5, 6))
    assert [(c.teacher.name, c.student.name) for c in split.alignment.pairs] == CUTS_16
    for rows in (3, 2, 1):
        x = torch.randn(rows, 5, 6)
        with torch.no_grad():  # what follows is the fused path
            y, expected = teacher.eval().first(x), []
            for layer in teacher.encoder.layers:
                expected.append(y := layer(y))
            expected[-1] = teacher(x)
        for a, b in zip(teacher_boundaries(split, x), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("ordinary_path")
def test_16_torchs_encoder_trains_like_a_plain_loop_over_its_layers():
    stages = [
        (lambda m, x, _: m.encoder.layers[0](m.first(x)), ["first", "encoder.layers.0"]),
        *chained("encoder.layers.1", "encoder.layers.2"),
        (lambda m, x, _: m.head(m.encoder.layers[3](x).mean(1)), ["encoder.layers.3", "head"]),
    ]
    batches = [torch.randn(n, 5, 6) for n in (3, 3, 2, 1)]
    result = distilled_like_plain_loop(*pair(Encoder), stages, batches, CUTS_16)
    assert_blocks_are_the_models(result.split, batches)


@pytest.mark.usefixtures("ordinary_path")
def test_16_torchs_encoder_is_cut_when_it_is_the_model_itself():
    def make(width):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, width, batch_first=True), 4)

    stages = chained(*(f"layers.{i}" for i in range(4)))
    batches = [torch.randn(n, 5, 16) for n in (3, 2, 1)]
    distilled_like_plain_loop(*pair(make), stages, batches, [(f"layers.{i}",) * 2 for i in range(3)])


@pytest.mark.parametrize("name", ["encoder.layers.0.self_attn.out_proj", "encoder.layers.9"])
def test_16_a_cut_behind_a_module_without_activation_is_an_error_that_names_it_and_its_neighbours(name):
    with pytest.raises(SplitError, match=rf"'{name}'.*\n.*\n.*one of: .*encoder\.layers") as error:
        autobd.split(*pair(Encoder), torch.randn(3, 5, 6), cuts=[(name, name)])
    assert "teacher" in str(error.value)
