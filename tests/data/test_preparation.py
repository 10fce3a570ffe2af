"""The same text gives the same bytes, with any number of workers and after any interruption; bad text gives none."""

import hashlib
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from tests.data.text_examples import tiny_ranks, write_json_lines, write_text

from compactattn.data import preparation, sources
from compactattn.data.corpus import Corpus
from compactattn.data.preparation import is_held_out, prepare
from compactattn.data.sources import JsonLines, TextFile, open_sources
from compactattn.data.tokenizers import BytePairs, Bytes

DOCUMENTS = [f"hello world, the {i}th\n\nstory: " + "the hello " * (i % 23) + "é" * (i % 3) for i in range(300)]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 512)
    monkeypatch.setattr(preparation, "CHUNK", 100)
    monkeypatch.setattr(preparation, "SECONDS_BETWEEN_MARKS", -1.0)  # a mark after every block


@pytest.fixture
def pairs():
    return BytePairs("tiny", tiny_ranks())


def text(tmp_path, documents=DOCUMENTS):
    return [TextFile(write_text(tmp_path / "file.txt", documents))]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def expected(tokenizer, documents, held):
    chosen = [d for d, h in zip(documents, held_out_of(documents), strict=True) if h == held]
    return [i for document in chosen for i in [*tokenizer.encode(document), tokenizer.end]]


def held_out_of(documents, share=0.05):
    return is_held_out(np.arange(len(documents)), share).tolist()


@pytest.mark.parametrize("block", [100, 512, 1 << 20])
@pytest.mark.parametrize("name", ["bytes", "pairs"])
def test_each_split_is_its_documents_each_with_its_end(tmp_path, monkeypatch, pairs, block, name):
    monkeypatch.setattr(sources, "BLOCK", block)  # the smallest cuts documents into parts
    tokenizer = Bytes() if name == "bytes" else pairs
    meta = prepare(text(tmp_path), tokenizer, tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.train.tolist() == expected(tokenizer, DOCUMENTS, False)
    assert corpus.validation.tolist() == expected(tokenizer, DOCUMENTS, True)
    held = held_out_of(DOCUMENTS)
    for split, chosen in (("train", False), ("validation", True)):
        documents = [d for d, h in zip(DOCUMENTS, held, strict=True) if h == chosen]
        told = meta["splits"][split]
        assert told["documents"] == len(documents) > 0
        assert told["bytes"] == sum(len(d.encode()) for d in documents)
        assert told["tokens"] == len(getattr(corpus, split))
        assert told["sha256"] == hashlib.sha256((tmp_path / "out" / told["file"]).read_bytes()).hexdigest()


def test_meta_tells_where_the_tokens_come_from(tmp_path, pairs):
    (source,) = text(tmp_path)
    meta = prepare([source], pairs, tmp_path / "out", 0.1)
    assert json.loads((tmp_path / "out/meta.json").read_text()) == meta
    assert meta["tokenizer"] == {"name": "tiny", "sha256": pairs.hash, "vocab": pairs.vocab, "end": pairs.end}
    assert meta["held_out"] == 0.1
    (told,) = meta["sources"]
    assert told["sha256"] == hashlib.sha256(source.path.read_bytes()).hexdigest()
    assert (told["file"], told["bytes"]) == ("file.txt", source.path.stat().st_size)
    assert (tmp_path / "out/ranks.tiktoken").read_bytes() == tiny_ranks()
    assert not (tmp_path / "out/journal.jsonl").exists()


def test_the_number_of_workers_changes_no_byte(tmp_path, small_blocks, pairs):
    for workers in (1, 2, 7):
        prepare(text(tmp_path), pairs, tmp_path / str(workers), workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "7")


def tear(folder, *lines):
    """What a process killed while it wrote leaves: tokens without a mark, and lines that are no mark."""
    for name in ("train.bin", "validation.bin"):
        with open(folder / name, "ab") as file:
            file.write(b"\x01\x02\x03")
    with open(folder / "journal.jsonl", "ab") as file:
        file.writelines(lines)


@pytest.mark.parametrize("after", [0, 1, 17, 60])
def test_an_interrupted_preparation_goes_on_to_the_same_bytes(tmp_path, small_blocks, pairs, monkeypatch, after):
    parts = {"a.txt": DOCUMENTS[:140], "b.txt.gz": DOCUMENTS[140:]}
    files = [TextFile(write_text(tmp_path / name, part)) for name, part in parts.items()]
    prepare(files, pairs, tmp_path / "whole")
    starts, read, blocks = [], [], TextFile.blocks

    def interrupt(done, total):
        if len(read) in (after, after + 2):
            read.append(None)
            raise KeyboardInterrupt
        read.append(done)

    for _ in range(2):  # the second time behind a torn mark
        with pytest.raises(KeyboardInterrupt):
            prepare(files, pairs, tmp_path / "parts", progress=interrupt)
        with pytest.raises(ValueError, match="is unfinished; run the command that began it again"):
            Corpus.open(tmp_path / "parts")
        tear(tmp_path / "parts", b'{"source": 1, "pla')
    monkeypatch.setattr(TextFile, "blocks", lambda self, *at: starts.append((self.name, *at)) or blocks(self, *at))
    prepare(files, pairs, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert starts[0][:2] > ("a.txt", 0)  # it did not begin again


NONE = {"documents": 0, "tokens": 0, "bytes": 0}
WRONG = json.dumps({"source": 0, "place": "9", "opens": True, "begun": 0, "train": NONE, "validation": NONE}).encode()


@pytest.mark.parametrize("line", [b'{"source": 1, "pla', b"\xff\xfe", b"", b'{"source": 0}', b"[1]", b"7", b"null", WRONG])
def test_marks_behind_a_line_that_is_none_are_not_trusted(tmp_path, small_blocks, monkeypatch, line):
    prepare(text(tmp_path), Bytes(), tmp_path / "whole")

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text(tmp_path), Bytes(), tmp_path / "parts", progress=interrupt)
    journal = tmp_path / "parts/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:4], line, b"\n", *lines[4:]]))
    starts, blocks = [], TextFile.blocks
    monkeypatch.setattr(TextFile, "blocks", lambda self, *at: starts.append(at) or blocks(self, *at))
    prepare(text(tmp_path), Bytes(), tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    assert starts == [(json.loads(lines[3])["place"], json.loads(lines[3])["opens"])]


def test_a_mark_that_the_files_do_not_bear_out_is_not_trusted(tmp_path, small_blocks, pairs):
    prepare(text(tmp_path), pairs, tmp_path / "whole")

    def interrupt(done, total):
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(text(tmp_path), pairs, tmp_path / "parts", progress=interrupt)
    with open(tmp_path / "parts/train.bin", "ab") as file:
        file.truncate(1001)
    prepare(text(tmp_path), pairs, tmp_path / "parts")
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_killed_process_leaves_work_that_can_go_on(tmp_path):
    prepare(text(tmp_path), Bytes(), tmp_path / "whole")
    program = f"""
import os, pathlib
from compactattn.data import preparation, sources, tokenizers
sources.BLOCK, preparation.SECONDS_BETWEEN_MARKS = 512, -1.0
calls = []
def kill(done, total):
    calls.append(done)
    if len(calls) == 20:
        os.kill(os.getpid(), 9)
source = sources.TextFile(pathlib.Path({str(tmp_path / "file.txt")!r}))
preparation.prepare([source], tokenizers.Bytes(), {str(tmp_path / "killed")!r}, progress=kill)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == -9, done.stderr
    assert len((tmp_path / "killed/journal.jsonl").read_text().splitlines()) >= 20
    prepare(text(tmp_path), Bytes(), tmp_path / "killed")
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_a_finished_corpus_is_left_alone(tmp_path):
    meta = prepare(text(tmp_path), Bytes(), tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert prepare(text(tmp_path), Bytes(), tmp_path / "out", progress=lambda *_: pytest.fail("it worked again")) == meta
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("name", ["train.bin", "validation.bin"])
@pytest.mark.parametrize("left", [None, 10])  # bytes of the file
def test_a_finished_corpus_that_has_lost_a_file_is_prepared_again(tmp_path, name, left):
    prepare(text(tmp_path), Bytes(), tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    if left:
        (tmp_path / "out" / name).write_bytes(before[name][:left])
    with pytest.raises(ValueError, match=r"\(held_out: 0.05 → 0.5\); delete it"):
        prepare(text(tmp_path), Bytes(), tmp_path / "out", 0.5)
    prepare(text(tmp_path), Bytes(), tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_another_corpus_is_never_written_over(tmp_path, pairs):
    prepare(text(tmp_path), Bytes(), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(ValueError, match=r'made otherwise .tokenizer.name: "bytes" → "tiny"; .* delete it, or choose another'):
        prepare(text(tmp_path), pairs, tmp_path / "out")
    with pytest.raises(ValueError, match=r"\(held_out: 0.05 → 0.5\); delete it"):
        prepare(text(tmp_path), Bytes(), tmp_path / "out", 0.5)
    with pytest.raises(ValueError, match=r"\(sources\[0\].bytes: \d+ → \d+; sources\[0\].sha256: .*\); delete it"):
        prepare(text(tmp_path, DOCUMENTS[1:]), Bytes(), tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match="of something else"):
        prepare(text(tmp_path), Bytes(), tmp_path / "mine")
    assert contents(tmp_path / "out") == before
    assert contents(tmp_path / "mine") == {"train.bin": b"mine"}


def test_two_processes_do_not_write_to_one_folder(tmp_path):
    def again(done, total):
        with pytest.raises(ValueError, match="another process is preparing"):
            prepare(text(tmp_path), Bytes(), tmp_path / "out")

    prepare(text(tmp_path), Bytes(), tmp_path / "out", progress=again)


HELD_OUT = [24, 39, 49, 98]


def test_held_out_documents_are_a_pure_function_of_their_number():
    numbers = np.arange(100_000)
    held = is_held_out(numbers, 0.05)
    assert np.array_equal(is_held_out(numbers[777:1000], 0.05), held[777:1000])
    assert abs(held.mean() - 0.05) < 5 * np.sqrt(0.05 * 0.95 / len(numbers))
    assert held[:100].nonzero()[0].tolist() == HELD_OUT  # frozen: another choice would mix validation into training
    assert not (held & ~is_held_out(numbers, 0.2)).any()
    assert not is_held_out(numbers, 0.0).any()
    assert is_held_out(numbers, 1.0).all()


def test_sources_may_name_their_split(tmp_path):
    train = JsonLines(write_json_lines(tmp_path / "t.jsonl", ["a", "", "b"]), "train")
    validation = JsonLines(write_json_lines(tmp_path / "v.jsonl", ["c"]), "validation")
    meta = prepare([train, validation], Bytes(), tmp_path / "out")
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.train.tolist() == [97, 256, 256, 98, 256]
    assert corpus.validation.tolist() == [99, 256]
    assert meta["held_out"] is None


def test_all_or_nothing_may_be_held_out(tmp_path):
    for share, empty in ((0, "validation"), (1, "train")):
        prepare(text(tmp_path), Bytes(), tmp_path / f"out{share}", share)
        corpus = Corpus.open(tmp_path / f"out{share}")
        assert len(getattr(corpus, empty)) == 0
        assert len(corpus.train) + len(corpus.validation) == sum(len(d.encode()) + 1 for d in DOCUMENTS)
        corpus.verify()


@pytest.mark.parametrize("share", [0.05, 0.3, 0.999])  # at the last the hash would hold all of it out
def test_of_a_single_document_the_last_part_is_held_out(tmp_path, small_blocks, share):
    said = "é and so on, " * 100
    prepare([TextFile(write_text(tmp_path / "book.txt", [said]))], Bytes(), tmp_path / "out", share)
    corpus, whole = Corpus.open(tmp_path / "out"), [*said.encode(), Bytes().end]
    assert [*corpus.train, *corpus.validation] == whole
    assert len(corpus.validation) == pytest.approx(share * len(whole), abs=1)
    splits = corpus.meta["splits"]
    assert corpus.meta["tail"]
    assert [splits[name]["documents"] for name in ("train", "validation")] == [1, 1]
    assert [splits[name]["bytes"] for name in ("train", "validation")] == [len(corpus.train), len(corpus.validation) - 1]
    corpus.verify()
    assert prepare([TextFile(tmp_path / "book.txt")], Bytes(), tmp_path / "out", share) == corpus.meta


@pytest.mark.parametrize("share", [0.3, 0.6, 0.999])
def test_the_bytes_of_a_held_out_tail_are_those_of_its_tokens(tmp_path, small_blocks, pairs, share):
    said = "hello world, the éé 1212\n\n" * 100
    meta = prepare([TextFile(write_text(tmp_path / "book.txt", [said]))], pairs, tmp_path / "out", share)
    corpus = Corpus.open(tmp_path / "out")
    sizes = [len(pairs.to_bytes(tokens)) for tokens in (corpus.train, corpus.validation[:-1])]
    assert [meta["splits"][name]["bytes"] for name in ("train", "validation")] == sizes
    assert [meta["splits"][name]["tokens"] for name in ("train", "validation")] == [len(corpus.train), len(corpus.validation)]


def test_holding_out_the_tail_takes_no_more_memory_of_a_longer_document(tmp_path, monkeypatch):
    monkeypatch.setattr(preparation, "CHUNK", 1 << 12)
    hold_out, peaks = preparation._hold_out_tail, []

    def measure(*arguments):
        tracemalloc.start()
        try:
            return hold_out(*arguments)
        finally:
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    monkeypatch.setattr(preparation, "_hold_out_tail", measure)
    for lines in (1_000, 30_000):
        book = write_text(tmp_path / f"{lines}.txt", ["one word after another and so on\n" * lines])
        prepare([TextFile(book)], Bytes(), tmp_path / str(lines), 0.5)
    short, long = peaks
    assert long < 1.5 * short


@pytest.mark.parametrize("share", [0.05, 0.6, 0.999])
@pytest.mark.parametrize("broken", ["_finish", "os.truncate"])
def test_a_single_document_survives_an_interruption_at_its_tail(tmp_path, small_blocks, monkeypatch, share, broken):
    book = [TextFile(write_text(tmp_path / "book.txt", ["".join(f"{i}é and so on, " for i in range(100))]))]
    prepare(book, Bytes(), tmp_path / "whole", share)

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"compactattn.data.preparation.{broken}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(book, Bytes(), tmp_path / "parts", share)
    prepare(book, Bytes(), tmp_path / "parts", share)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no document in file.txt"),
        (b"\n<|endoftext|>\n \n", "there is no document in file.txt"),
        (b"one\n<|endoftext|>\ntwo\n", "2 documents in file.txt leave none for validation at a held-out share of 0.05"),
        (b"good\n" * 500 + b"caf\xe9\n", "not UTF-8 text: byte 0xe9 in line 501"),
    ],
)
def test_bad_text_gives_a_clear_error_and_leaves_the_folder_free(tmp_path, small_blocks, content, message):
    (tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(open_sources([tmp_path / "file.txt"]), Bytes(), tmp_path / "out")
    assert contents(tmp_path / "out") == {}
    prepare(text(tmp_path), Bytes(), tmp_path / "out")


def test_ids_outside_the_vocabulary_are_found_while_preparing(tmp_path):
    class Wrong(Bytes):
        vocab, end = 101, 100

    with pytest.raises(ValueError, match=r"file.txt: tokenizer 'bytes' gave id \d+, but its vocabulary has 101"):
        prepare(text(tmp_path), Wrong(), tmp_path / "out")


def test_wrong_settings_are_told(tmp_path):
    class Wide(Bytes):
        vocab = 100_000

    with pytest.raises(ValueError, match="held_out = 5 is no share"):
        prepare(text(tmp_path), Bytes(), tmp_path / "out", 5)
    with pytest.raises(ValueError, match="100000 ids, more than the 65536"):
        prepare(text(tmp_path), Wide(), tmp_path / "out")
    with pytest.raises(ValueError, match="no source of text"):
        prepare([], Bytes(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
