"""A corpus opens only as it was prepared, and its windows are a pure function of seed and number."""

import numpy as np
import pytest
import torch
from tests.data.text_examples import tiny_ranks, use_tiny_ranks

from compactattn.data.corpus import Corpus, Windows, fixed_windows
from compactattn.data.preparation import prepare
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import BytePairs, Bytes

TOKENS = np.arange(1000, dtype=np.uint16)


@pytest.fixture
def folder(tmp_path):
    prepare([Stories(60)], Bytes(), tmp_path / "corpus")
    return tmp_path / "corpus"


def test_a_corpus_tells_what_it_holds(folder):
    corpus = Corpus.open(folder)
    assert (corpus.tokenizer, corpus.vocab, corpus.end) == ("bytes", 257, 256)
    assert isinstance(corpus.train, np.memmap)
    assert corpus.train.dtype == np.uint16
    documents = bytes(corpus.validation.clip(0, 255).astype(np.uint8)).count(b"\xff")
    assert corpus.bytes_per_token == (len(corpus.validation) - documents) / len(corpus.validation) < 1
    assert corpus.windows(64, 3).vocab == 257
    corpus.verify()


def test_streams_cannot_be_written_by_mistake(folder):
    with pytest.raises(ValueError, match="read-only"):
        Corpus.open(folder).train[0] = 1


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
def test_a_stream_of_another_size_is_found_when_it_is_opened(folder, name):
    with open(folder / name, "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match=rf"{name}' is not as it was prepared: it has \d+ bytes, not the \d+"):
        Corpus.open(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name}' is not as it was prepared: it is missing"):
        Corpus.open(folder)


def test_an_altered_byte_is_found_by_verify(folder):
    with open(folder / "train.bin", "r+b") as file:
        file.seek(100)
        file.write(b"\x01\x01")
    with pytest.raises(ValueError, match=r"train.bin' is not as it was prepared: its checksum"):
        Corpus.open(folder).verify()


def test_an_id_outside_the_vocabulary_is_found_by_verify(folder):
    corpus = Corpus.open(folder)
    corpus.meta["tokenizer"]["vocab"] = 110
    with pytest.raises(ValueError, match=r"train.bin'.* it holds id 256, and the vocabulary has 110"):
        corpus.verify()


def test_folders_that_are_no_corpus_are_told(folder, tmp_path):
    with pytest.raises(ValueError, match=r"is no prepared corpus: it has no meta.json; make one"):
        Corpus.open(tmp_path)
    (folder / "meta.json").write_text('{"version": 99}')
    with pytest.raises(ValueError, match="has version 99 of the format"):
        Corpus.open(folder)
    (folder / "meta.json").write_text('{"version": 1, "tok')
    with pytest.raises(ValueError, match=r"meta.json' is damaged"):
        Corpus.open(folder)


def test_another_tokenizer_than_that_of_the_data_is_refused(folder):
    with pytest.raises(ValueError, match=r"are of tokenizer 'bytes' .* not of 'tiny'"):
        Corpus.open(folder).require(BytePairs("tiny", tiny_ranks()))
    Corpus.open(folder).require(Bytes())


def test_a_corpus_brings_its_tokenizer_along(tmp_path, monkeypatch):
    path = use_tiny_ranks(monkeypatch, tmp_path)
    prepare([Stories(60)], BytePairs("gpt2", path.read_bytes()), tmp_path / "corpus")
    path.unlink()
    corpus = Corpus.open(tmp_path / "corpus")
    text = corpus.load_tokenizer().decode(corpus.validation)
    assert text.count("<|endoftext|>") == corpus.meta["splits"]["validation"]["documents"]


# -- windows -------------------------------------------------------------------------------------


def test_a_window_holds_neighbours_and_the_token_that_follows_each():
    batch = Windows(TOKENS, 16, 0).batch(5, 8)
    assert batch.inputs.shape == (8, 16)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)
    assert torch.equal(batch.inputs, batch.inputs[:, :1] + torch.arange(16))
    assert batch.counted.all()
    assert batch.judged.all()


def test_a_sample_is_a_pure_function_of_seed_and_number():
    whole = Windows(TOKENS, 9, 4).batch(0, 50)
    for first in (40, 7, 23, 0):
        part = Windows(TOKENS, 9, 4).batch(first, 10)
        assert torch.equal(part.inputs, whole.inputs[first : first + 10])
    assert not torch.equal(whole.inputs, Windows(TOKENS, 9, 5).batch(0, 50).inputs)


def test_the_starts_are_frozen():
    assert Windows(TOKENS, 100, 0).starts(0, 5).tolist() == [586, 448, 68, 813, 200]


def test_every_start_is_equally_likely_from_the_first_to_the_last():
    starts = Windows(TOKENS[:28], 8, 0).starts(0, 20_000)
    counts = np.bincount(starts, minlength=20)
    assert len(counts) == 20  # 0 … 28 − 8 − 1
    assert ((counts - 1000) ** 2 / 1000).sum() < 19 + 4 * np.sqrt(38)


def test_a_stream_of_one_window_is_enough():
    batch = Windows(TOKENS[:9], 8, 0).batch(0, 3)
    assert batch.targets.tolist() == [list(range(1, 9))] * 3
    assert fixed_windows(TOKENS[:9], 8, 2).inputs.tolist() == [list(range(8))] * 2


def test_the_vocabulary_is_the_given_one_or_what_occurs():
    assert Windows(TOKENS, 8, 0).vocab == 1000
    assert Windows(TOKENS, 8, 0, 50257).vocab == 50257


@pytest.mark.parametrize("count", [1, 2, 7, 300])
def test_fixed_windows_are_spread_from_the_beginning_to_the_end(count):
    starts = fixed_windows(TOKENS, 100, count).inputs[:, 0]
    assert starts[0] == 0
    assert count == 1 or starts[-1] == 1000 - 100 - 1
    assert count <= 2 or (starts.diff().max() - starts.diff().min()) <= 1


@pytest.mark.parametrize("make", [lambda *a: Windows(*a, 0), lambda *a: fixed_windows(*a, 4)])
def test_a_stream_shorter_than_a_window_is_told(make):
    with pytest.raises(ValueError, match=r"a stream of 8 tokens is too short for a window of 8 .* windows of at most 7 tokens"):
        make(TOKENS[:8], 8)
    with pytest.raises(ValueError, match="a stream of 0 tokens"):
        make(TOKENS[:0], 8)
    with pytest.raises(ValueError, match="a window of 0 tokens is empty"):
        make(TOKENS, 0)


def test_wrong_numbers_of_samples_are_told():
    with pytest.raises(ValueError, match="samples are numbered from 0"):
        Windows(TOKENS, 8, 0).batch(-1, 4)
    with pytest.raises(ValueError, match="count = 0"):
        fixed_windows(TOKENS, 8, 0)
