"""BabiStories (Zhang et al. 2024, Memory Mosaics): 2.2 million short stories in five parts of one 7z archive.

The parts lie in the repository facebookresearch/MemoryMosaics under Git LFS. Inside are traindataset.txt and
valdataset.txt with a JSON string, a story, in each line.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import shutil
import subprocess
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compactattn.data.download import Progress, download, fetch_pointer, read_pointer, verify
from compactattn.data.sources import JsonLines

Unpack = Callable[[Sequence[Path], Path], None]  # the parts, to a folder

PARTS = tuple(f"babistories-dataset.7z.{number:03d}" for number in range(1, 6))
FILES = ("traindataset.txt", "valdataset.txt")
FOLDER = "facebookresearch/MemoryMosaics/{}main/BabiStories/data/"
CONTENT_URL = "https://github.com/" + FOLDER.format("raw/")  # leads on to the file
POINTER_URL = "https://raw.githubusercontent.com/" + FOLDER.format("")  # the pointer, with the published checksum
PUBLISHED_TOKENS = {"train": 474_704_907, "validation": 4_749_107}  # of GPT-2
SIGNATURE = b"7z\xbc\xaf\x27\x1c"
PROGRAMS = ("7zz", "7z", "7za", "7zr")  # read parts by themselves
HEADER = 32  # bytes at the head of an archive, which say where its table of contents lies


def download_archive(folder: Path, progress: Callable[[str, int, int], None] | None = None) -> None:
    """Fetches the parts that are not there yet, each checked against its published checksum where that can be had."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:

        def tell(done: int, total: int, name: str = name) -> None:
            if progress is not None:
                progress(name, done, total)

        told: Progress = tell
        download(CONTENT_URL + name, folder / name, fetch_pointer(POINTER_URL + name), told)


def find_stories(archive: Path, unpacked: Path, begin: Callable[[], None] | None = None) -> list[JsonLines]:
    """Training and validation stories: the two files in either folder, else unpacked from the parts in `archive`.

    `begin` is called before unpacking, which says nothing of how far it is.
    """
    if not archive.is_dir():
        raise ValueError(f"{str(archive)!r} is no folder; give the one with {PARTS[0]} … {PARTS[-1][-3:]}")
    folder = _find_unpacked(archive, unpacked)
    if folder is None:
        folder, unpack, parts = unpacked, find_unpacker(), check_archive(archive)
        if begin is not None:
            begin()
        extract(parts, unpacked, unpack)
    train, validation = (folder / name for name in FILES)
    return [JsonLines(train, "train"), JsonLines(validation, "validation")]


def check_unpacker(archive: Path, unpacked: Path) -> None:
    """Raises a ValueError if the two files are in neither folder and nothing here could unpack them."""
    if _find_unpacked(archive, unpacked) is None:
        find_unpacker()


def _find_unpacked(*folders: Path) -> Path | None:
    """The first folder with both files."""
    return next((folder for folder in folders if all((folder / name).is_file() for name in FILES)), None)


def check_archive(folder: Path) -> list[Path]:
    """The five parts; raises a ValueError if one is missing, a pointer, cut short or altered, as far as that can be seen."""
    parts = [folder / name for name in PARTS]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ValueError(
            f"{str(folder)!r} has neither {FILES[0]} and {FILES[1]} nor all parts of the archive: {', '.join(missing)} missing;"
            " fetch them with --download"
        )
    for part in parts:
        with open(part, "rb") as file:
            pointer = read_pointer(file.read(1024))
        if pointer is not None:
            raise ValueError(
                f"{str(part)!r} is a Git LFS pointer that stands for {pointer.size:,} bytes; run git lfs pull there, or delete"
                " it and use --download"
            )
    with Joined(parts) as archive:
        _check_ends(archive, folder)
    for part in parts:
        verify(part)
    return parts


def _check_ends(archive: Joined, folder: Path) -> None:
    """Checks head, length and table of contents of the archive; its programs check the rest while they unpack."""
    head = archive.read(HEADER)
    if len(head) < HEADER or head[:6] != SIGNATURE or zlib.crc32(head[12:]) != int.from_bytes(head[8:12], "little"):
        raise ValueError(f"{PARTS[0]} in {str(folder)!r} is not the beginning of a 7z archive; fetch it again")
    offset, size, checksum = (int.from_bytes(head[a:b], "little") for a, b in ((12, 20), (20, 28), (28, 32)))
    length = HEADER + offset + size
    if archive.size != length:
        raise ValueError(
            f"the archive in {str(folder)!r} has {archive.size:,} bytes, and should have {length:,}; delete the parts that"
            " are cut short, and fetch them with --download"
        )
    archive.seek(HEADER + offset)
    if zlib.crc32(archive.read(size)) != checksum:
        raise ValueError(f"the table of contents of the archive in {str(folder)!r} is damaged; fetch {PARTS[-1]} again")


def extract(parts: Sequence[Path], folder: Path, unpack: Unpack) -> None:
    """Unpacks the two files; they get their names only once both are complete, and what fails leaves nothing behind."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    work = folder / "unpacking"
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
        unpack(parts, work)
        found = {path.name: path for path in work.rglob("*.txt")}
        if missing := [name for name in FILES if name not in found]:
            raise ValueError(f"the archive {str(parts[0])!r} does not hold {' and '.join(missing)}; is it BabiStories?")
        for name in FILES:
            found[name].replace(folder / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        for path in new:  # what is not empty stays
            with contextlib.suppress(OSError):
                path.rmdir()


def find_unpacker() -> Unpack:
    """What unpacks parts to a folder: py7zr, else a program; raises a ValueError where there is neither."""
    try:
        return partial(_unpack_with_py7zr, importlib.import_module("py7zr"))
    except ImportError:
        pass
    if program := next(filter(None, map(shutil.which, PROGRAMS)), None):
        return partial(_unpack_with_program, program)
    if program := shutil.which("bsdtar"):
        return partial(_unpack_with_bsdtar, program)
    raise ValueError(
        "nothing here unpacks 7z archives; install py7zr (pip install 'compactattn[babistories]', or pip install py7zr) or a"
        " program (7z or bsdtar, as in: apt install 7zip)"
    )


def _unpack_with_py7zr(py7zr: Any, parts: Sequence[Path], work: Path) -> None:
    try:
        with Joined(parts) as archive, py7zr.SevenZipFile(io.BufferedReader(archive), "r") as opened:
            opened.extractall(work)
    except Exception as error:  # py7zr raises its own, those of lzma, and plain ones for a wrong checksum
        raise _unpacking_failed(parts[0], "py7zr", str(error) or type(error).__name__) from error


def _unpack_with_program(program: str, parts: Sequence[Path], work: Path) -> None:
    _run([program, "x", str(parts[0]), f"-o{work}", "-y"], parts[0])


def _unpack_with_bsdtar(program: str, parts: Sequence[Path], work: Path) -> None:
    whole = work / "archive.7z"  # it reads no parts
    with Joined(parts) as archive, open(whole, "wb") as file:
        shutil.copyfileobj(archive, file, 1 << 20)
    _run([program, "-xf", str(whole), "-C", str(work)], parts[0])


def _run(command: list[str], part: Path) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        said = [line.strip() for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
        raise _unpacking_failed(
            part, Path(command[0]).name, next((line for line in said if "rror" in line), "".join(said[-1:]))
        )


def _unpacking_failed(part: Path, program: str, why: object) -> ValueError:
    return ValueError(
        f"{program} cannot unpack {str(part)!r} ({why}); the archive is damaged, or the disk is full: fetch it again"
    )


class Joined(io.RawIOBase):
    """Several files as one, to be read from any place."""

    def __init__(self, parts: Sequence[Path]) -> None:
        self._files = [open(part, "rb") for part in parts]  # noqa: SIM115  close() closes them
        self._sizes = [part.stat().st_size for part in parts]
        self._place = 0
        self.size = sum(self._sizes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self.size)[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        place = self._place
        for file, size in zip(self._files, self._sizes, strict=True):
            if place < size:
                file.seek(place)
                count = file.readinto(memoryview(buffer)[: size - place])
                self._place += count
                return count
            place -= size
        return 0

    def read(self, size: int = -1) -> bytes:
        """Across the borders of the files, unlike one call of readinto."""
        wanted = max(self.size - self._place, 0) if size < 0 else size
        parts = []
        while wanted and (part := super().read(wanted)):
            parts.append(part)
            wanted -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        for file in self._files:
            file.close()
        super().close()
