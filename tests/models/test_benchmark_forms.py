"""The recurrent models as RegBench's code has them: form="benchmark"."""

import math

import pytest
import torch
from torch import nn

from compactattn.mixers.convolution import bilinear, hold
from compactattn.mixers.recurrence import Recurrence
from compactattn.mixers.retnet import NormalisedRetNet
from compactattn.models.block import RECURRENCES
from compactattn.models.config import ModelConfig
from compactattn.models.generation import generate
from compactattn.models.language_model import build
from compactattn.training.config import TrainingConfig
from compactattn.training.optimiser import build_optimiser

VOCAB = 31
BARE = {"layers": 1, "start": "unit"}  # of Mamba


def make_config(name, **changes):
    given = {"vocab": VOCAB, "layers": 2, "width": 24, "heads": 3, **(BARE if name == "mamba" else {}), **changes}
    return ModelConfig(architecture=name, form="benchmark", **given)


def tokens(batch=3, time=80, seed=0):
    return torch.randint(0, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


each_model = pytest.mark.parametrize("name", RECURRENCES)


@each_model
def test_the_parallel_model_equals_the_definition_position_by_position(name, monkeypatch):
    model, text = build(make_config(name)).double(), tokens()
    full = model(text)
    monkeypatch.setattr(Recurrence, "features", lambda mixer, x, past, keep: ((mixer.recur(x)[0],), None))
    torch.testing.assert_close(full, model(text), rtol=1e-10, atol=1e-10)


@each_model
def test_generation_with_a_cache_equals_the_model_that_reads_all_again(name):
    model, text = build(make_config(name)).double().eval(), tokens(2, 5)
    for token in generate(model, text, 12):
        assert torch.equal(token, model(text)[:, -1].argmax(-1))
        text = torch.cat((text, token[:, None]), 1)
    assert text.shape == (2, 17)


@each_model
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks activations for it
def test_compiled_parts_have_no_graph_break_and_change_nothing(name, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, dynamic: real(part, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    model, text = build(make_config(name, layers=1)), tokens(2, 20)
    counted, parameters = torch.ones_like(text, dtype=torch.bool), list(model.parameters())
    plain, _ = model.loss(text, text, counted)
    want = torch.autograd.grad(plain, parameters)
    model.compile_parts()
    loss, _ = model.loss(text, text, counted)
    torch.testing.assert_close((loss, *torch.autograd.grad(loss, parameters)), (plain, *want))


@each_model
def test_a_model_that_attends_to_nothing_cannot_be_inspected(name):
    with pytest.raises(ValueError, match="keeps a state and attends to nothing; only attention can be inspected"):
        build(make_config(name)).inspect(tokens(1, 5))


@pytest.mark.parametrize("name", [name for name in RECURRENCES if name != "mamba"])
def test_every_linear_starts_as_the_rule_of_the_benchmark_says(name):
    model = build(make_config(name, width=128, heads=4, layers=2))
    shrunk = {"store.to_output"} | ({"mixer.to_output"} if name != "h3" else set())  # its rule misses the name of H3's
    for block in model.blocks:
        linears = {part: module for part, module in block.named_modules() if isinstance(module, nn.Linear)}
        assert shrunk <= set(linears)
        for part, module in linears.items():
            expected = 0.02 / math.sqrt(4) if part in shrunk else 0.02
            assert module.weight.std().item() == pytest.approx(expected, rel=0.05), part
            assert module.bias is None or not module.bias.any(), part
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_the_mixers_are_those_of_the_benchmark():
    """That these are its equations is a matter of tests/mixers."""
    s4d, h3, retnet = (build(make_config(name, width=128, heads=8)).blocks[0].mixer for name in ("s4d", "h3", "retnet"))
    assert s4d.diagonal.discretise is hold
    assert s4d.diagonal.frequency.max().item() == pytest.approx(64 / math.pi * 63)  # S4D-Inv with 64 states
    assert s4d.diagonal.frequency.shape == (32,)
    assert s4d.to_output.out_features == 128
    assert h3.diagonal.discretise is bilinear
    assert h3.diagonal.frequency.shape == (128 * 32,)
    assert h3.diagonal.frequency.max().item() == pytest.approx(31 * math.pi)
    assert 0.12 < h3.shift.taps.abs().max() <= 1 / 8
    assert isinstance(retnet, NormalisedRetNet)
    assert retnet.heads == 8
    assert retnet.to_output.in_features == 256


def test_what_the_benchmark_says_nothing_of_starts_as_in_our_own_form():
    benchmark = build(make_config("gla", width=128, heads=2)).blocks[0]
    own = build(ModelConfig(VOCAB, 2, 128, 2, "gla")).blocks[0]
    assert {n: p.shape for n, p in benchmark.named_parameters()} == {n: p.shape for n, p in own.named_parameters()}
    mamba, other = build(make_config("mamba")), build(ModelConfig(VOCAB, 1, 24, 3, "mamba", start="unit"))
    pairs = zip(mamba.blocks[0].mixer.named_parameters(), other.blocks[0].mixer.named_parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs)


def test_the_mamba_of_the_benchmark_is_one_bare_layer():
    model, text = build(make_config("mamba", vocab=400, width=64, heads=1)), tokens()
    E = model.embedding.weight
    assert torch.equal(model(text), model.blocks[0].mixer(E[text]) @ E.T)
    assert {name.partition(".mixer.")[0] for name, _ in model.named_parameters()} == {"embedding.weight", "blocks.0"}
    assert E.std().item() == pytest.approx(1, rel=0.02)
    assert model.scale == 1


@pytest.mark.parametrize("name", ["s4d", "h3"])
def test_state_space_parameters_have_a_rate_of_their_own_and_do_not_decay(name):
    model = build(make_config(name))
    groups = build_optimiser(
        model, TrainingConfig(steps=2, batch=1, rate=4e-3, ssm_rate=1e-3, decay=0.1, decay_all=True, embedding_rate=3.0)
    ).param_groups
    found = {id(p): (group["factor"], group["weight_decay"]) for group in groups for p in group["params"]}
    for parameter_name, parameter in model.named_parameters():
        special = parameter_name.endswith(("diagonal.log_step", "diagonal.log_rate", "diagonal.frequency"))
        embedding = parameter_name == "embedding.weight"
        expected = (0.25, 0.0) if special else (3.0, 0.1 / 3) if embedding else (1.0, 0.1)
        assert found[id(parameter)] == expected, parameter_name
