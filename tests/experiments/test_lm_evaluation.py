"""A language model is judged on texts as they were written, and on none that it was trained on."""

import gzip
import json
import math
import shutil

import numpy as np
import pytest
import torch
from tests.data.text_examples import use_tiny_ranks, write_text
from tests.experiments.lm_examples import LENGTH, make_corpus, prepare_file, tiny, write_stories
from torch.nn.functional import cross_entropy

from compactattn.data.corpus import Corpus
from compactattn.data.preparation import prepare
from compactattn.data.sources import TextFile
from compactattn.data.tokenizers import Bytes, load_tokenizer
from compactattn.experiments import language_modelling as lm
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.experiments.sweep import Job, finish
from compactattn.training.config import RunError


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


def test_a_run_whose_corpus_has_moved_says_once_that_training_text_could_not_be_told(tmp_path, capsys):
    corpus = make_corpus(tmp_path / "corpus")
    data = lm.Data.of(tiny(corpus))
    path = write_stories(tmp_path / "others.txt")
    lm.open_text(data, str(path))
    assert capsys.readouterr().err == ""
    corpus.folder.rename(tmp_path / "moved")
    for _ in range(2):
        assert lm.open_text(data, str(path)).name == "others"
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"Note: whether the run was trained on text that is in {str(path)!r} could not be checked: ")
    assert "the corpus 'corpus' is no longer in" in said


def test_a_file_that_was_all_held_out_is_not_text_that_the_run_was_trained_on(tmp_path):
    learned, kept = (write_stories(tmp_path / f"{name}.txt", 20, seed) for name, seed in (("learned", 5), ("kept", 6)))
    prepare([TextFile(learned, "train"), TextFile(kept, "validation")], Bytes(), tmp_path / "corpus", workers=1)
    corpus = Corpus.open(tmp_path / "corpus")
    data = lm.Data.of(tiny(corpus))
    assert lm.open_text(data, str(kept)).tokens.tolist() == corpus.validation.tolist()
    with pytest.raises(ValueError, match="the run was trained on text"):
        lm.open_text(data, str(learned))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_text_that_is_not_as_it_was_prepared_is_refused_and_leaves_no_row(own, split, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", stories=20)
    lm.run(tiny(corpus), tmp_path / "run", show_progress=False)
    other = prepare_file(write_stories(tmp_path / "others.txt", stories=20), tmp_path / "other", held_out=0.3)
    path = (corpus.folder if own else other) / f"{split}.bin"
    tokens = np.fromfile(path, "<u2")
    tokens[5] = (tokens[5] + 1) % 256  # still in the vocabulary
    tokens.tofile(path)
    if own and split == "train":  # which is not read
        assert lm.evaluate_run(tmp_path / "run", device="cpu")["split"] == "validation"
        return
    with pytest.raises(RunError) as error:
        lm.evaluate_run(tmp_path / "run", "" if own else str(other), device="cpu")
    assert str(error.value).startswith(f"{str(path)!r} is not as it was prepared: its checksum is not the one in meta.json; ")
    assert read_evaluation(tmp_path / "run") == []


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


def test_ids_that_the_tokenizer_does_not_know_are_refused(run):
    for place in (0, 1):  # the first of all is read, and never foretold
        ids = np.full(2 * LENGTH, 65, "<u2")
        ids[place] = 300
        with pytest.raises(RunError, match="damaged: id 300 is outside the vocabulary"):
            lm.evaluate_run(run, lm.Text("damaged", ids, "0"), device="cpu")


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
