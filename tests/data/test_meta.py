"""Whatever stands in meta.json or the journal, a person is told what is wrong with it, or the work is done again."""

import json

import pytest
from tests.data.text_examples import write_text

from compactattn.data.corpus import Corpus
from compactattn.data.meta import read_meta
from compactattn.data.preparation import prepare
from compactattn.data.sources import TextFile
from compactattn.data.tokenizers import Bytes


@pytest.fixture
def source(tmp_path):
    return TextFile(write_text(tmp_path / "file.txt", [f"story {i} " * 9 for i in range(60)]))


@pytest.fixture
def folder(source, tmp_path):
    prepare([source], Bytes(), tmp_path / "corpus")
    return tmp_path / "corpus"


def test_what_preparation_writes_is_sound(folder):
    assert read_meta(folder) == Corpus.open(folder).meta


def without(meta, name):
    return {key: value for key, value in meta.items() if key != name}


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda meta: {"version": 1}, "tokenizer is missing"),
        (lambda meta: [1], "it is no dictionary"),
        (lambda meta: "corpus", "it is no dictionary"),
        (lambda meta: without(meta, "splits"), "splits is missing"),
        (lambda meta: meta | {"splits": without(meta["splits"], "train")}, "splits.train is missing"),
        (
            lambda meta: meta | {"tokenizer": meta["tokenizer"] | {"vocab": "257"}},
            'tokenizer.vocab is "257", not a whole number',
        ),
        (lambda meta: meta | {"tokenizer": meta["tokenizer"] | {"vocab": True}}, "tokenizer.vocab is true, not a whole number"),
        (lambda meta: meta | {"tokenizer": meta["tokenizer"] | {"end": -1}}, "tokenizer.end is -1, not a whole number"),
        (lambda meta: meta | {"tokenizer": None}, "tokenizer is no dictionary"),
        (lambda meta: meta | {"sources": {}}, "sources is no list"),
        (lambda meta: meta | {"sources": [{}]}, r"sources\[0\].split is missing"),
        (lambda meta: meta | {"sources": [{"split": 3}]}, r"sources\[0\].split is 3, not text or null"),
    ],
)
def test_contents_that_are_not_those_of_a_corpus_are_told(folder, source, damage, why):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(damage(meta)))
    for act in (lambda: Corpus.open(folder), lambda: prepare([source], Bytes(), folder)):
        with pytest.raises(
            ValueError, match=rf"meta.json' is damaged \({why}.*\); delete the folder and prepare the corpus again"
        ):
            act()


@pytest.mark.parametrize("content", ["{", "", "\udcff"])
def test_what_is_no_json_is_told(folder, source, content):
    (folder / "meta.json").write_bytes(content.encode(errors="surrogateescape"))
    for act in (lambda: Corpus.open(folder), lambda: prepare([source], Bytes(), folder)):
        with pytest.raises(ValueError, match=r"meta.json' is damaged \(.+\); delete the folder and prepare the corpus again"):
            act()


@pytest.mark.parametrize(("content", "why"), [("garbage", "it is no JSON"), ("[1]", "it is no dictionary")])
def test_a_journal_that_does_not_say_of_what_it_is_is_told(source, tmp_path, content, why):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/journal.jsonl").write_text(f"{content}\n")
    with pytest.raises(
        ValueError, match=rf"journal.jsonl' is damaged \({why}.*\); delete the folder and prepare the corpus again"
    ):
        prepare([source], Bytes(), tmp_path / "out")
