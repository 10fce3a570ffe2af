"""Files that are either the old or the new one, whenever the process is killed or the disk is full."""

from __future__ import annotations

import os
from pathlib import Path

TEMPORARY = ".tmp"


def replace_durably(path: Path, content: bytes) -> None:
    """Writes a temporary file beside `path`, syncs it, renames it and syncs the folder."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # give a full disk its space back
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path, pattern: str, keep: str) -> None:
    """Removes the files of that pattern, and what an interrupted write of one left, but for `keep`."""
    for path in [*folder.glob(pattern), *folder.glob(pattern + TEMPORARY)]:
        if path.name != keep:
            path.unlink(missing_ok=True)
