"""Dropout in a model: on the weights, on what is added, on the embedding; in training alone."""

from dataclasses import replace

import pytest
import torch

from compactattn import attend
from compactattn.models.config import ModelConfig
from compactattn.models.generation import generate
from compactattn.models.language_model import BLOCKS, build

MOSAIC = ModelConfig(vocab=31, layers=2, width=24, heads=3, kernel="sparsemax", dropout=0.3, attention_dropout=0.3,
                     persistent_dropout=0.1, embedding_dropout=0.2)  # fmt: skip
NONE = dict.fromkeys(("dropout", "attention_dropout", "persistent_dropout", "embedding_dropout"), 0.0)
MODELS = [MOSAIC, replace(MOSAIC, architecture="transformer", positions="learned", longest=40)]
each_model = pytest.mark.parametrize("config", MODELS, ids=lambda config: config.architecture)


def tokens(batch=2, time=20):
    return torch.randint(0, 31, (batch, time), generator=torch.Generator().manual_seed(0))


@each_model
def test_in_evaluation_nothing_is_dropped(config):
    model, plain, text = build(config).eval(), build(replace(config, **NONE)), tokens()
    before = torch.get_rng_state()
    assert torch.equal(model(text), plain(text))
    assert torch.equal(torch.stack(list(generate(model, text, 5))), torch.stack(list(generate(plain, text, 5))))
    assert torch.equal(torch.get_rng_state(), before)  # nor does a model without dropout draw anything in training


@each_model
def test_training_hangs_on_the_seed_alone(config):
    model, text = build(config), tokens()
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        found.append(model(text))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@each_model
def test_weights_are_dropped_inside_attention(config):
    mixer = build(replace(config, embedding_dropout=0.0)).blocks[0].mixer
    features, _ = mixer.features(torch.randn(2, 20, 24), None)
    rule = dict(zip(("scale", "mask"), mixer._rule(features[3]), strict=True)) if len(features) > 3 else {"mask": mixer.mask}
    torch.manual_seed(5)
    found = mixer.regress(*features)
    torch.manual_seed(5)
    assert torch.equal(found, attend(*features[:3], "sparsemax", dropout=0.3, **rule))
    assert torch.equal(mixer.eval().regress(*features), attend(*features[:3], "sparsemax", **rule))


@each_model
def test_what_mixer_and_store_add_is_dropped_number_by_number(config, monkeypatch):
    block = BLOCKS[config.architecture](replace(config, dropout=0.5))
    monkeypatch.setattr(block.mixer, "answer", lambda y: torch.ones(4, 50, 24))
    monkeypatch.setattr(block.store, "advance", lambda x, past: (10 * torch.ones(4, 50, 24), None))
    torch.manual_seed(0)
    out, _ = block.finish(torch.zeros(4, 50, 24), torch.zeros(()), None, keep=False)
    for value in (0.0, 2.0, 20.0, 22.0):
        assert abs((out == value).double().mean() - 0.25) < 0.03
    assert (block.eval().finish(torch.zeros(4, 50, 24), torch.zeros(()), None, keep=False)[0] == 11).all()


@each_model
def test_the_embedding_is_dropped_number_by_number(config):
    model, seen = build(config), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    torch.manual_seed(0)
    model(tokens(8, 40))
    assert abs((seen[0] == 0).double().mean() - 0.2) < 0.03


@each_model
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo asks activations for it
def test_compiled_parts_drop_the_same(config, monkeypatch):
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda part, dynamic: real(part, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()
    model, text, found = build(config), tokens(), []
    counted, parameters = torch.ones_like(text, dtype=torch.bool), list(model.parameters())
    for turn in range(2):
        if turn:
            model.compile_parts()
        torch.manual_seed(0)
        loss, _ = model.loss(text, text, counted)
        found.append((loss, *torch.autograd.grad(loss, parameters)))
    torch.testing.assert_close(*found)
