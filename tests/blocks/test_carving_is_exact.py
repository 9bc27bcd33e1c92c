"""Invariant 1: blocks in order are the whole model, bit by bit; invariants 3 and 5: nothing of the user's changes.

The oracle is plain PyTorch: the user's model itself, run and differentiated without the package.
"""

import copy

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from networks import assert_same, fingerprint, images, masks, networks

import autobd
from autobd.blocks.cuts import candidates
from autobd.blocks.dataflow import Dataflow
from autobd.graph import Arguments

RELAXED = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def whole(model, inputs, training):
    """Output, gradients and buffers of the user's own model."""
    model = copy.deepcopy(model).train(training)
    torch.manual_seed(7)
    output = model(*(x.clone() for x in inputs))
    output.double().square().sum().backward()
    return output, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def in_blocks(split, model, inputs, training):
    """The same from the student's blocks, chained by hand over a copy; every block also sees its input kept intact."""
    model = copy.deepcopy(model).train(training)
    torch.manual_seed(7)
    values = ()
    for pair, module in zip(split.pairs, split.bind_student(model), strict=True):
        module.training = training
        arguments = [*values, *(inputs[i] for i in pair.student.inputs)]
        kept = [a.detach().clone() for a in arguments]
        values = module(*arguments)
        assert all(torch.equal(a, k) for a, k in zip(arguments, kept, strict=True)), "a block changed its input"
    (value,) = values
    value.double().square().sum().backward()
    return value, {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


def assert_identical(a, b):
    assert torch.equal(a[0], b[0])
    for one, two in ((a[1], b[1]), (a[2], b[2])):
        assert one.keys() == two.keys()
        for name in one:
            assert (one[name] is None) == (two[name] is None), name
            assert one[name] is None or torch.equal(one[name], two[name]), name


@RELAXED
@given(networks(), st.integers(1, 5), st.booleans(), st.data())
def test_any_cuts_of_any_network_give_the_whole_model(model, rows, masked, data):
    example = (images(4), masks(4)) if masked else (images(4),)
    found = candidates(Dataflow(autobd.capture(model, example), "output", trained=True))
    chosen = [name for name in dict.fromkeys(c.aliases[-1] for c in found) if data.draw(st.booleans())]
    before = fingerprint(model)
    split = autobd.split(copy.deepcopy(model), model, example, cuts=[(n, n) for n in chosen])
    assert len(split) == len(chosen) + 1
    inputs = (images(rows), masks(rows)) if masked else (images(rows),)
    for training in (False, True):
        if not (training and rows == 1):
            assert_identical(whole(model, inputs, training), in_blocks(split, model, inputs, training))
    assert split.verify().exact
    assert_same(before, fingerprint(model))


@RELAXED
@given(networks(repeats=False), st.integers(2, 4))
def test_a_model_against_itself_pairs_like_with_like(model, blocks):
    try:
        split = autobd.split(copy.deepcopy(model), model, images(), blocks=blocks)
    except autobd.errors.SplitError:
        assume(False)
    assert [p.teacher.name for p in split.alignment.pairs] == [p.student.name for p in split.alignment.pairs]


def small_bert(layers=2):
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2, intermediate_size=32, num_hidden_layers=layers)
    )


def small_distilbert():
    from transformers import DistilBertConfig, DistilBertModel

    return DistilBertModel(DistilBertConfig(vocab_size=50, dim=16, n_heads=2, hidden_dim=32, n_layers=2))


def torchvision(name, **kwargs):
    from torchvision import models

    return lambda: models.get_model(name, num_classes=10, **kwargs)


def timm(name, **kwargs):
    import timm as library

    return lambda: library.create_model(name, num_classes=10, **kwargs)


IMAGE = torch.randn(2, 3, 64, 64)
TOKENS = {"input_ids": torch.randint(0, 50, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
PADDED = {"input_ids": TOKENS["input_ids"], "attention_mask": (torch.arange(9) < torch.tensor([[9], [5]])).long()}
STOCK = {
    "torchvision resnet18": (torchvision("resnet18"), IMAGE),
    "torchvision vgg11_bn": (torchvision("vgg11_bn"), IMAGE),
    "torchvision mobilenet_v3_small": (torchvision("mobilenet_v3_small"), IMAGE),
    "torchvision densenet121": (torchvision("densenet121"), IMAGE),
    "torchvision shufflenet": (torchvision("shufflenet_v2_x0_5"), IMAGE),
    "torchvision swin_t": (torchvision("swin_t"), IMAGE),
    "torchvision googlenet": (torchvision("googlenet", aux_logits=False, init_weights=False), IMAGE),
    "timm vit": (timm("vit_tiny_patch16_224", img_size=64, depth=3, drop_rate=0.1, drop_path_rate=0.2), IMAGE),
    "timm levit": (timm("levit_128s"), torch.randn(2, 3, 224, 224)),
    "timm convnext": (timm("convnext_atto", drop_path_rate=0.2), IMAGE),
    "timm ghostnet": (timm("ghostnet_050", drop_rate=0.2), IMAGE),
    "timm mobilevit": (timm("mobilevit_xxs"), torch.randn(2, 3, 64, 64)),
    "HF BERT": (small_bert, TOKENS),
    "HF BERT, padded": (small_bert, PADDED),
    "HF DistilBERT": (small_distilbert, {"input_ids": TOKENS["input_ids"]}),
}


@pytest.mark.parametrize("name", STOCK)
def test_stock_models_are_their_blocks_in_train_and_eval_mode(name):
    make, example = STOCK[name]
    torch.manual_seed(0)
    model = make()
    before = fingerprint(model)
    split = autobd.split(copy.deepcopy(model), model, example)
    assert len(split) >= 3
    verification = split.verify()
    assert [(c.model, c.mode) for c in verification.checks] == [
        ("teacher", "eval"), ("student", "eval"), ("student", "train"),
    ]  # fmt: skip
    assert verification.exact, str(verification)
    assert_same(before, fingerprint(model))


def test_verify_finds_a_block_that_is_not_the_model():
    model = STOCK["torchvision resnet18"][0]()
    split = autobd.split(copy.deepcopy(model), model, IMAGE, blocks=3)
    node = next(n for n in split.pairs[1].student.graph.nodes if n.op == "call_module" and "relu" in n.target)
    with node.graph.inserting_after(node):
        doubled = node.graph.call_function(torch.mul, (node, 1.5))
    node.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    with pytest.raises(autobd.errors.VerifyError, match=r"student.*eval"):
        split.verify()


def test_verify_finds_what_depends_on_the_batch_size_in_python():
    class Capped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))

        def forward(self, x):
            return self.layers(x) * min(x.shape[0], 8)

    with pytest.raises(autobd.errors.VerifyError, match=r"teacher.*eval"):
        autobd.split(Capped(), Capped(), torch.randn(8, 3), blocks=2).verify()


def test_an_example_of_one_row_is_enough_for_a_norm_over_the_batch():
    def net(width):
        return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2))

    for rows in (1, 2, 3, 4):
        assert autobd.split(net(8), net(4), torch.randn(rows, 3)).verify().exact


def test_captured_and_blocks_run_at_other_batch_sizes():
    for name in ("torchvision swin_t", "HF DistilBERT"):
        make, example = STOCK[name]
        model = make().eval()
        captured = autobd.capture(model, example)
        larger = Arguments.of(example, model).map(lambda t: torch.cat([t, t, t[:1]]))
        with torch.no_grad():
            expected, got = model(*larger.args, **larger.kwargs), captured.module.eval()(*larger.tensors)
        first = (expected, got) if isinstance(expected, torch.Tensor) else (expected[0], got[0])
        assert torch.equal(*first)
