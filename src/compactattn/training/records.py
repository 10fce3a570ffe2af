"""The lines a run leaves: metrics.jsonl, the same whether or not it was interrupted, and timing.jsonl, which cannot be."""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy
import torch

import compactattn
from compactattn.training.config import RunError
from compactattn.training.files import replace_durably

METRICS, TIMING, ENVIRONMENT = "metrics.jsonl", "timing.jsonl", "environment.json"


class Records:
    """Appends to both files, from the place where the checkpoint left them."""

    def __init__(self, folder: Path, step: int, metrics_bytes: int) -> None:
        self.folder = folder
        try:
            self._metrics = _open_at(folder / METRICS, metrics_bytes)
            self._timing = _open_at(folder / TIMING, _length_up_to(folder / TIMING, step))
        except OSError as error:
            raise RunError(f"cannot write to {folder}: {error.strerror or error}") from error

    def metric(self, line: dict[str, Any]) -> None:
        self._append(self._metrics, line)

    def timing(self, line: dict[str, Any]) -> None:
        self._append(self._timing, line)

    def sync(self) -> int:
        """Length of the metrics, all of it safely on disk."""
        try:
            os.fsync(self._metrics.fileno())
        except OSError as error:
            raise _unwritable(self._metrics, error) from error
        return self._metrics.tell()

    def close(self) -> None:
        self._metrics.close()
        self._timing.close()

    def _append(self, file: BinaryIO, line: dict[str, Any]) -> None:
        rest = json.dumps(_finite(line), allow_nan=False).encode() + b"\n"
        try:
            while rest:  # a full disk takes a part first and complains only when asked again
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise _unwritable(file, error) from error


def _unwritable(file: BinaryIO, error: OSError) -> RunError:
    return RunError(
        f"cannot write to {file.name}: {error.strerror or error}; the last checkpoint is intact: make room and resume"
    )


def _open_at(path: Path, length: int) -> BinaryIO:
    """The file cut to that length, open to append; unbuffered, so that what is written can be read at once."""
    file = cast(BinaryIO, open(path, "ab", buffering=0))  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # goes with the process, however it ends
        if file.seek(0, os.SEEK_END) < length:
            raise RunError(
                f"{path} is shorter than the {length} bytes its checkpoint saw; restore a copy of the run, or train again"
            )
        file.truncate(length)
        file.seek(length)
    except BlockingIOError:
        file.close()
        raise RunError(f"another process is training in {path.parent}; wait for it, or stop it") from None
    except BaseException:
        file.close()
        raise
    return file


def _length_up_to(path: Path, step: int) -> int:
    """Length of the whole lines that belong to that step or an earlier one."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            late = not line.endswith(b"\n") or json.loads(line)["step"] > step
        except (ValueError, KeyError, TypeError):
            late = True
        if late:
            break
        length += len(line)
    return length


def _finite(value: Any) -> Any:
    """The same with null for what JSON cannot say."""
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl; a last line that was cut short is left out."""
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    try:
        return [json.loads(line) for line in lines if line.endswith(b"\n")]
    except ValueError as error:
        raise RunError(f"{path} is malformed: {error}") from None


def record_environment(folder: Path, device: torch.device, processes: int, step: int) -> None:
    """Writes what the run was started with; each resumption adds what it was resumed with."""
    path = folder / ENVIRONMENT
    facts = describe_environment(device, processes)
    if step:
        try:
            earlier = json.loads(path.read_bytes())
            facts = {**earlier, "resumed": [*earlier.get("resumed", []), {"step": step, **facts}]}
        except (OSError, ValueError, TypeError, AttributeError):
            facts["step"] = step  # whatever was there cannot be read; say at least where this part began
    replace_durably(path, (json.dumps(facts, indent=2) + "\n").encode())


def describe_environment(device: torch.device, processes: int) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    return {
        "compactattn": compactattn.__version__,
        "commit": os.environ.get("COMPACTATTN_COMMIT") or _commit(),  # for a machine that has the files but not their history
        "command": describe_command(sys.argv),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "device": torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        "processes": processes,
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def describe_command(arguments: Sequence[str]) -> str:
    """The command line as a person would type it in the current folder, without the folders that lie elsewhere."""
    program, *rest = arguments or [""]
    return f"{_name_program(Path(program))} {shlex.join(rest)}".strip()


def _name_program(program: Path) -> str:
    if program.name == "__main__.py":
        return "python -m compactattn"
    if program.suffix != ".py":
        return program.name
    script, here = program.resolve(), Path.cwd().resolve()
    inside = script.relative_to(here) if script.is_relative_to(here) else script.name
    return f"python {shlex.quote(str(inside))}"


def _commit() -> str | None:
    """The commit this package was run from, with "+" where files had changed; None where it is no checkout."""
    package = Path(compactattn.__file__).parent

    def ask(*words: str) -> str:
        asked = subprocess.run(["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=True)
        return asked.stdout.strip()

    try:
        if Path(ask("rev-parse", "--show-toplevel")) / "src" / "compactattn" != package:
            return None  # installed inside somebody else's repository
        return ask("rev-parse", "HEAD") + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None
