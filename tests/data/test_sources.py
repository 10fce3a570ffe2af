"""Documents are what the user wrote between separators, however the file is cut into blocks."""

import gzip
from itertools import pairwise

import pytest
from tests.data.text_examples import write_json_lines, write_text

from compactattn.data import sources
from compactattn.data.sources import JsonLines, TextFile, identify, open_sources
from compactattn.data.stories import Stories


def read(source, *place):
    """The documents, put together again from blocks, and the blocks."""
    documents, blocks = [], list(source.blocks(*place))
    for block in blocks:
        found = source.documents(block)
        if not block.opens:
            documents[-1:] = ["".join(documents[-1:]) + found.pop(0)]
        documents += found
    return documents, blocks


def text_file(tmp_path, content, separator="<|endoftext|>"):
    path = tmp_path / "file.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return TextFile(path, separator=separator)


@pytest.mark.parametrize(
    ("content", "documents"),
    [
        ("one\ntwo\n<|endoftext|>\nthree\n", ["one\ntwo", "three"]),
        ("one\n<|endoftext|>\ntwo", ["one", "two"]),
        ("<|endoftext|>\none\n<|endoftext|>\n<|endoftext|>\n  \n<|endoftext|>\ntwo\n<|endoftext|>", ["one", "two"]),
        ("one <|endoftext|>\n<|endoftext|> two", ["one <|endoftext|>\n<|endoftext|> two"]),
        ("one\r\n<|endoftext|> \r\ntwo\r\nthree\r\n", ["one", "two\r\nthree"]),
        ("\ufeffone\n\n<|endoftext|>\n\ntwo\n\n", ["one\n", "\ntwo\n"]),
        ("", []),
        ("\n \n", []),
    ],
)
def test_documents_stand_between_separator_lines(tmp_path, content, documents):
    assert read(text_file(tmp_path, content))[0] == documents


def test_an_empty_separator_stands_for_blank_lines(tmp_path):
    content = "one\ntwo\n\nthree\n \n\n\nfour\r\n\r\nfive\n"
    assert read(text_file(tmp_path, content, ""))[0] == ["one\ntwo", "three", "four", "five"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20, 64])
@pytest.mark.parametrize("separator", ["<|endoftext|>", "", "%"])
def test_the_size_of_blocks_changes_no_document(tmp_path, monkeypatch, size, separator):
    documents = ["a story\nof  two lines ", "x" * 100, "naïve 東京\u3000\nz", " b\n c\n", "last words " * 9 + "."]
    content = f"\n{separator}\n".join(documents) + "\n"
    whole, _ = read(text_file(tmp_path, content, separator))
    monkeypatch.setattr(sources, "BLOCK", size)
    cut, blocks = read(text_file(tmp_path, content, separator))
    assert cut == whole
    assert len(whole) >= 5
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert b"".join(block.data for block in blocks) == content.encode()


LINES = [
    "%", "one", "a word ", "", "% \t", "two of them ", " ", "%\t ", "% three", " %",
    "four\r", "%\r", " five  six ", "", "%   ", "%", " ", "end ",
]  # fmt: skip


@pytest.mark.parametrize("start", ["", "\ufeff", "\ufeff\n \n"])
@pytest.mark.parametrize("separator", ["<|endoftext|>", "-- the end --", "%", ""])
def test_a_separator_line_is_never_cut_whatever_the_size_of_blocks(tmp_path, monkeypatch, separator, start):
    content = start + "\n".join(LINES).replace("%", separator)
    whole, _ = read(text_file(tmp_path, content, separator))
    assert len(whole) == (5 if separator else 6)
    for size in range(1, len(content.encode()) + 1):
        monkeypatch.setattr(sources, "BLOCK", size)
        assert read(text_file(tmp_path, content, separator))[0] == whole, size


def test_no_block_ends_behind_a_separator_whose_line_is_not_complete(tmp_path):
    source = text_file(tmp_path, "")
    assert source._cut(bytearray(b"a word \n\n<|endoftext|> \t")) == (6, False)
    assert source._cut(bytearray(b"a word \n\n<|endoftext|> b")) == (22, False)
    assert source._cut(bytearray(b"<|endoftext|> \t")) == (0, False)


def test_a_long_document_is_cut_only_where_a_word_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 50)
    _, blocks = read(text_file(tmp_path, "some  words \n\n and\u3000\n lines 東京\n\n" * 40))
    assert len(blocks) > 10
    for block, following in pairwise(blocks):
        assert not block.ends
        assert not following.opens
        assert not block.data.decode()[-1].isspace()
        assert following.data.decode()[0].isspace()


@pytest.mark.parametrize("name", ["file.txt", "file.txt.gz", "packed without its ending"])
def test_a_source_goes_on_from_any_block(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "BLOCK", 64)
    path = tmp_path / name
    write_text(path, [f"document {i} " * (i % 7 + 1) for i in range(30)])
    if "packed" in name:
        path.write_bytes(gzip.compress(path.read_bytes()))
    source = TextFile(path)
    whole, blocks = read(source)
    assert len(blocks) > 10
    assert blocks[-1].read == path.stat().st_size
    assert {block.ends for block in blocks} == {True, False}
    before = ""
    for block in blocks[:-1]:
        before += "".join(source.documents(block))
        documents, rest = read(source, block.stop, block.ends)
        assert rest[0].start == block.stop
        assert before + "".join(documents) == "".join(whole)


def test_json_lines_hold_strings_or_objects_with_text(tmp_path, monkeypatch):
    values = ["one\ntwo", {"text": "three", "id": 7}, "", "é🙂"]
    path = write_json_lines(tmp_path / "file.jsonl", values)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\n  \n" + b'"no line end"')
    for size in (1, 10, 1000):
        monkeypatch.setattr(sources, "BLOCK", size)
        assert read(JsonLines(path))[0] == ["one\ntwo", "three", "", "é🙂", "no line end"]


@pytest.mark.parametrize("line", ["not json", "17", '{"story": "x"}', '{"text": null}', '"half \\ud83d"', '["x"]'])
def test_a_line_that_is_no_document_is_named(tmp_path, line, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 30)
    path = tmp_path / "file.jsonl"
    path.write_text('"a good line"\n\n"another good line"\n' + line + '\n"x"\n')
    with pytest.raises(ValueError, match=r"line 4 of '.*file.jsonl' is not a JSON string"):
        read(JsonLines(path))


def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 16)
    source = text_file(tmp_path, b"good text here\nmore good text\ncaf" + b"\xe9\nrest\n")
    with pytest.raises(ValueError, match=r"file.txt' is not UTF-8 text: byte 0xe9 in line 3; convert it"):
        read(source)


def test_a_truncated_or_damaged_gzip_file_is_told(tmp_path):
    path = write_text(tmp_path / "file.txt.gz", [f"story {i}" for i in range(500)])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with pytest.raises(ValueError, match="damaged gzip file"):
        read(TextFile(path))
    path.write_bytes(whole[:60] + b"\x00\xff\x00" + whole[63:])
    with pytest.raises(ValueError, match="damaged gzip file"):
        read(TextFile(path))


def test_files_that_cannot_be_read_are_told_at_once(tmp_path):
    with pytest.raises(ValueError, match="there is no such file"):
        TextFile(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="a folder"):
        TextFile(tmp_path)
    pointer = tmp_path / "train.jsonl"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer.*git lfs pull"):
        JsonLines(pointer)
    pointer.write_text("x")
    with pytest.raises(ValueError, match="must be one line"):
        TextFile(pointer, separator="a\nb")


def test_the_ending_of_a_name_tells_the_format(tmp_path):
    names = {"a.txt": TextFile, "a.txt.gz": TextFile, "a.jsonl": JsonLines, "b.JSONL.gz": JsonLines, "c.ndjson": JsonLines}
    for name in names:
        (tmp_path / name).write_text("")
    opened = open_sources([tmp_path / name for name in names], "%")
    assert [type(source) for source in opened] == list(names.values())
    assert opened[0].separator == "%"


def test_stories_are_told_apart_by_their_generator_grammar_and_seed_but_not_by_their_number():
    told = Stories(10, seed=1).describe()
    assert identify(Stories(20, seed=1, split="validation").describe()) == identify(told)
    for change in ({"generator": "another"}, {"grammar": "another"}, {"seed": 2}):
        assert identify(told | change) != identify(told), change


def test_files_are_told_apart_by_what_they_hold_and_not_by_their_name(tmp_path):
    one, same, other = (write_text(tmp_path / f"{name}.txt", [text]) for name, text in (("a", "x"), ("b", "x"), ("c", "y")))
    found = [identify(source.describe()) for source in open_sources([one, same, other])]
    assert found[0] == found[1] != found[2]
