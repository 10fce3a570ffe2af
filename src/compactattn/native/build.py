"""Compiles attend.c for the processor at hand, once: the library is kept beside other caches and found by all that decides it.

A machine without a C compiler, or a compiler that cannot, is told of once; the reference does the work there.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from compactattn.dropout import FIRST, SECOND, STRIDE
from compactattn.folders import cache_folder
from compactattn.rows import MOST_TURNS

log = logging.getLogger("compactattn")

SOURCE = Path(__file__).parent / "attend.c"
# without errno and traps loops become vectors; NaN and ∞ keep their meaning. gcc's OpenMP is the one that PyTorch has loaded
FLAGS = (
    *("-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC"),
    *(f"-D{name}={value}u" for name, value in {"FIRST": FIRST, "SECOND": SECOND, "STRIDE": STRIDE}.items()),
    f"-DMOST_TURNS={MOST_TURNS}",
)
MOST_SECONDS = 120


class CannotBuild(Exception):
    """Why there is no library."""


@torch.compiler.assume_constant_result
def lack_library() -> str:
    """Why the library cannot be used, which is told once; empty if it can. The first call may compile for some seconds."""
    return _find()[1]


def library() -> ctypes.CDLL:
    """The compiled attend.c."""
    found, why = _find()
    if found is None:
        raise CannotBuild(why)
    return found


@cache
def _find() -> tuple[ctypes.CDLL | None, str]:
    try:
        return _open(), ""
    except CannotBuild as why:
        log.warning("attend on this CPU takes several times as long as it could: %s", why)
        return None, str(why)


def _open() -> ctypes.CDLL:
    if sys.platform not in ("linux", "darwin"):
        raise CannotBuild(f"attend.c is compiled on Linux and macOS only, not on {sys.platform}")
    try:
        command = shlex.split(os.environ.get("CC", "cc"))
        if not command or shutil.which(command[0]) is None:
            raise CannotBuild(f"there is no C compiler ({' '.join(command) or 'CC is empty'}); install one, or name one in CC")
        compiler = _run([*command, "--version"])
        parts = (SOURCE.read_text(encoding="utf-8"), *command, *FLAGS, compiler, platform.machine(), _features())
        name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        folder = cache_folder().resolve()
        for path in folder.glob(f"attend-{name}-*.so"):
            if path == _name_by_content(path, name):
                return ctypes.CDLL(str(path))
            path.unlink()  # damaged: to load it could kill the process, or give wrong numbers
        path = folder / f".attend-{name}-{secrets.token_hex(4)}.so"
        compile_source(command, SOURCE, path)
        return ctypes.CDLL(str(path.replace(_name_by_content(path, name))))
    except (OSError, RuntimeError, ValueError) as error:  # no folder, no home, a CC that does not read as a command
        raise CannotBuild(f"attend.c cannot be compiled, kept or loaded: {error}") from None


def _name_by_content(path: Path, name: str) -> Path:
    """Where a library belongs: its file is named by its source, compiler and processor, and by a hash of its own bytes."""
    return path.with_name(f"attend-{name}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}.so")


def compile_source(command: list[str], source: Path, path: Path) -> None:
    """Writes the library under a name of its own and renames it, so that several processes may compile at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f".{path.stem}-{secrets.token_hex(4)}.so")
    log.info("compiling %s for this processor, which takes some seconds and happens once: %s", source.name, path)
    try:
        _run([*command, *FLAGS, str(source), "-o", str(own), "-lm"])
        with own.open("rb") as file:
            os.fsync(file.fileno())
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=MOST_SECONDS, check=True
        )
    except subprocess.CalledProcessError as error:
        told = (error.stderr.strip() or error.stdout.strip()).splitlines()
        lines = told or [f"exit status {error.returncode}"]
        complaint = next((line for line in lines if "error" in line), lines[0])
        raise CannotBuild(f"the C compiler '{command[0]}' fails ({complaint}); name another in CC") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"the C compiler '{command[0]}' does not run: {error}") from None
    return done.stdout


def _features() -> str:
    """What the processor can do, since machines of several kinds may share a folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
