"""What the cache gives back is what was made: never another version's, never a damaged file, never half of one."""

import json
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from compactattn.data import cache
from compactattn.data.cache import cached
from compactattn.folders import cache_folder

SETTINGS = {"range": (1, 3), "seed": 0}


class Maker:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return {"numbers": np.arange(50) * self.calls, "bytes": np.full(3, 7, np.uint8)}


@pytest.fixture(autouse=True)
def _speak_again():
    cache._say_once.cache_clear()


def take(make, folder, version=1, settings=SETTINGS):
    return cached("thing", version, settings, make, folder)


def test_what_was_made_is_read_back(tmp_path):
    make = Maker()
    made, path = take(make, tmp_path / "new" / "folder")
    read, same = take(make, tmp_path / "new" / "folder")
    assert make.calls == 1
    assert path == same
    assert list(path.parent.iterdir()) == [path]
    assert list(read) == list(made) == ["numbers", "bytes"]
    for name in made:
        assert read[name].dtype == made[name].dtype
        assert np.array_equal(read[name], made[name])


def test_other_settings_have_a_file_of_their_own(tmp_path):
    make = Maker()
    _, path = take(make, tmp_path)
    _, other = take(make, tmp_path, settings=SETTINGS | {"seed": 1})
    assert path != other
    assert make.calls == 2


@pytest.mark.parametrize("change", [{"version": 0}, {"version": 2}, {"settings": {"range": [1, 4], "seed": 0}}])
def test_a_file_of_another_version_or_other_settings_is_made_again(tmp_path, change):
    make = Maker()
    _, path = take(make, tmp_path)
    line, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(json.dumps(json.loads(line) | change).encode() + b"\n" + body)
    again, _ = take(make, tmp_path)
    assert (make.calls, again["numbers"][1]) == (2, 2)
    take(make, tmp_path)
    assert make.calls == 2


def test_a_file_of_another_version_is_not_even_looked_into(tmp_path):
    make = Maker()
    _, path = take(make, tmp_path, version=1)
    path.write_bytes(path.read_bytes().partition(b"\n")[0] + b"\nin a form that this version does not know")
    again, _ = take(make, tmp_path, version=2)
    assert again["numbers"][1] == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "headless", "list"])
def test_a_damaged_file_is_refused_in_one_sentence(tmp_path, damage):
    make = Maker()
    _, path = take(make, tmp_path)
    content = bytearray(path.read_bytes())
    header = content.index(b"\n")
    flipped = content.copy()
    flipped[header + 200] ^= 1
    broken = {
        "flip": flipped, "cut": content[:-1], "empty": b"", "text": b"hello", "headless": content[header + 1 :],
        "list": b"[]" + content[header:],
    }  # fmt: skip
    path.write_bytes(broken[damage])
    with pytest.raises(ValueError) as error:
        take(make, tmp_path)
    assert str(error.value) == f"the cached data in {path} is damaged; delete this file, and it will be made again"
    path.unlink()
    assert take(make, tmp_path)[0]["numbers"][1] == 2


def test_no_flipped_bit_is_ever_read_as_data(tmp_path):
    make = Maker()
    _, path = take(make, tmp_path)
    content, refused = path.read_bytes(), 0
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        calls = make.calls
        try:
            found, _ = take(make, tmp_path)
        except ValueError:
            refused += 1
            continue
        assert make.calls == calls + 1  # the header told of something else, so it was made
        assert found["numbers"][1] == make.calls
    assert refused > len(content) // 8


def test_without_a_folder_to_write_to_it_goes_on_and_says_so_once(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    make = Maker()
    with caplog.at_level(logging.WARNING, "compactattn"):
        assert take(make, tmp_path / "file")[0]["numbers"][1] == 1
        assert take(make, tmp_path / "file")[0]["numbers"][1] == 2
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(f"nothing is kept in {tmp_path / 'file'} (")
    assert caplog.messages[0].endswith("so data is made anew each time; set COMPACTATTN_CACHE to another folder")


def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path, caplog, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert take(Maker(), tmp_path)[0]["numbers"][1] == 1
    assert list(tmp_path.iterdir()) == []
    assert "No space left on device" in caplog.messages[0]


def _make_slowly(folder, barrier):
    def make():
        barrier.wait()
        return {"numbers": np.arange(100_000)}

    cached("thing", 1, {}, make, folder)


def test_processes_that_make_the_same_file_at_once_leave_one_good_file(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=_make_slowly, args=(tmp_path, barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    found, path = cached("thing", 1, {}, pytest.fail, tmp_path)
    assert found["numbers"].sum() == 99_999 * 50_000
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_is_the_users_choice_or_where_caches_belong(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("COMPACTATTN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/compactattn")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert cache_folder() == Path("/var/caches/compactattn")
    monkeypatch.setenv("COMPACTATTN_CACHE", "/data/kept")
    assert cache_folder() == Path("/data/kept")
