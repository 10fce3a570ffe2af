"""Text comes back from its ids, ids mean what the published ranks say, and a wrong file is refused."""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.data.text_examples import tiny_ranks, use_tiny_ranks

from compactattn.data import tokenizers
from compactattn.data.tokenizers import GPT2_SHA256, GPT2_URL, BytePairs, Bytes, RanksError, load_tokenizer, read_ranks

TEXTS = ["", "hello world", "  spaces\t\n\n and lines\n", "naïve café – 東京 🙂", "a<|endoftext|>b", "\x00\x7f"]
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "r50k_base.tiktoken"
needs_ranks = pytest.mark.skipif(not PUBLISHED.is_file(), reason="the published ranks of GPT-2 are not here")


@pytest.fixture(params=["bytes", "pairs"])
def tokenizer(request):
    return Bytes() if request.param == "bytes" else BytePairs("tiny", tiny_ranks())


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.to_bytes(ids) == text.encode()
    assert tokenizer.encode_array(text).tolist() == ids
    assert max(ids, default=0) < tokenizer.end == tokenizer.vocab - 1


def test_bytes_are_those_of_utf8():
    assert Bytes().encode("Aé") == [65, 195, 169]
    assert (Bytes().vocab, Bytes().end) == (257, 256)


def test_pairs_of_low_rank_are_merged_first_within_words():
    tokenizer = BytePairs("tiny", tiny_ranks())
    ranks = read_ranks(tiny_ranks())
    assert tokenizer.encode("hello world") == [ranks[b"hello"], ranks[b" world"]]
    assert tokenizer.encode("helloworld") == [ranks[b"hello"], ord("w"), ranks[b"or"], ranks[b"ld"]]
    assert tokenizer.vocab == len(ranks) + 1


def test_words_are_cut_before_pairs_are_merged():
    tokenizer, ranks = BytePairs("tiny", tiny_ranks()), read_ranks(tiny_ranks())
    assert tokenizer.encode("12") == [ranks[b"12"]]
    assert tokenizer.encode("x\n\n") == [ord("x"), ranks[b"\n\n"]]
    assert tokenizer.encode("x\n\ny") == [ord("x"), 10, 10, ord("y")]  # the last space before a word stands alone
    assert tokenizer.encode("'the") == [ord("'"), ord("t"), ranks[b"he"]]  # 't is a word


def test_the_end_of_text_is_no_text(tokenizer):
    assert tokenizer.end not in tokenizer.encode("<|endoftext|>")
    assert tokenizer.decode([tokenizer.end]) == "<|endoftext|>"


def test_bytes_that_make_no_character_are_shown_as_such():
    assert Bytes().decode([0x9F, 65, 0xC3]) == "�A�"


@pytest.mark.parametrize("wrong", [-1, 257, 50256])
def test_ids_outside_the_vocabulary_are_named(wrong):
    with pytest.raises(ValueError, match=rf"id {wrong} is outside the vocabulary 0 … 256"):
        Bytes().decode([65, wrong])
    tokenizer = BytePairs("tiny", tiny_ranks())
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tokenizer.decode([tokenizer.vocab])


def test_ids_may_be_an_array(tokenizer):
    assert tokenizer.decode(np.array(tokenizer.encode("hello"), np.uint16)) == "hello"


def test_ranks_come_from_a_file_or_from_the_cache_of_tiktoken(monkeypatch, tmp_path):
    path = use_tiny_ranks(monkeypatch, tmp_path)
    given = load_tokenizer("gpt2", path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    path.rename(tmp_path / hashlib.sha1(tokenizers.GPT2_URL.encode()).hexdigest())
    cached = load_tokenizer("gpt2")
    assert given.hash == cached.hash == hashlib.sha256(tiny_ranks()).hexdigest()
    assert given.encode("hello world") == cached.encode("hello world")
    assert given.ranks == tiny_ranks()


def test_ranks_with_another_checksum_are_refused(monkeypatch, tmp_path):
    path = use_tiny_ranks(monkeypatch, tmp_path)
    path.write_bytes(tiny_ranks().replace(b" 300\n", b" 301\n") + b"\n")
    with pytest.raises(ValueError, match=r"tiny.tiktoken' is not the ranks of GPT-2: its SHA-256 is"):
        load_tokenizer("gpt2", path)


def test_what_tiktoken_fetched_is_checked_by_us_too(monkeypatch):
    monkeypatch.setattr("tiktoken.load.read_file_cached", lambda url, expected: tiny_ranks())
    with pytest.raises(ValueError, match="what tiktoken fetched is not the ranks of GPT-2"):
        load_tokenizer("gpt2")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionError("no route"), "no route"),
        (OSError(13, "Permission denied"), "Permission denied"),
        (ValueError(f"Hash mismatch {'of what came ' * 30}"), "Hash mismatch of what came"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_without_a_network_the_error_says_why_and_names_the_file(error, reason, monkeypatch, tmp_path):
    def fail(*_):
        raise error

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tiktoken.load.read_file", fail)
    with pytest.raises(RanksError) as caught:
        load_tokenizer("gpt2")
    said, *rest = str(caught.value).splitlines()
    assert said.startswith(f"the ranks of GPT-2 could not be fetched ({reason}")
    assert len(said.partition("(")[2].rpartition(")")[0]) <= 100
    assert said.endswith("); give the published file r50k_base.tiktoken")
    assert [line.split() for line in rest] == [["file", GPT2_URL], ["SHA-256", GPT2_SHA256]]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"QQ== 0\nnot base64 at all\n", "line 2 of the ranks"), (b"QQ== 0\n", "with all 256 single bytes"), (b"", "0 tokens")],
)
def test_damaged_ranks_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read_ranks(content)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt3",), "tokenizer 'gpt3' is unknown; choose one of gpt2, bytes"),
        (("bytes", "file"), "'bytes' has no ranks"),
        (("gpt2", "/nowhere/ranks"), "cannot read the ranks '/nowhere/ranks'"),
    ],
)
def test_wrong_names_and_files_are_told(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(*arguments)


def test_tiktoken_is_imported_only_when_it_is_needed():
    code = (
        "import sys, compactattn.data.corpus, compactattn.data.tokenizers as t; t.load_tokenizer('bytes'); print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "compactattn.data.tokenizers" in modules
    assert "tiktoken" not in modules


@needs_ranks
def test_gpt2_gives_the_published_ids():
    tokenizer = load_tokenizer("gpt2", PUBLISHED)
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode("Once upon a time, they weren't\n\n  sad 123!") == [
        7454, 2402, 257, 640, 11, 484, 6304, 470, 628, 220, 6507, 17031, 0,
    ]  # fmt: skip
    assert (tokenizer.vocab, tokenizer.end) == (50257, 50256)
    assert tokenizer.hash == tokenizers.GPT2_SHA256


@needs_ranks
def test_gpt2_cuts_words_as_tiktoken_does(monkeypatch, tmp_path):
    import tiktoken

    (tmp_path / hashlib.sha1(tokenizers.GPT2_URL.encode()).hexdigest()).write_bytes(PUBLISHED.read_bytes())
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    theirs, ours = tiktoken.get_encoding("r50k_base"), load_tokenizer("gpt2", PUBLISHED)
    for text in [*TEXTS, "I'll we've it's 'tis\r\n\r\n x  y   z  ", "ünï—code… ½ ١٢٣\u3000。\n"]:
        assert ours.encode(text) == theirs.encode_ordinary(text)
