"""What is downloaded is the file, whole and unaltered, however often the connection breaks."""

import hashlib
import os

import pytest
from tests.data.file_server import serve

from compactattn.data import download as module
from compactattn.data.download import Published, download, fetch_pointer, read_pointer, verify

CONTENT = bytes(range(256)) * 4000
POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{hashlib.sha256(CONTENT).hexdigest()}\nsize {len(CONTENT)}\n"
PUBLISHED = Published(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(module, "PAUSE", 0.0)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve() as server:
        server.files["/file"] = CONTENT
        yield server


def names(folder):
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("published", [None, PUBLISHED])
def test_a_download_that_breaks_off_goes_on_where_it_stopped(server, tmp_path, published):
    server.breaks = [300_000, 1, 500_000]
    told = []
    download(server.url + "file", tmp_path / "file", published, lambda done, total: told.append((done, total)))
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert [wanted for _, wanted in server.requests] == [None, "bytes=300000-", "bytes=300001-", "bytes=800001-"]
    assert told == sorted(told)
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert names(tmp_path) == ["file", "file.sha256"]


def test_a_download_given_up_is_gone_on_with_by_the_next_command(server, tmp_path):
    server.breaks = [1000] * module.ATTEMPTS
    with pytest.raises(ValueError, match=r"broke off 5 times .*5,000 bytes are kept in .*file.part', run the command again"):
        download(server.url + "file", tmp_path / "file")
    assert names(tmp_path) == ["file.part"]
    server.requests.clear()
    download(server.url + "file", tmp_path / "file")
    assert server.requests == [("/file", "bytes=5000-")]
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_server_without_ranges_sends_it_all_again(server, tmp_path):
    server.ranges, server.breaks = False, [5000]
    download(server.url + "file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("published", [None, PUBLISHED])
def test_a_part_that_is_complete_or_too_long_is_no_trouble(server, tmp_path, published):
    (tmp_path / "file.part").write_bytes(CONTENT)
    download(server.url + "file", tmp_path / "file", published)
    (tmp_path / "other.part").write_bytes(CONTENT + b"more")
    download(server.url + "file", tmp_path / "other", published)
    assert (tmp_path / "file").read_bytes() == (tmp_path / "other").read_bytes() == CONTENT


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    download(server.url + "file", tmp_path / "file", PUBLISHED)
    server.requests.clear()
    download(server.url + "file", tmp_path / "file", PUBLISHED)
    assert not server.requests


def test_a_server_in_trouble_is_asked_again_and_a_missing_file_is_not(server, tmp_path):
    server.failures = [503, 500]
    download(server.url + "file", tmp_path / "file")
    assert len(server.requests) == 3
    server.requests.clear()
    with pytest.raises(ValueError, match=r"cannot be fetched \(HTTP 404"):
        download(server.url + "none", tmp_path / "none")
    assert len(server.requests) == 1


def test_a_download_with_another_checksum_than_the_published_is_thrown_away(server, tmp_path):
    server.files["/file"] = CONTENT[:-1] + b"x"
    with pytest.raises(ValueError, match=f"not the published {PUBLISHED.sha256}"):
        download(server.url + "file", tmp_path / "file", PUBLISHED)
    assert names(tmp_path) == []


def test_the_first_download_is_noted_and_a_later_change_found(server, tmp_path):
    download(server.url + "file", tmp_path / "file")
    assert (tmp_path / "file.sha256").read_text() == f"{PUBLISHED.sha256}  file\n"
    assert verify(tmp_path / "file") == PUBLISHED.sha256
    (tmp_path / "file").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match=r"has been altered: .* the one in file.sha256 is"):
        verify(tmp_path / "file")
    with pytest.raises(ValueError, match=r"has been altered: .* the one published is"):
        download(server.url + "file", tmp_path / "file", PUBLISHED)


def test_a_pointer_of_git_lfs_tells_the_checksum_and_is_never_taken_for_the_file(server, tmp_path):
    server.files["/pointer"] = POINTER.encode()
    assert fetch_pointer(server.url + "pointer") == PUBLISHED
    assert fetch_pointer(server.url + "file") is None
    assert fetch_pointer(server.url + "none") is None
    assert read_pointer(POINTER.splitlines()[0].encode()) is None
    with pytest.raises(ValueError, match="gave a Git LFS pointer, not the file"):
        download(server.url + "pointer", tmp_path / "file")
    assert names(tmp_path) == []
