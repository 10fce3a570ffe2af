"""A language model is trained on the windows its config names, and judged on texts as they were written."""

import gzip
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.data.text_examples import use_tiny_ranks, write_text
from tests.experiments.lm_examples import LENGTH, make_corpus, prepare_file, tiny, write_stories
from torch.nn.functional import cross_entropy

from compactattn.data.corpus import Corpus
from compactattn.data.preparation import META, prepare
from compactattn.data.sources import TextFile, hash_file
from compactattn.data.tokenizers import Bytes, load_tokenizer
from compactattn.experiments import language_modelling as lm
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.experiments.storytelling import Teller, Wish, save_stories
from compactattn.experiments.sweep import Job, finish
from compactattn.models.generation import Sampling, TextStream
from compactattn.models.language_model import build
from compactattn.training import checkpoint, files
from compactattn.training.config import RunConfig, RunError, vary
from compactattn.training.loop import Loop
from compactattn.training.records import read_metrics


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpora") / "stories")


@pytest.fixture(scope="module")
def long_corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpora") / "many", stories=60)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    lm.run(tiny(corpus), folder, show_progress=False)
    return folder


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
    assert config.model.dropout == dropout
    assert (config.training.precision, config.training.compile, config.training.graph) == settings


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


# -- evaluation ----------------------------------------------------------------------------------


def test_a_row_holds_loss_bits_and_the_curve_of_the_weights_that_are_kept(run, corpus):
    told = []
    row = lm.evaluate_run(run, device="cpu", samples=10, progress=lambda *counts: told.append(counts))
    assert told[-1] == (10, 10)
    assert row in read_evaluation(run)
    assert (row["task"], row["split"], row["samples"], row["tokens"]) == ("lm", "validation", 10, 10 * LENGTH)
    assert row["by_position"]["edges"] == list(range(LENGTH + 1))
    assert row["by_position"]["tokens"] == [10] * LENGTH
    trained = open_run(run, "cpu")
    windows = lm.spread_windows(corpus.validation, LENGTH, 10)
    with torch.no_grad():
        loss = cross_entropy(trained.model(windows.inputs).flatten(0, 1), windows.targets.flatten())
    assert row["loss"] == pytest.approx(float(loss), rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    ends = int((windows.targets == corpus.end).sum())
    assert row["text_bytes"] == 10 * LENGTH - ends
    assert row["bits_per_byte"] == pytest.approx(row["loss"] * row["tokens"] / math.log(2) / row["text_bytes"])
    assert (row["step"], row["seed"], row["precision"], row["tokenizer"]) == (trained.step, 0, "fp32", "bytes")


def test_a_text_file_is_judged_as_the_corpus_prepared_of_it(run, tmp_path):
    path = write_stories(tmp_path / "others.txt")
    prepare_file(path, tmp_path / "prepared")
    of_file = lm.evaluate_run(run, str(path), device="cpu")
    of_corpus = lm.evaluate_run(run, str(tmp_path / "prepared"), device="cpu")
    assert (of_file.pop("split"), of_corpus.pop("split")) == ("others", "prepared")
    assert of_file == of_corpus
    assert of_file["samples"] > 10


def test_of_another_corpus_all_documents_are_read_and_of_the_own_one_the_held_out_ones(run, corpus, tmp_path):
    data = lm.Data.of(open_run(run, "cpu").config)
    path = write_stories(tmp_path / "others.txt", stories=20)
    split = Corpus.open(prepare_file(path, tmp_path / "split", held_out=0.3))
    text = lm.open_text(data, str(tmp_path / "split"))
    assert text.tokens.tolist() == [*split.train.tolist(), *split.validation.tolist()]
    assert min(len(split.train), len(split.validation)) > 0
    shutil.copytree(corpus.folder, tmp_path / "copy")
    own = lm.open_text(data, str(tmp_path / "copy"))
    assert (own.name, own.tokens.tolist()) == ("validation", corpus.validation.tolist())


@pytest.mark.parametrize("held_out", [0.0, 0.2, 1.0])
def test_text_that_the_run_was_trained_on_is_refused_as_a_file_and_prepared_otherwise(held_out, tmp_path):
    path = write_stories(tmp_path / "own.txt", stories=20)
    config = tiny(Corpus.open(prepare_file(path, tmp_path / "corpus", held_out=0.3)))
    data = lm.Data.of(config)
    other = prepare_file(path, tmp_path / "other", held_out=held_out)
    for where in (path.rename(tmp_path / "renamed.txt"), other):
        with pytest.raises(ValueError) as error:
            lm.open_text(data, str(where))
        assert str(error.value).startswith(f"the run was trained on text that is in {str(where)!r}; name another text, or none")
    lm.open_text(data, str(write_stories(tmp_path / "new.txt", stories=20, seed=6)))


def test_text_that_the_run_was_trained_on_is_known_again_when_packed_or_cut_but_not_by_a_chance_likeness(tmp_path):
    file = write_stories(tmp_path / "stories.txt", 40)
    data = lm.Data.describe(Corpus.open(prepare_file(file, tmp_path / "corpus", 0.2)), LENGTH, 8)
    text = file.read_text()
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "longer.txt").write_text(text + "\n")
    (tmp_path / "shorter.txt").write_text(text[: len(text) // 3])
    for name in ("packed.txt.gz", "longer.txt", "shorter.txt"):
        with pytest.raises(ValueError, match="the run was trained on text that is in"):
            lm.open_text(data, str(tmp_path / name))
    separator = "\n<|endoftext|>\n"
    other = write_stories(tmp_path / "other.txt", 39, seed=6)
    other.write_text(separator.join([*text.split(separator)[:2], other.read_text()]))  # one of the two may be held out
    assert lm.open_text(data, str(other)).name == "other"


def test_more_stories_of_the_same_seed_are_text_that_the_run_was_trained_on(corpus, tmp_path):
    data = lm.Data.of(tiny(corpus))
    make_corpus(tmp_path / "more", stories=50)
    with pytest.raises(ValueError, match="the run was trained on text that is in"):
        lm.open_text(data, str(tmp_path / "more"))
    make_corpus(tmp_path / "new", stories=50, seed=1)
    assert lm.open_text(data, str(tmp_path / "new")).name == "new"


def test_a_file_that_was_all_held_out_is_not_text_that_the_run_was_trained_on(tmp_path):
    learned, kept = (write_stories(tmp_path / f"{name}.txt", 20, seed) for name, seed in (("learned", 5), ("kept", 6)))
    prepare([TextFile(learned, "train"), TextFile(kept, "validation")], Bytes(), tmp_path / "corpus", workers=1)
    corpus = Corpus.open(tmp_path / "corpus")
    data = lm.Data.of(tiny(corpus))
    assert lm.open_text(data, str(kept)).tokens.tolist() == corpus.validation.tolist()
    with pytest.raises(ValueError, match="the run was trained on text"):
        lm.open_text(data, str(learned))


def test_a_name_is_looked_for_in_data_and_beside_the_corpus_of_the_run(run, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = lm.Data.of(open_run(run, "cpu").config)
    path = write_stories(tmp_path / "text.txt")
    with pytest.raises(ValueError) as error:
        lm.open_text(data, "wiki")
    assert "'wiki' is neither a prepared corpus nor a text file" in str(error.value)
    prepare_file(path, corpus.folder.parent / "wiki")
    beside = lm.open_text(data, "wiki")
    prepare_file(write_stories(path, seed=6), tmp_path / "data" / "wiki")
    assert beside.name == lm.open_text(data, "wiki").name == "wiki"
    assert lm.open_text(data, "wiki").tokens.tolist() != beside.tokens.tolist()


def test_a_foreign_text_never_takes_the_place_of_the_own_validation_split(run, tmp_path):
    path = write_stories(tmp_path / "validation.txt")
    data = lm.Data.of(open_run(run, "cpu").config)
    assert lm.open_text(data, str(path)).name == "other validation"
    with pytest.raises(ValueError) as error:
        lm.open_text(data, str(path), "validation")
    assert str(error.value) == (
        f"'validation' stands for what was held out of the run's own corpus; give {str(path)!r} another name"
    )
    assert lm.open_text(data, data.folder, "validation").name == "validation"


def test_another_text_of_the_same_name_takes_the_place_of_the_first(run, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write_stories(tmp_path / "a" / "wiki.txt"), write_stories(tmp_path / "b" / "wiki.txt", seed=9)

    def kept():
        (row,) = (row for row in read_evaluation(run) if row["split"] == "wiki")
        return row["samples"], row["text_checksum"]

    checksum = lm.evaluate_run(run, str(first), 9, "cpu")["text_checksum"]
    lm.evaluate_run(run, str(first), 4, "cpu")
    assert kept() == (9, checksum)  # a quick look does not cost a thorough one
    other = lm.evaluate_run(run, str(second), 4, "cpu")["text_checksum"]
    assert kept() == (4, other)
    assert other != checksum
    prepared = prepare_file(first, tmp_path / "wiki")
    assert lm.evaluate_run(run, str(prepared), 4, "cpu")["text_checksum"] == checksum
    split = prepare_file(first, tmp_path / "split", held_out=0.5)
    text = lm.open_text(lm.Data.of(open_run(run, "cpu").config), str(split), "wiki")
    assert len({lm.evaluate_run(run, text, 4, "cpu")["text_checksum"], checksum, other}) == 3


def test_tokens_of_another_tokenizer_are_refused(run, tmp_path, monkeypatch):
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    source = TextFile(write_text(tmp_path / "a.txt", ["hello world"] * 9, "---"), separator="---")
    prepare([source], load_tokenizer("gpt2", ranks), tmp_path / "gpt2", 0.0, workers=1)
    with pytest.raises(RunError) as error:
        lm.evaluate_run(run, str(tmp_path / "gpt2"), device="cpu")
    assert "are of tokenizer 'gpt2'" in str(error.value)
    assert "prepare the text with --tokenizer bytes" in str(error.value)


def test_texts_without_a_window_are_told_in_one_sentence(run, tmp_path):
    short = "short: a stream of 6 tokens is too short for a window of 24"
    for text, words in (("", "there is no document in"), ("short", short)):
        (tmp_path / "short.txt").write_text(text)
        with pytest.raises(RunError) as error:
            lm.evaluate_run(run, str(tmp_path / "short.txt"), device="cpu")
        assert words in str(error.value)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    with pytest.raises(RunError, match="is not UTF-8 text"):
        lm.evaluate_run(run, str(tmp_path / "latin.txt"), device="cpu")


def test_ids_that_the_tokenizer_does_not_know_are_refused(run, tmp_path):
    folder = prepare_file(write_stories(tmp_path / "others.txt"), tmp_path / "damaged")
    for place in (0, 1):  # the first of all is read, and never foretold
        ids = np.fromfile(folder / "train.bin", "<u2")
        ids[0], ids[1] = 65, 65
        ids[place] = 300
        ids.tofile(folder / "train.bin")
        with pytest.raises(RunError, match="damaged: id 300 is outside the vocabulary"):
            lm.evaluate_run(run, str(folder), device="cpu")


def test_the_end_of_a_document_spells_no_byte():
    assert lm.count_bytes(Bytes(), np.array([[104, 256], [105, 105]])) == 3


def test_a_trained_run_is_evaluated_once(corpus, tmp_path):
    job = Job(tiny(corpus, keep="last"), tmp_path / "run", 5, "cpu")
    finish(job)
    (row,) = read_evaluation(job.folder)
    assert (row["split"], row["samples"], row["step"]) == ("validation", 5, 6)
    written = (job.folder / "evaluation.jsonl").stat().st_mtime_ns
    finish(job)
    assert (job.folder / "evaluation.jsonl").stat().st_mtime_ns == written
    finish(job._replace(samples=8))
    assert read_evaluation(job.folder)[0]["samples"] == 8


def test_a_trained_run_is_evaluated_on_other_texts_again_where_they_have_changed(corpus, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = write_stories(tmp_path / "others.txt")

    def complete(samples=5):
        lm.complete_evaluation(tiny(corpus), tmp_path / "run", samples, "cpu", texts={"near": str(path)})
        rows = {row["split"]: row for row in read_evaluation(tmp_path / "run")}
        return rows["near"], (tmp_path / "run/evaluation.jsonl").stat().st_mtime_ns

    first, written = complete()
    assert first["loss"] == lm.evaluate_run(run, str(path), 5, "cpu")["loss"]
    assert complete(3) == complete() == (first, written)
    write_stories(path, seed=6)
    second, _ = complete(3)
    assert (second["samples"], second["text_checksum"] != first["text_checksum"]) == (3, True)
    assert complete()[0]["samples"] == 5


def test_weights_of_another_step_are_evaluated_again(corpus, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/evaluation.jsonl").unlink(missing_ok=True)
    lm.complete_evaluation(tiny(corpus), tmp_path / "run", 5, "cpu")
    (row,) = read_evaluation(tmp_path / "run")
    (tmp_path / "run/evaluation.jsonl").write_text(json.dumps(row | {"step": row["step"] - 1, "loss": 0.0}) + "\n")
    lm.complete_evaluation(tiny(corpus), tmp_path / "run", 5, "cpu")
    assert read_evaluation(tmp_path / "run") == [row]


def test_a_file_is_read_once_for_its_evaluation(corpus, run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "run")
    path, read, opened = write_stories(tmp_path / "others.txt"), lm._read_file, []
    monkeypatch.setattr(lm, "_read_file", lambda data, path: opened.append(path) or read(data, path))
    lm.complete_evaluation(tiny(corpus), tmp_path / "run", 5, "cpu", texts={"near": str(path)})
    assert opened == [path]


def test_texts_are_named_and_those_that_cannot_serve_are_refused(corpus, tmp_path):
    data = lm.Data.of(tiny(corpus))
    text, short = write_stories(tmp_path / "wiki.txt"), write_text(tmp_path / "short.txt", ["too short"])
    found = lm.read_texts(f"far={text}, {text}", data)
    assert found == {"far": str(text), "wiki": str(text)}
    for asked, message in (
        (f"short={short}", "short=.*short.txt: a stream of 10 tokens is too short"),
        (f"simplewiki={corpus.folder}", "simplewiki=.* is the corpus of the runs themselves"),
        (f"validation={text}", "validation=.* would go by the name 'validation'"),
        (f"{text},wiki={text}", "would go by the name 'wiki'"),
        ("nowhere", "nowhere: 'nowhere' is neither a prepared corpus nor a text file"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.read_texts(asked, data)


def test_a_large_batch_is_learned_in_micro_batches_without_a_graph(long_corpus):
    config = lm.gpu_short(long_corpus)
    assert config.training.graph
    large, small = (lm.adjust(config, training={"batch": batch, "steps": 100}).training for batch in (512, 16))
    assert (large.accumulation, large.graph, large.warmup) == (16, False, 10)
    assert (small.accumulation, small.graph) == (1, True)
    given = lm.adjust(config, training={"batch": 512, "accumulation": 32})
    assert given.training.accumulation == 32


# -- stories and words ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["mosaic", "transformer"])
def test_a_story_is_what_the_uncached_model_takes_for_the_likeliest(model, corpus, tmp_path):
    lm.run(tiny(corpus, model, "gaussian"), tmp_path / "run", show_progress=False)
    teller = Teller.open(tmp_path / "run", "cpu")
    prompt = "Once upon"
    wish = Wish(12, Sampling(), stop=False)
    told = teller.stream(prompt, wish)
    text = "".join(told)
    tokens = list(prompt.encode())
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(teller.trained.model(torch.tensor([tokens]))[0, -1].argmax()))
    assert told.tokens == tokens[len(prompt) :]
    assert text == Bytes().decode(told.tokens)
    together = teller.tell([prompt, "A"], wish)
    assert "".join(together[0]) == text
    assert together[0].tokens == told.tokens


def test_a_story_stops_at_its_end_or_goes_on_if_told_to(run, monkeypatch):
    teller = Teller.open(run, "cpu")
    weight = teller.trained.model.embedding.weight
    with torch.no_grad():  # the end token is the likeliest after anything
        weight[256] = 100 * teller.trained.model.hidden(torch.tensor([[65]]))[0, -1]
    assert "".join(teller.stream("A", Wish(5, Sampling()))) == ""
    going = teller.stream("A", Wish(2, Sampling(), stop=False))
    assert "".join(going).startswith("<|endoftext|>")
    assert len(going.tokens) == 2


def test_a_text_that_goes_on_after_its_end_has_ended():
    stream = TextStream(iter([*b"a", 256, *b"b"]), Bytes(), stop=False)
    assert "".join(stream) == "a<|endoftext|>b"
    assert stream.ended


def test_a_kill_while_stories_are_saved_leaves_those_before(tmp_path, monkeypatch):
    def die(*given):
        raise KeyboardInterrupt

    save_stories(tmp_path, [{"text": "one"}])
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", die)  # all has been written, but not in its place
        with pytest.raises(KeyboardInterrupt):
            save_stories(tmp_path, [{"text": "two"}])
    assert (tmp_path / "stories.jsonl").read_text() == '{"text": "one"}\n'
    save_stories(tmp_path, [{"text": "three"}])
    assert (tmp_path / "stories.jsonl").read_text() == '{"text": "one"}\n{"text": "three"}\n'


def test_learned_positions_bound_a_story_and_its_prompt(corpus, tmp_path):
    lm.run(tiny(corpus, "transformer", "gaussian", steps=2), tmp_path / "run", show_progress=False)
    teller = Teller.open(tmp_path / "run", "cpu")
    told = teller.stream("a" * 20, Wish(100, Sampling(), stop=False))
    assert len(list(told)) <= len(told.tokens) == LENGTH - 20 + 1
    with pytest.raises(ValueError) as error:
        teller.stream("a" * (LENGTH + 1), Wish(3))
    assert str(error.value) == "a prompt of 25 tokens is longer than the 24 this model learned positions for; shorten it"


def test_words_to_look_at_are_what_the_tokens_spell(corpus, run):
    config = open_run(run, "cpu").config
    tokens, words = lm.example(config)
    assert tokens == corpus.validation[:LENGTH].tolist()
    assert "".join(words) == Bytes().decode(tokens)
    assert lm.read(config, "a fox") == ([97, 32, 102, 111, 120], ["a", " ", "f", "o", "x"])
    with pytest.raises(ValueError, match="has no tokens"):
        lm.read(config, "")
    assert json.loads((run / "config.json").read_text())["data"]["corpus"] == "stories"
