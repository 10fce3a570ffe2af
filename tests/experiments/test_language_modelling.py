"""A language model is trained on the windows its config names."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.data.text_examples import cut_off, use_tiny_ranks
from tests.experiments.lm_examples import LENGTH, make_corpus, tiny
from torch.nn.functional import cross_entropy

from compactattn.data.corpus import Corpus
from compactattn.data.meta import META
from compactattn.data.preparation import prepare
from compactattn.data.sources import hash_file
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import BytePairs
from compactattn.experiments import language_modelling as lm
from compactattn.experiments.runs import open_run
from compactattn.models.language_model import build
from compactattn.training import checkpoint
from compactattn.training.config import RunConfig, RunError, vary
from compactattn.training.loop import Loop
from compactattn.training.records import read_metrics

# -- configs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mosaic", "transformer"])
@pytest.mark.parametrize("preset", list(lm.PRESETS))
def test_a_preset_is_a_complete_config_that_survives_being_written_down(preset, model, long_corpus):
    config = lm.PRESETS[preset](long_corpus, model, "biweight")
    assert RunConfig.from_json(config.to_json()) == config
    data = lm.Data.of(config)
    assert (data.corpus, data.tokenizer, config.model.vocab) == ("many", "bytes", 257)
    assert data.open().folder == long_corpus.folder
    assert config.model.longest == (data.length if model == "transformer" else 0)
    assert config.training.warmup <= config.training.steps // 10


def test_the_paper_preset_is_the_published_recipe(long_corpus):
    config = lm.paper(long_corpus, kernel="biweight", layers=12)
    model, training = config.model, config.training
    assert (model.layers, model.width, model.heads, model.slots_per_head, model.dropout) == (12, 768, 12, 2688, 0.05)
    assert (training.steps, training.batch, training.warmup) == (80_000, 512, 2000)
    assert (training.betas, training.decay, training.clip) == ((0.9, 0.95), 0.1, 1.0)
    assert training.batch // training.accumulation == 32
    assert lm.Data.of(config).length == 512


@pytest.mark.parametrize(
    ("layers", "kernel", "rates"),
    [
        (1, "gaussian", (5e-3, 1e-4)),
        (1, "relumax(r=2)", (5e-3, 1e-4)),
        (8, "triweight", (5e-3, 1e-4)),
        (8, "relumax", (5e-3, 1e-4)),
        (8, "relumax(r=2)", (1e-3, 5e-5)),
        (12, "gaussian", (1e-3, 5e-5)),
        (4, "gaussian", (5e-3, 1e-4)),
        (24, "gaussian", (1e-3, 5e-5)),
    ],
)
def test_rates_are_those_of_the_papers_table(layers, kernel, rates, long_corpus):
    for preset in (lm.paper, lm.gpu_short):
        training = preset(long_corpus, "mosaic", kernel, layers).training
        assert (training.rate, training.final_rate) == rates
    assert lm.paper(long_corpus, "transformer", layers=layers).training.rate == 1e-3


@pytest.mark.parametrize("model", ["mosaic", "transformer"])
@pytest.mark.parametrize(
    ("preset", "dropout", "settings"),
    [("cpu-quick", 0.0, ("fp32", "none", False)), ("gpu-short", 0.05, ("bf16", "parts", True)),
     ("paper", 0.05, ("bf16", "parts", False))],
)  # fmt: skip
def test_dropout_precision_and_compilation_of_a_preset_are_those_of_the_help(preset, dropout, settings, model, long_corpus):
    config = lm.PRESETS[preset](long_corpus, model)
    assert (config.model.dropout, config.model.attention_dropout) == (dropout, dropout)
    assert config.model.persistent_dropout == (dropout if model == "mosaic" else 0.0)
    assert (config.training.precision, config.training.compile, config.training.graph) == settings


def test_the_embedding_may_learn_faster_by_the_root_of_the_width(long_corpus):
    config = lm.gpu_short(long_corpus)
    assert lm.hasten_embedding(config).training.embedding_rate == 768**0.5
    assert replace(lm.hasten_embedding(config).training, embedding_rate=1.0) == config.training
    with pytest.raises(ValueError, match="these are not; add --output scaled"):
        lm.hasten_embedding(lm.gpu_short(long_corpus, "transformer"))


def test_only_cpu_quick_gives_a_mosaic_the_plain_output_layer(long_corpus):
    scaled = {preset: lm.PRESETS[preset](long_corpus).model.scales_output for preset in lm.PRESETS}
    assert scaled == {"cpu-quick": False, "gpu-short": True, "paper": True}
    assert {lm.PRESETS[preset](long_corpus, "transformer").model.output for preset in lm.PRESETS} == {""}


@pytest.mark.parametrize("model", ["mosaic", "transformer"])
def test_a_model_of_a_preset_drops_in_training(model, long_corpus):
    config = vary(lm.gpu_short(long_corpus, model, layers=1), model={"width": 16, "heads": 2, "slots": 8})
    built, text = build(config.model), torch.arange(40)[None]
    assert not torch.equal(built.train()(text), built(text))
    assert torch.equal(built.eval()(text), built(text))


def test_a_shorter_run_warms_up_for_at_most_a_tenth():
    assert [lm.choose_warmup(steps) for steps in (1, 10, 2000, 20_000, 80_000)] == [0, 1, 200, 2000, 2000]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": "512"}, "data.length = '512' must be of type int"),
        ({"colour": 3}, "data.colour is unknown; lm has corpus, folder, tokenizer"),
        ({"folder": "/nowhere"}, "is no longer in '/nowhere'; put it back, or write where it is now into data.folder"),
        ({"checksum": "0"}, "holds another corpus than the run was trained on"),
        ({"tokenizer_hash": "0"}, "are of tokenizer 'bytes'"),
    ],
)
def test_impossible_data_is_named(change, words, corpus):
    config = tiny(corpus)
    with pytest.raises(ValueError) as error:
        lm.Data.of(replace(config, data={**config.data, **change})).open()
    assert words in str(error.value)


def test_a_corpus_that_cannot_serve_is_refused_before_training(corpus, tmp_path):
    with pytest.raises(ValueError) as error:
        lm.cpu_quick(corpus, length=50_000)
    assert str(error.value).startswith("the validation split of 'stories': a stream of ")
    assert "is too short for a window of 50000" in str(error.value)
    with pytest.raises(ValueError) as error:
        lm.cpu_quick(make_corpus(tmp_path / "all", 4, held_out=0.0))
    assert "has no validation split" in str(error.value)
    with pytest.raises(ValueError) as error:
        lm.cpu_quick(make_corpus(tmp_path / "none", 4, held_out=1.0))
    assert str(error.value).startswith("the training split of 'none': a stream of 0 tokens")


# -- training ------------------------------------------------------------------------------------


def test_the_seed_of_a_run_chooses_its_windows(corpus, tmp_path, monkeypatch):
    streams = []
    monkeypatch.setattr(lm, "train", lambda config, model, stream, *_, **__: streams.append(stream))
    for seed in (0, 0, 1):
        lm.run(replace(tiny(corpus), seed=seed), tmp_path, show_progress=False)
    first, again, other = (stream.batch(0, 16).inputs for stream in streams)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_killed_run_goes_on_with_the_same_windows_and_losses(corpus, tmp_path, monkeypatch):
    config = tiny(corpus, steps=8)
    config = vary(config, model={"dropout": 0.1})
    lm.run(config, tmp_path / "peace", show_progress=False)

    class Killed(Exception):
        pass

    update = Loop.update

    def kill(self, step, feed):
        if step == 6:
            raise Killed
        return update(self, step, feed)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "update", kill)
        with pytest.raises(Killed):
            lm.run(config, tmp_path / "killed", show_progress=False)
    assert checkpoint.step_of(tmp_path / "killed") in (3, 4)
    lm.run(config, tmp_path / "killed", resume=True, show_progress=False)
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (tmp_path / "peace/metrics.jsonl").read_bytes()
    assert (tmp_path / "killed/checkpoint.json").read_bytes() == (tmp_path / "peace/checkpoint.json").read_bytes()
    losses = [line["loss"] for line in read_metrics(tmp_path / "peace") if "loss" in line]
    assert len(set(losses)) == 8


def test_a_run_whose_corpus_has_moved_goes_on_once_its_config_says_where(corpus, tmp_path):
    shutil.copytree(corpus.folder, tmp_path / "before")
    config = tiny(Corpus.open(tmp_path / "before"))
    lm.run(config, tmp_path / "run", show_progress=False)
    (tmp_path / "before").rename(tmp_path / "after")
    with pytest.raises(RunError, match="no longer in"):
        lm.evaluate_run(tmp_path / "run", device="cpu")
    moved = replace(config, data={**config.data, "folder": str(tmp_path / "after")})
    (tmp_path / "run/config.json").write_text(moved.to_json())
    lm.run(moved, tmp_path / "run", resume=True, show_progress=False)
    assert lm.evaluate_run(tmp_path / "run", device="cpu")["split"] == "validation"


@pytest.mark.parametrize("split", ["train", "validation"])
def test_an_id_out_of_range_is_found_before_training(split, corpus, tmp_path):
    folder, path = tmp_path / "wrong", tmp_path / "wrong" / f"{split}.bin"
    shutil.copytree(corpus.folder, folder)
    ids = np.fromfile(path, "<u2")
    ids[7] = 400
    ids.tofile(path)
    with pytest.raises(ValueError, match=rf"{split}\.bin' is not as it was prepared: its checksum"):
        lm.run(tiny(Corpus.open(folder)), tmp_path / "run", show_progress=False)
    meta = json.loads((folder / META).read_text())
    meta["splits"][split]["sha256"] = hash_file(path)
    (folder / META).write_text(json.dumps(meta))
    with pytest.raises(ValueError, match=rf"{split}\.bin' is not as it was prepared: it holds id 400"):
        lm.run(tiny(Corpus.open(folder)), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def with_ranks(tmp_path, monkeypatch):
    """A corpus of GPT-2 tokens, of tiny ranks, and a config; there is no network."""
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    cut_off(monkeypatch, tmp_path)
    prepare([Stories(40)], BytePairs("gpt2", ranks.read_bytes()), tmp_path / "corpus", 0.2, workers=1)
    return tiny(Corpus.open(tmp_path / "corpus"), steps=2)


@pytest.mark.parametrize(
    ("left", "trouble"),
    [
        (None, "the ranks of GPT-2 could not be fetched (Name or service not known)"),
        (b"QQ== 0\n", "is not the ranks of GPT-2: its SHA-256 is "),
    ],
)
def test_ranks_that_are_missing_or_damaged_are_told_before_training(left, trouble, with_ranks, tmp_path):
    ranks = tmp_path / "corpus/ranks.tiktoken"
    whole = ranks.read_bytes()
    ranks.unlink() if left is None else ranks.write_bytes(left)
    for act in (lambda: lm.run(with_ranks, tmp_path / "run", show_progress=False), lambda: lm.read(with_ranks, "words")):
        with pytest.raises(ValueError) as error:
            act()
        said = str(error.value).splitlines()[0]
        assert trouble in said
        assert said.endswith(f"; put the published r50k_base.tiktoken at {str(ranks)!r}")
    assert not (tmp_path / "run").exists()
    ranks.write_bytes(whole)
    lm.run(with_ranks, tmp_path / "run", show_progress=False)
    assert lm.evaluate_run(tmp_path / "run", device="cpu")["tokenizer"] == "gpt2"


def test_validation_is_on_the_same_windows_each_time_and_none_overlap(corpus, run):
    validated = [line for line in read_metrics(run) if "validation" in line]
    assert [line["step"] for line in validated] == [2, 4, 6]
    data = lm.Data.of(tiny(corpus))
    windows = data.cut_validation(corpus)
    assert len(windows.inputs) == min(64, (len(corpus.validation) - 1) // LENGTH)
    model = open_run(run, "cpu").model
    with torch.no_grad():
        loss = cross_entropy(model(windows.inputs).flatten(0, 1), windows.targets.flatten())
    (line,) = (line for line in validated if line["step"] == open_run(run, "cpu").step)
    assert line["validation"] == {"loss": pytest.approx(float(loss), rel=1e-5)}


@pytest.mark.parametrize("most", [1, 3, 7, 100])
def test_windows_of_a_text_never_share_a_token_that_counts(most):
    tokens = np.arange(101, dtype="<u2")
    windows = lm.spread_windows(tokens, 20, most)
    targets = windows.targets.flatten().tolist()
    assert len(windows.inputs) == min(most, 5)
    assert len(set(targets)) == len(targets)
