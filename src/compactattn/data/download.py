"""Files from the web: a broken download goes on where it stopped, and what has arrived is checked.

Beside each file lies FILE.sha256. It holds the checksum that was published, where there is one, else that of the first
download: then it cannot tell whether that one was right, but it tells if the file changes afterwards.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from compactattn.data.sources import LFS_POINTER, hash_file

Progress = Callable[[int, int], None]  # bytes so far, bytes in all (0 where it is unknown)

CHUNK = 1 << 18
ATTEMPTS = 5
PAUSE = 2.0  # seconds before the second attempt, twice as long before each further one
PATIENCE = 60.0  # seconds without a byte


class Published(NamedTuple):
    """What a file should be."""

    sha256: str
    size: int


class Incomplete(Exception):
    """The connection ended before the file did."""


def read_pointer(content: bytes) -> Published | None:
    """What a Git LFS pointer tells of the file it stands for; None if this is no pointer."""
    if not content.startswith(LFS_POINTER):
        return None
    values = dict(line.split(" ", 1) for line in content.decode(errors="replace").splitlines() if " " in line)
    try:
        return Published(values["oid"].removeprefix("sha256:"), int(values["size"]))
    except (KeyError, ValueError):
        return None


def fetch_pointer(url: str) -> Published | None:
    """The published checksum of a file under Git LFS, from the pointer at `url`; None where there is none to be had."""
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
            return read_pointer(answer.read(1024))
    except (OSError, http.client.HTTPException):
        return None


def download(url: str, path: Path, published: Published | None = None, progress: Progress | None = None) -> None:
    """Fetches a file, through FILE.part, unless it is there already; raises a ValueError if that fails or it is not right."""
    if not path.is_file():
        _fetch_all(url, path.with_name(path.name + ".part"), published, progress)
        _check(path.with_name(path.name + ".part"), published, url)
        path.with_name(path.name + ".part").replace(path)
    found = verify(path, published)
    path.with_name(path.name + ".sha256").write_text(f"{found}  {path.name}\n")


def verify(path: Path, published: Published | None = None) -> str:
    """The file's SHA-256; raises a ValueError if it is not the published one, or not the one noted beside it."""
    found, note = hash_file(path), path.with_name(path.name + ".sha256")
    expected = published.sha256 if published else note.read_text().split()[0] if note.is_file() else found
    if found != expected:
        where = "published" if published else f"in {note.name}"
        raise ValueError(
            f"{str(path)!r} has been altered: its SHA-256 is {found}, the one {where} is {expected}; delete it and fetch it"
            " again"
        )
    return found


def _check(part: Path, published: Published | None, url: str) -> None:
    with open(part, "rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            part.unlink()
            raise ValueError(f"{url} gave a Git LFS pointer, not the file; fetch it with git lfs, and give the folder")
    if published is not None and (found := hash_file(part)) != published.sha256:
        part.unlink()  # to go on from it would never make it right
        raise ValueError(f"{url} gave a file of SHA-256 {found}, not the published {published.sha256}; try again later")


def _fetch_all(url: str, part: Path, published: Published | None, progress: Progress | None) -> None:
    """Fills the .part file, in several attempts if need be."""
    for attempt in range(ATTEMPTS):
        before = part.stat().st_size if part.is_file() else 0
        try:
            return _fetch_rest(url, part, published, progress)
        except urllib.error.HTTPError as error:
            if error.code < 500:
                raise ValueError(f"{url} cannot be fetched (HTTP {error.code} {error.reason})") from error
            why = f"HTTP {error.code} {error.reason}"
        except (OSError, http.client.HTTPException, Incomplete) as error:
            why = str(getattr(error, "reason", error)) or type(error).__name__
        if attempt < ATTEMPTS - 1:
            grown = part.is_file() and part.stat().st_size > before
            time.sleep(0 if grown else PAUSE * 2**attempt)
    have = part.stat().st_size if part.is_file() else 0
    raise ValueError(
        f"{url} broke off {ATTEMPTS} times ({why}); {have:,} bytes are kept in {str(part)!r}, run the command again to go on"
    )


def _fetch_rest(url: str, part: Path, published: Published | None, progress: Progress | None) -> None:
    """One attempt: what is missing of the .part file."""
    have = part.stat().st_size if part.is_file() else 0
    if published and have == published.size:
        return
    if published and have > published.size:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if have and error.code == 416 and error.headers.get("Content-Range", "").rpartition("/")[2] == str(have):
            return  # nothing is missing
        if have and error.code == 416:
            part.unlink()
            raise Incomplete("the part that was there does not fit the file") from error
        raise
    with answer:
        if answer.status != 206:
            have = 0  # a server that knows no ranges sends it all
        length = answer.headers.get("Content-Length")
        total = have + int(length) if length else (published.size if published else 0)
        with open(part, "ab") as file:
            file.truncate(have)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if progress is not None:
                    progress(have, total)
    if total and have < total:
        raise Incomplete(f"{have:,} of {total:,} bytes")
