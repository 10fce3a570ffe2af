"""Data that took a while to make, kept in a folder of the user: read back as it was written, or not at all.

A file is one line of JSON (the version of its maker, what was made, the SHA-256 of the rest) and NumPy's npz without pickles.
It is written under a name of its own and renamed, so several processes may make the same file at once.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from compactattn.data.draws import Array
from compactattn.folders import cache_folder

log = logging.getLogger("compactattn")

Arrays = dict[str, Array]


def cached(
    kind: str, version: int, settings: dict[str, Any], make: Callable[[], Arrays], folder: Path | None = None
) -> tuple[Arrays, Path]:
    """The arrays that `make` returns for these settings, and the file where they are or would be kept.

    A file of another version, or of other settings, is made again. One that is damaged raises a ValueError: what else may be
    wrong with the disk is for its owner to judge. A folder that cannot be read or written is said once and done without.
    """
    settings = json.loads(json.dumps(settings))  # as it is read back: tuples are lists
    name = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    path = (folder or cache_folder()) / f"{kind}-{name}.cache"
    wanted = {"version": version, "settings": settings}
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        content = None
    except OSError as error:
        _say_once(path.parent, str(error))
        return make(), path
    found = None if content is None else _read(path, content, wanted)
    if found is None:
        found = make()
        _write(path, found, wanted)
    return found, path


def _read(path: Path, content: bytes, wanted: dict[str, Any]) -> Arrays | None:
    """The arrays in a file's content; None if it holds something else than is wanted."""
    line, _, body = content.partition(b"\n")
    try:
        header = json.loads(line)
        kept = {key: header[key] for key in wanted}
        digest = header["sha256"]
    except (ValueError, KeyError, TypeError):
        raise damaged(path) from None
    if kept != wanted:
        return None
    if hashlib.sha256(body).hexdigest() != digest:
        raise damaged(path)
    with np.load(io.BytesIO(body), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays}


def damaged(path: Path) -> ValueError:
    return ValueError(f"the cached data in {path} is damaged; delete this file, and it will be made again")


def _write(path: Path, arrays: Arrays, wanted: dict[str, Any]) -> None:
    body = io.BytesIO()
    np.savez(body, **arrays)  # type: ignore[arg-type]
    header = wanted | {"sha256": hashlib.sha256(body.getbuffer()).hexdigest()}
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        with open(temporary, "xb") as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(body.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # give a full disk its space back
        _say_once(path.parent, str(error))


@cache
def _say_once(folder: Path, why: str) -> None:
    log.warning(
        "nothing is kept in %s (%s), so data is made anew each time; set COMPACTATTN_CACHE to another folder", folder, why
    )
