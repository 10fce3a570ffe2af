"""BabiStories come out of their five parts whole, or an error says which part is wrong and what to do."""

import io
import json
import sys
import types
import zlib

import py7zr
import pytest
from tests.data.file_server import serve

from compactattn.data import babistories
from compactattn.data.babistories import PARTS, Joined, check_archive, check_unpacker, download_archive, find_stories
from compactattn.data.corpus import Corpus
from compactattn.data.preparation import prepare
from compactattn.data.tokenizers import Bytes

TRAIN, VALIDATION = ["Once upon a time", "Zwölf Hasen"], ["The end"]
BODY = b"what the program unpacks " * 40


def write_archive(folder, body=BODY):
    """An archive with the head and the table of contents of 7z, in five parts; its body is no packed data."""
    table = b"table of contents" * 3
    place = len(body).to_bytes(8, "little") + len(table).to_bytes(8, "little") + zlib.crc32(table).to_bytes(4, "little")
    whole = b"7z\xbc\xaf\x27\x1c\x00\x04" + zlib.crc32(place).to_bytes(4, "little") + place + body + table
    cut(whole, folder)
    return whole


def cut(whole, folder):
    size = -(-len(whole) // 5)
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(PARTS):
        (folder / name).write_bytes(whole[number * size : (number + 1) * size])


def as_lines(stories):
    return "".join(json.dumps(story) + "\n" for story in stories)


def write_stories(folder):
    for name, stories in zip(babistories.FILES, (TRAIN, VALIDATION), strict=True):
        (folder / name).write_text(as_lines(stories))


@pytest.fixture
def archive(tmp_path):
    write_archive(tmp_path / "archive")
    return tmp_path / "archive"


@pytest.fixture
def no_tools(monkeypatch):
    monkeypatch.setitem(sys.modules, "py7zr", None)
    monkeypatch.setattr("shutil.which", lambda name: None)


def use_program(monkeypatch, folder, name, script):
    """A program of that name, the only one there is."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib, json\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setitem(sys.modules, "py7zr", None)
    monkeypatch.setattr("shutil.which", lambda asked: str(path) if asked == name else None)


UNPACK = f"""
(folder / "sub").mkdir()
for name, stories in {dict(zip(babistories.FILES, (TRAIN, VALIDATION), strict=True))!r}.items():
    (folder / "sub" / name).write_text("".join(json.dumps(story) + "\\n" for story in stories))
"""


def documents(sources):
    return [[text for block in source.blocks() for text in source.documents(block)] for source in sources]


def test_files_that_are_unpacked_already_are_used(tmp_path):
    write_stories(tmp_path)
    sources = find_stories(tmp_path, tmp_path / "unpacked")
    assert documents(sources) == [TRAIN, VALIDATION]
    assert [source.split for source in sources] == ["train", "validation"]


@pytest.mark.parametrize("name", ["7z", "7zz", "7zr", "bsdtar"])
def test_a_program_unpacks_the_parts(archive, tmp_path, monkeypatch, name):
    where = "sys.argv[4]" if name == "bsdtar" else "sys.argv[3].removeprefix('-o')"
    whole = b"".join((archive / part).read_bytes() for part in PARTS)
    given = (
        f"assert pathlib.Path(sys.argv[2]).read_bytes() == {whole!r}"
        if name == "bsdtar"
        else f"assert {PARTS[0]!r} in sys.argv[2]"
    )
    use_program(monkeypatch, tmp_path, name, f"{given}\nfolder = pathlib.Path({where})\n{UNPACK}")
    assert documents(find_stories(archive, tmp_path / "unpacked")) == [TRAIN, VALIDATION]
    assert sorted(path.name for path in (tmp_path / "unpacked").iterdir()) == sorted(babistories.FILES)
    assert sorted(path.name for path in archive.iterdir()) == sorted(PARTS)  # the user's folder is left as it is


def test_py7zr_comes_first_and_reads_the_parts_as_one_file(archive, tmp_path, monkeypatch):
    class SevenZipFile:
        def __init__(self, file, mode):
            self.content = file.read()
            assert file.seek(0) == 0

        def extractall(self, path):
            assert self.content == b"".join((archive / part).read_bytes() for part in PARTS)
            write_stories(path)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setitem(sys.modules, "py7zr", types.SimpleNamespace(SevenZipFile=SevenZipFile))
    assert documents(find_stories(archive, tmp_path / "unpacked")) == [TRAIN, VALIDATION]


MANY = [f"{number} hares ran to Zürich, then home." for number in range(400)]


def pack(folder, **how):
    """The five parts of an archive that py7zr packed."""
    packed = io.BytesIO()
    with py7zr.SevenZipFile(packed, "w", **how) as archive:
        for name, stories in zip(babistories.FILES, (MANY, VALIDATION), strict=True):
            archive.writestr(as_lines(stories), f"babistories/{name}")
    cut(packed.getvalue(), folder)
    return folder


@pytest.fixture
def real(tmp_path):
    return pack(tmp_path / "real")


def alter(part, place):
    content = bytearray(part.read_bytes())
    content[place] ^= 1
    part.write_bytes(content)


def test_a_real_archive_becomes_a_corpus(real, tmp_path):
    meta = prepare(find_stories(real, tmp_path / "out/unpacked"), Bytes(), tmp_path / "out", 0)
    assert [meta["splits"][split]["documents"] for split in ("train", "validation")] == [len(MANY), len(VALIDATION)]
    corpus = Corpus.open(tmp_path / "out")
    corpus.verify()
    for tokens, stories in ((corpus.train, MANY), (corpus.validation, VALIDATION)):
        assert tokens.tolist() == [token for story in stories for token in [*story.encode(), Bytes().end]]
    assert sorted(path.name for path in (tmp_path / "out/unpacked").iterdir()) == sorted(babistories.FILES)


@pytest.mark.parametrize("number", range(5))
def test_a_real_archive_with_a_part_cut_short_is_refused(real, tmp_path, number):
    part = real / PARTS[number]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"has [\d,]+ bytes, and should have [\d,]+; delete the parts"):
        find_stories(real, tmp_path / "out/unpacked")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("method", [py7zr.FILTER_LZMA2, py7zr.FILTER_COPY])  # of a copy only the checksum tells
def test_a_real_archive_with_an_altered_byte_is_refused(tmp_path, number, method):
    real = pack(tmp_path / "real", filters=[{"id": method}])
    alter(real / PARTS[number], (real / PARTS[number]).stat().st_size // 2)
    with pytest.raises(ValueError, match=r"py7zr cannot unpack .*7z.001' \(.+\); the archive is damaged.*fetch it again"):
        find_stories(real, tmp_path / "out/unpacked")
    assert not (tmp_path / "out").exists()


def test_a_real_archive_whose_table_of_contents_is_altered_is_refused(real, tmp_path):
    alter(real / PARTS[-1], -1)
    with pytest.raises(ValueError, match=r"table of contents .* is damaged; fetch .*7z.005 again"):
        find_stories(real, tmp_path / "out/unpacked")


NO_TOOL = r"nothing here unpacks 7z archives; install .*compactattn\[babistories\].*pip install py7zr.* or a program .*7z"


def test_without_a_tool_the_error_names_both_ways(archive, tmp_path, no_tools):
    (archive / PARTS[0]).write_bytes(b"")  # the tool is missed before the parts are read
    with pytest.raises(ValueError, match=NO_TOOL):
        find_stories(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_a_tool_is_missed_only_while_the_stories_are_packed(archive, tmp_path, no_tools):
    with pytest.raises(ValueError, match=NO_TOOL):
        check_unpacker(archive, tmp_path / "unpacked")
    write_stories(archive)
    check_unpacker(archive, tmp_path / "unpacked")
    check_unpacker(tmp_path / "none", archive)


def test_a_program_that_fails_is_quoted_and_leaves_nothing_half_done(archive, tmp_path, monkeypatch):
    script = (
        f"folder = pathlib.Path(sys.argv[3].removeprefix('-o'))\n{UNPACK}\nsys.exit('ERROR: Data Error : traindataset.txt')"
    )
    use_program(monkeypatch, tmp_path, "7z", script)
    with pytest.raises(ValueError, match=r"7z cannot unpack .*001' \(ERROR: Data Error : traindataset.txt\)"):
        find_stories(archive, tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_another_archive_is_told(archive, tmp_path, monkeypatch):
    use_program(monkeypatch, tmp_path, "7z", "")
    with pytest.raises(ValueError, match=r"does not hold traindataset.txt and valdataset.txt; is it BabiStories"):
        find_stories(archive, tmp_path / "unpacked")


def test_an_archive_that_is_whole_passes(archive):
    assert [part.name for part in check_archive(archive)] == list(PARTS)


@pytest.mark.parametrize("number", range(5))
def test_a_part_that_is_cut_short_is_found_before_unpacking(archive, number):
    part = archive / PARTS[number]
    part.write_bytes(part.read_bytes()[:-7] if number else part.read_bytes()[:60])
    with pytest.raises(ValueError, match=r"has [\d,]+ bytes, and should have [\d,]+; delete the parts"):
        check_archive(archive)


def test_altered_ends_of_the_archive_are_found_before_unpacking(archive):
    first, last = archive / PARTS[0], archive / PARTS[-1]
    good = last.read_bytes()
    last.write_bytes(good[:-1] + b"x")
    with pytest.raises(ValueError, match=r"table of contents .* is damaged"):
        check_archive(archive)
    last.write_bytes(good)
    first.write_bytes(b"PK" + first.read_bytes()[2:])
    with pytest.raises(ValueError, match="not the beginning of a 7z archive"):
        check_archive(archive)


def test_a_part_that_changed_since_its_download_is_found(archive):
    part = archive / PARTS[2]
    part.with_name(part.name + ".sha256").write_text("0" * 64 + f"  {part.name}\n")
    with pytest.raises(ValueError, match=r"7z.003' has been altered"):
        check_archive(archive)


def test_missing_parts_and_pointers_are_named(archive, tmp_path):
    (archive / PARTS[1]).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 99000000\n")
    with pytest.raises(ValueError, match=r"7z.002' is a Git LFS pointer that stands for 99,000,000 bytes; run git lfs pull"):
        check_archive(archive)
    (archive / PARTS[1]).unlink()
    with pytest.raises(ValueError, match=r"babistories-dataset.7z.002 missing; fetch them with --download"):
        check_archive(archive)
    with pytest.raises(ValueError, match="is no folder"):
        find_stories(tmp_path / "none", tmp_path)


def test_joined_files_read_like_one(tmp_path):
    whole = write_archive(tmp_path)
    with Joined([tmp_path / name for name in PARTS]) as joined:
        assert joined.size == len(whole)
        assert joined.read() == whole
        for start, count in ((0, 1), (len(whole) // 5 - 1, 3), (7, 900), (len(whole) - 2, 9), (len(whole) + 5, 4)):
            joined.seek(start)
            assert joined.read(count) == whole[start : start + count]
        assert joined.seek(-3, io.SEEK_END) == len(whole) - 3
        assert joined.seek(-2, io.SEEK_CUR) == len(whole) - 5
        assert io.BufferedReader(joined).read() == whole[-5:]


def test_the_download_brings_all_parts_and_checks_them_against_their_pointers(tmp_path, monkeypatch):
    monkeypatch.setattr("compactattn.data.download.PAUSE", 0.0)
    write_archive(tmp_path / "there")
    with serve() as server:
        monkeypatch.setattr(babistories, "CONTENT_URL", server.url + "content/")
        monkeypatch.setattr(babistories, "POINTER_URL", server.url + "pointers/")
        for name in PARTS:
            server.files[f"/content/{name}"] = (tmp_path / "there" / name).read_bytes()
        server.breaks = [40]
        told = []
        download_archive(tmp_path / "here", lambda *news: told.append(news))
        wrong = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 5\n"
        server.files[f"/pointers/{PARTS[3]}"] = wrong.encode()
        with pytest.raises(ValueError, match=r"7z.004' has been altered: .* the one published is 0000"):
            download_archive(tmp_path / "here")
    assert {name for name, _, _ in told} == set(PARTS)
    for name in PARTS:
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "there" / name).read_bytes()
