"""Rows of measurements in a CSV file, each with the machine, the versions and the commit it comes from."""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from compactattn.kernels import split_names
from compactattn.training.config import RunError
from compactattn.training.records import describe_command, describe_environment

Row = dict[str, str]


def describe_run(device: torch.device) -> dict[str, object]:
    """What all rows of one run share; `started` tells runs apart."""
    facts = describe_environment(device, processes=1)
    command = re.sub(r" --out[= ]\S+", "", describe_command(sys.argv))  # where the rows lie does not change them
    if "bench" not in command.split():
        command = command.replace("-m compactattn", "-m compactattn.bench")
    kept = {name: facts[name] for name in ("started", "commit", "device", "python", "torch", "cuda")}
    packages = {name: find_version(name) for name in ("triton", "adasplash", "entmax")}
    return {**kept, **packages, "command": command}


def find_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def append(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Adds rows to a CSV file; a file with other columns is a mistake and is refused."""
    fields = list(rows[0])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not path.exists() or not path.stat().st_size
        with path.open("a+", newline="") as file:
            file.seek(0)
            known = fields if new else next(csv.reader(file))
            if known != fields:
                raise RunError(f"{path} has columns {known}, this run has {fields}; move the old file away")
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}; choose another file with --out") from error


def read(path: Path) -> list[Row]:
    """All rows; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def format_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def choose(what: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a text, all of them known; "all" stands for every one and "none" for no one."""
    known = list(known)
    if text in ("all", "none"):
        return known if text == "all" else []
    for name in split_names(text):
        if name not in known:
            raise RunError(f"{what} {name!r} is unknown; choose from {', '.join(known)}, all, or none")
    return split_names(text)


def read_numbers(what: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise RunError(f"{what} {text!r} do not read as whole numbers separated by commas, as in 512,2048") from None
    if min(numbers) < 1:
        raise RunError(f"{what} {text!r} must be at least 1")
    return numbers
