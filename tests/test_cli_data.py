"""The commands that prepare text tell what is in the corpus, and what the user can put right."""

import itertools
import json
import re
import sys
import types

import pytest
from tests.data.text_examples import cut_off, use_tiny_ranks, write_json_lines, write_text

from compactattn import cli
from compactattn.cli import work
from compactattn.data import babistories, grammar, preparation, tokenizers
from compactattn.data.corpus import Corpus
from compactattn.data.sources import hash_file
from compactattn.data.stories import tell_stories


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def fail(capsys, *arguments, status=2):
    """What a command that must fail says."""
    with pytest.raises(SystemExit) as exit:
        cli.main([str(argument) for argument in arguments])
    assert exit.value.code == status
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.err


def test_demo_stories_need_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(["data", "demo-stories", "--stories", "100", "--seed", "7"])
    corpus = Corpus.open("data/demo-stories")
    corpus.verify()
    assert corpus.load_tokenizer().decode(corpus.train).startswith(tell_stories(7, 0, 1)[0].text)
    said = capsys.readouterr().out
    assert f"{len(corpus.train):,}" in said
    assert "Corpus: data/demo-stories" in said
    cli.main(["data", "demo-stories", "--stories", "100", "--seed", "7"])
    assert "Nothing to do: the corpus is there already." in capsys.readouterr().out
    (tmp_path / "data/demo-stories/train.bin").unlink()
    cli.main(["data", "demo-stories", "--stories", "100", "--seed", "7"])
    assert capsys.readouterr().out.startswith("Done in ")
    assert "(sources[0].seed: 7 → 0; sources[0].stories: 100 → 50); delete it" in fail(
        capsys, "data", "demo-stories", "--stories", "50"
    )


def test_a_corpus_of_an_older_version_is_refused_not_misread(tmp_path, capsys, monkeypatch):
    command = ["data", "demo-stories", "--stories", "40", "--out", str(tmp_path)]
    cli.main(command)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for module, what in ((preparation, "version"), (grammar, "sources[0].grammar")):
        older = module.VERSION
        with monkeypatch.context() as patch:
            patch.setattr(module, "VERSION", 99)
            assert f"holds a corpus made otherwise ({what}: {older} → 99); delete it, or choose" in fail(capsys, *command)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "meta.json").write_text("{")
    assert "meta.json' is damaged" in fail(capsys, *command)


def test_what_differs_from_the_corpus_in_the_folder_is_told_value_by_value(tmp_path, capsys):
    options = "--tokenizer", "bytes", "--held-out", "0.3", "--out", tmp_path / "out"
    files = [write_text(tmp_path / f"{name}.txt", [name, "two", "three"]) for name in ("a", "bee", "c", "d", "e")]
    cli.main(["data", "text", *map(str, [files[0], *options])])
    checksums = [hash_file(path)[:8] for path in files]
    said = fail(capsys, "data", "text", files[1], *options)
    first = 'sources[0].file: "a.txt" → "bee.txt"; sources[0].bytes: 40 → 42; sources[0].sha256: '
    assert f'made otherwise ({first}"{checksums[0]}…" → "{checksums[1]}…"); delete it' in said
    assert "; 23 more); delete it" in fail(capsys, "data", "text", *files[1:], files[0], *options)


def test_text_of_several_files_and_formats_becomes_one_corpus(tmp_path, monkeypatch):
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    plain = write_text(tmp_path / "a.txt.gz", ["hello", "world"], "---")
    lines = write_json_lines(tmp_path / "b.jsonl", ["the", {"text": "end"}])
    options = ["--ranks", ranks, "--separator", "---", "--held-out", "0", "--out", tmp_path / "out"]
    cli.main(["data", "text", *map(str, [plain, lines, *options])])
    corpus = Corpus.open(tmp_path / "out")
    assert corpus.tokenizer == "gpt2"
    end = "<|endoftext|>"
    assert corpus.load_tokenizer().decode(corpus.train) == f"hello{end}world{end}the{end}end{end}"


def test_babistories_come_from_a_folder_with_their_own_splits(tmp_path, monkeypatch, capsys):
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    for name, stories in zip(babistories.FILES, (["hello", "world"], ["the"]), strict=True):
        write_json_lines(tmp_path / name, stories)
    cli.main(["data", "babistories", "--archive", str(tmp_path), "--ranks", str(ranks), "--out", str(tmp_path / "out")])
    splits = json.loads((tmp_path / "out/meta.json").read_text())["splits"]
    assert [splits[name]["documents"] for name in ("train", "validation")] == [2, 1]
    assert "Note: validation has 2 tokens; the published corpus has 4,749,107." in capsys.readouterr().out


def test_a_download_goes_to_a_folder_of_its_own(tmp_path, monkeypatch, capsys):
    ranks = use_tiny_ranks(monkeypatch, tmp_path)

    def fetch(folder, progress):
        folder.mkdir(parents=True)
        progress("part", 1, 2)
        for name in babistories.FILES:
            write_json_lines(folder / name, ["hello"])

    monkeypatch.setattr(babistories, "download_archive", fetch)
    cli.main(["data", "babistories", "--download", "--ranks", str(ranks), "--out", str(tmp_path / "out")])
    assert (tmp_path / "out/archive" / babistories.FILES[0]).is_file()
    assert len(Corpus.open(tmp_path / "out").train) == 2


@pytest.fixture
def clock(monkeypatch):
    """Time that passes by 20 seconds at a look."""
    now = itertools.count(0, 20)
    monkeypatch.setattr(work, "time", types.SimpleNamespace(monotonic=lambda: next(now)))


@pytest.mark.parametrize("terminal", [False, True])
def test_preparation_tells_every_half_minute_how_far_it_is_where_there_is_no_terminal(
    terminal, tmp_path, monkeypatch, capsys, clock
):
    def prepare(sources, tokenizer, out, held_out, workers, tell):
        for done in (1_400_000, 2_000_000, 3_000_000, 4_100_000):
            tell(done, 5_000_000)
        return real(sources, tokenizer, out, held_out, workers)

    real = preparation.prepare
    monkeypatch.setattr("compactattn.cli.data.prepare", prepare)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    file = write_text(tmp_path / "file.txt", [*"abcdefghijklmnopqrstuvwxyz"])
    cli.main(["data", "text", str(file), "--tokenizer", "bytes", "--held-out", "0.3", "--out", str(tmp_path / "out")])
    told = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" of 5 MB")]
    assert told == ([] if terminal else [f"{tmp_path / 'out'}: {done} of 5 MB" for done in (2, 5)])


def test_a_download_tells_every_half_minute_how_far_it_is(tmp_path, monkeypatch, capsys, clock):
    def fetch(folder, progress):
        for done, total in ((1_000_000, 0), (2_000_000, 0), (3_000_000, 9_000_000), (4_000_000, 9_000_000)):
            progress("part", done, total)
        raise ValueError("enough")

    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    monkeypatch.setattr(babistories, "download_archive", fetch)
    with pytest.raises(SystemExit):
        cli.main(["data", "babistories", "--download", "--ranks", str(ranks), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.splitlines() == ["part: 2 MB", "part: 4 of 9 MB"]


def test_unpacking_is_told_before_it_begins(tmp_path, monkeypatch, capsys):
    ranks, out = use_tiny_ranks(monkeypatch, tmp_path), tmp_path / "out"
    (tmp_path / "archive").mkdir()

    def extract(parts, folder, unpack):
        assert capsys.readouterr().out == f"unpacking {tmp_path / 'archive'} to {out / 'unpacked'} …\n"
        raise ValueError("enough")

    monkeypatch.setattr(babistories, "check_archive", lambda folder: [])
    monkeypatch.setattr(babistories, "extract", extract)
    said = fail(capsys, "data", "babistories", "--archive", tmp_path / "archive", "--ranks", ranks, "--out", out)
    assert said == "compactattn: enough\n"


@pytest.mark.parametrize("way", ["--download", "--archive DIR", "--archive DIR --download"])
def test_a_missing_unpacker_is_told_before_any_work(tmp_path, monkeypatch, capsys, way):
    monkeypatch.setitem(sys.modules, "py7zr", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(babistories, "download_archive", lambda *_: pytest.fail("it was downloaded"))
    monkeypatch.setattr(babistories, "check_archive", lambda *_: pytest.fail("the archive was read"))
    ranks = use_tiny_ranks(monkeypatch, tmp_path)
    options = way.replace("DIR", str(tmp_path)).split()
    said = fail(capsys, "data", "babistories", *options, "--ranks", ranks, "--out", tmp_path / "out")
    assert "nothing here unpacks 7z archives; install py7zr (pip install 'compactattn[babistories]'" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["babistories --download", "text FILE", "demo-stories --tokenizer gpt2"])
def test_without_a_network_the_ranks_can_be_fetched_by_hand(command, tmp_path, monkeypatch, capsys):
    cut_off(monkeypatch, tmp_path)
    file = write_text(tmp_path / "file.txt", ["one", "two"])
    said = fail(capsys, "data", *command.replace("FILE", str(file)).split(), "--out", tmp_path / "out")
    first, *rest = said.splitlines()
    remedy = "give their file with --ranks FILE" + ("" if "babi" in command else ", or take --tokenizer bytes")
    assert first == f"compactattn: the ranks of GPT-2 could not be fetched (Name or service not known); {remedy}"
    assert [line.split() for line in rest] == [["file", tokenizers.GPT2_URL], ["SHA-256", tokenizers.GPT2_SHA256]]
    assert not (tmp_path / "out").exists()


def test_a_split_that_holds_no_window_is_noted(tmp_path, capsys):
    def prepare(documents, *options):
        file = write_text(tmp_path / "file.txt", documents)
        out = tmp_path / str(sum(1 for _ in tmp_path.iterdir()))
        cli.main(["data", "text", str(file), "--tokenizer", "bytes", "--out", str(out), *options])
        return capsys.readouterr().err, out

    said, out = prepare(["a"])
    both = "train has 1 token and validation has 1 token"
    assert said == f"Note: {both}; `compactattn train lm` needs at least 2 in each split.\n"
    refused = fail(capsys, "train", "lm", "--data", out)
    assert "a stream of 1 token is too short for a window of 128 and the token after it; give more text\n" in refused
    assert prepare(["one", "two"], "--held-out", "0")[0].startswith("Note: validation has no tokens; ")
    assert prepare(["one", "two"], "--held-out", "1")[0].startswith("Note: train has no tokens; ")
    assert prepare(["a word and another " * 3])[0] == ""
    assert prepare([*"abcdefghijklmnopqrstuvwxyz"], "--held-out", "0.3")[0] == ""


def test_a_single_document_is_said_to_be_cut(tmp_path, capsys):
    for documents in (["one word after another"], [*"abcdefghijklmnopqrstuvwxyz"]):
        file = write_text(tmp_path / "file.txt", documents)
        out = tmp_path / str(len(documents))
        cli.main(["data", "text", str(file), "--tokenizer", "bytes", "--held-out", "0.3", "--out", str(out)])
        assert ("its last part is held out" in capsys.readouterr().out) == (len(documents) == 1)


def test_mistakes_are_told_in_a_sentence(tmp_path, capsys):
    empty, short = tmp_path / "empty.txt", write_text(tmp_path / "short.txt", ["one", "two"])
    empty.write_text("")
    common = ("--tokenizer", "bytes", "--out", tmp_path / "new/out")
    assert "there is no document in empty.txt" in fail(capsys, "data", "text", empty, *common)
    said = fail(capsys, "data", "text", short, *common)
    assert "leave none for validation" in said
    assert 'with --separator "", or choose' in said
    said = fail(capsys, "data", "demo-stories", "--stories", "10", *common)
    assert "10 documents in the generator leave none for validation" in said
    assert "give more documents, or choose another --held-out" in said
    assert "there is no such file" in fail(capsys, "data", "text", tmp_path / "none", *common)
    said = fail(capsys, "data", "text", short, "--ranks", short)
    assert re.search(
        r"is not the ranks of GPT-2: its SHA-256 is \w+; give their file with --ranks FILE, or take --tokenizer", said
    )
    assert "held_out = 2.0 is no share" in fail(capsys, "data", "text", short, *common, "--held-out", "2")
    assert "workers = 0 must be at least 1" in fail(capsys, "data", "text", short, *common, "--workers", "0")
    assert "name at least one file" in fail(capsys, "data", "text")
    assert not (tmp_path / "new").exists()
    assert "--archive DIR, or fetch it with --download" in fail(capsys, "data", "babistories")
    assert "stories = 0" in fail(capsys, "data", "demo-stories", "--stories", "0", "--out", tmp_path / "out")


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("compactattn.cli.data.prepare", interrupt)
    said = fail(capsys, "data", "demo-stories", "--out", tmp_path / "out", status=130)
    assert "the same command goes on from there" in said
