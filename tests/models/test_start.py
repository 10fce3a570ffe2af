"""What an untrained model expects: every word alike, as published, and what older configs meant."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compactattn.models.config import ModelConfig
from compactattn.models.language_model import build
from compactattn.training.config import RunConfig, TrainingConfig

RESULTS = Path(__file__).parents[2] / "results"
FORMER = {"f3dd8d8", "b3cbf49", "cd68b2c", "5c6bfeb", "a337749", "96401e4"}  # commits before the start was mended
SIZES = [(20, 128), (263, 512), (50_257, 768)]  # RegBench, MQMTAR, stories


def first_loss(vocab, width, **changes):
    model = build(ModelConfig(vocab, layers=2, width=width, heads=8, slots=64, **changes)).eval()
    tokens = torch.randint(vocab, (4, 65), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        total, count = model.loss(tokens[:, :-1], tokens[:, 1:], torch.ones(4, 64, dtype=torch.bool))
    return float(total / count)


@pytest.mark.parametrize(("vocab", "width"), SIZES)
def test_the_first_loss_of_a_mosaic_is_that_of_equal_chances(vocab, width):
    assert first_loss(vocab, width) == pytest.approx(math.log(vocab), rel=0.02)


@pytest.mark.parametrize(
    ("vocab", "width", "loss"), [(*size, loss) for size, loss in zip(SIZES, (10.2, 22.5, 27.7), strict=True)]
)
def test_the_former_start_expects_the_token_that_was_read(vocab, width, loss):
    assert first_loss(vocab, width, start="former") == pytest.approx(loss, rel=0.02)


def test_a_start_is_the_standard_deviation_of_the_embedding():
    expected = {
        ("mosaic", "published"): 256**-0.5, ("mosaic", "former"): 1.0,
        ("transformer", "published"): 0.02, ("transformer", "unit"): 1.0,
    }  # fmt: skip
    for (architecture, start), std in expected.items():
        weight = build(ModelConfig(500, 1, 256, 4, architecture, start=start)).embedding.weight
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.01)
        assert abs(float(weight.detach().mean())) < 0.01 * std


def test_only_the_embedding_tells_the_starts_apart():
    former, published = (
        dict(build(ModelConfig(50, 2, 32, 4, start=start)).named_parameters()) for start in ("former", "published")
    )
    assert [name for name in former if not torch.equal(former[name], published[name])] == ["embedding.weight"]
    torch.testing.assert_close(published["embedding.weight"] * 32**0.5, former["embedding.weight"])  # the same draws


def test_a_config_from_before_means_what_it_meant():
    run = RunConfig("e", 1, ModelConfig(9, dropout=0.3, attention_dropout=0.1), TrainingConfig(5, 2))
    now = json.loads(run.to_json())
    for field in ("start", "attention_dropout", "persistent_dropout", "beta_squared", "form"):
        del now["model"][field]
    for field in ("decay_all", "horizon", "embedding_rate", "ssm_rate"):
        del now["training"][field]
    old = RunConfig.from_json(json.dumps(now))
    assert old.model == replace(run.model, start="former", attention_dropout=0.3)
    assert old.training == run.training
    assert RunConfig.from_json(old.to_json()) == old
    assert RunConfig.from_json(run.to_json()) == run


@pytest.mark.parametrize(
    ("model", "start"),
    [
        ({"vocab": 9}, "former"),
        ({"vocab": 9, "output": "scaled", "architecture": "transformer"}, "former"),
        ({"vocab": 9, "output": "plain"}, "published"),
        ({"vocab": 9, "architecture": "transformer"}, "published"),
        ({"vocab": 9, "architecture": "mamba"}, "published"),
    ],
)
def test_only_a_scaled_output_had_another_start(model, start):
    text = {"experiment": "e", "seed": 1, "model": model, "training": {"steps": 5, "batch": 2}}
    assert RunConfig.from_json(json.dumps(text)).model.start == start


def test_lines_of_results_say_which_start_they_are_of():
    files = [path for path in RESULTS.glob("*/*.jsonl") if path.stem != "first-loss"]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    assert all("start" in line["config"]["model"] for line in lines)
    mosaics = [line for line in lines if line["config"]["model"]["architecture"] == "mosaic"]
    before = [line for line in mosaics if line["environment"]["commit"] and line["environment"]["commit"][:7] in FORMER]
    assert len(before) > 50
    scaled = [line for line in before if line["config"]["model"]["output"] != "plain"]
    assert {line["config"]["model"]["start"] for line in scaled} == {"former"}


def test_the_bandwidth_starts_where_it_is_told_to():
    for beta_squared, found in ((0.0, math.e**2), (0.5, 0.5), (20.0, 20.0)):
        mixer = build(ModelConfig(9, 1, 16, 2, kernel="norm_relu", beta_squared=beta_squared)).blocks[0].mixer
        torch.testing.assert_close(mixer.beta_squared(), torch.full((2,), found))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"beta_squared": -1.0}, "beta_squared = -1.0 must be from 0, for e², to 22,026"),
        ({"beta_squared": 3e4}, "must be from 0, for e², to 22,026"),
        ({"beta_squared": 2.0, "kernel": "norm_relu", "as_released": "efficient"}, "norm_relu has no bandwidth"),
        ({"start": "former", "output": "plain"}, "changes nothing beside a plain output"),
        ({"start": "unit"}, "start = 'unit' beside a scaled output is the former start"),
        ({"beta_squared": 2.0, "architecture": "transformer"}, "a transformer learns no bandwidth"),
        ({"form": "benchmark"}, "form = 'benchmark' is for s4d, h3, gla, retnet, mamba; a mosaic has one form only"),
        ({"form": "benchmark", "architecture": "mamba"}, "RegBench's Mamba is one layer"),
        ({"start": "old"}, "start = 'old' is unknown; choose one of 'published', 'former', 'unit'"),
    ],
)
def test_what_a_start_cannot_be_is_refused(changes, sentence):
    with pytest.raises(ValueError) as refused:
        ModelConfig(9, 4, 16, 2, **changes)
    assert sentence in str(refused.value)
