"""The model zoos and pairs, by the same code that prints docs/coverage.md: `pytest -m slow`."""

import importlib.util
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "examples" / "model_coverage.py"
SPEC = importlib.util.spec_from_file_location("examples_coverage", SCRIPT)
coverage = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(coverage)

MODELS = {suite: {name: rest for name, *rest in coverage.models_of(suite)} for suite in ("torchvision", "timm", "hf")}
PAIRS, REFUSED = coverage.named("pairs"), coverage.named("refused")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("suite", "name"), [(suite, name) for suite, models in MODELS.items() for name in models])
def test_a_model_of_the_zoo_is_its_blocks(suite, name):
    make, example = MODELS[suite][name]
    captured, cuts, evaluation, training, *_ = coverage.of_model(make, example)
    assert captured == "yes"
    assert cuts >= 3
    assert evaluation in ("identical", "to rounding")
    assert training in ("identical", "to rounding", "-")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_aligned_and_trains(name):
    assert coverage.of_pair(PAIRS[name])[0] == "yes"


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_pair_of_other_sizes_is_refused(name):
    refused, message = coverage.expected_error(REFUSED[name])
    assert refused == "yes"
    assert "sizes" in message


@pytest.mark.parametrize("name", ["BERT", "T5 encoder", "Llama", "Falcon", "SegFormer"])
def test_transformers_are_their_blocks(name):
    make, example = MODELS["hf"][name]
    assert coverage.of_model(make, example)[:2] != ["NO", 0]
