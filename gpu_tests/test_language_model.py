"""Language modelling on a GPU as its presets have it: the short one learns, and the largest model of the paper fits."""

import gc

import numpy as np
import pytest
import torch

from compactattn.data.corpus import Corpus, Windows
from compactattn.data.preparation import prepare
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import load_tokenizer
from compactattn.experiments import language_modelling as lm
from compactattn.models.language_model import build
from compactattn.training.config import vary
from compactattn.training.loop import train
from compactattn.training.records import read_metrics
from gpu_tests.settings import DEVICE, GPU, TRIAL

LENGTH = 24 if TRIAL else 512
GPT2 = 50_257  # ids
MOST = 24e9  # bytes
SMALL = {"width": 32, "heads": 2, "slots": 16} if TRIAL else {}
# a trial has neither a C++ compiler nor CUDA graphs nor the time for 32 windows
LIMITS = {"batch": 2, "precision": "fp32", "compile": "none", "graph": False} if TRIAL else {}
STEPS = 6 if TRIAL else 60


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora") / "demo-stories"
    prepare([Stories(40 if TRIAL else 4000)], load_tokenizer("bytes"), folder, workers=1)
    return Corpus.open(folder)


def configure(corpus, model, kernel, layers, steps, **changes):
    """gpu-short for fewer steps, each of which is logged."""
    config = lm.gpu_short(corpus, model, kernel, 1 if TRIAL else layers, LENGTH)
    few = {"steps": steps, "warmup": steps // 10, "log_every": 1, "checkpoint_every": steps, "device": DEVICE}
    return vary(config, model=SMALL, training={**few, **changes, **LIMITS})


def losses(folder):
    return torch.tensor([line["loss"] for line in read_metrics(folder) if "loss" in line])


@pytest.mark.parametrize(("model", "kernel"), [("mosaic", "triweight"), ("mosaic", "gaussian"), ("transformer", "gaussian")])
def test_the_short_preset_learns_the_built_in_stories(model, kernel, corpus, tmp_path, record_property):
    config = configure(corpus, model, kernel, 8, STEPS)
    training = config.training
    assert TRIAL or (training.batch, training.precision, training.compile, training.graph) == (32, "bf16", "parts", True)
    summary = lm.run(config, tmp_path / "run", show_progress=False)
    found = losses(tmp_path / "run")
    record_property(
        "note", f"loss {found[0]:.2f} at first, {found[-5:].mean():.2f} in the end, validation {summary.validation}"
    )
    assert len(found) == STEPS
    assert found.isfinite().all()
    assert found[-5:].mean() < (found[0] if TRIAL else 0.7 * found[0])
    assert TRIAL or summary.validation["loss"] < np.log(257)  # better than chance


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "replayed"])
@pytest.mark.parametrize("model", ["mosaic", "transformer"])
def test_twelve_layers_train_on_32_windows_of_512_tokens_within_24_gigabytes(model, plain, corpus, tmp_path, record_property):
    """With the vocabulary of GPT-2, whose logits alone would take 3 GB; the weights, their gradient and Adam's moments are the
    least that there is to hold."""
    changes = {"compile": "none", "graph": False} if plain else {}
    config = vary(configure(corpus, model, "gaussian", 12, 6, **changes), model={"vocab": GPT2})
    tokens = np.random.default_rng(0).integers(0, GPT2, 100_000).astype("<u2")
    built = build(config.model)
    least = 16 * sum(parameter.numel() for parameter in built.parameters())
    if GPU:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    train(config, built, Windows(tokens, LENGTH, 0, GPT2), tmp_path / "run", show_progress=False)
    assert losses(tmp_path / "run").isfinite().all()
    if GPU:
        peak = torch.cuda.max_memory_allocated() - before
        record_property("note", f"{peak / 1e9:.1f} GB at most, {least / 1e9:.1f} of them the weights and what Adam keeps")
        assert least <= peak <= MOST
