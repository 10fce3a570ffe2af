"""What every benchmark shares: timing, the environment of a run, and the file the rows go to."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from compactattn.bench import results
from compactattn.bench.clock import spread as spread
from compactattn.bench.results import Row, find_version
from compactattn.training.config import RunError

RESULTS = Path(__file__).parent / "results"


def time_in_turns(calls: Mapping[str, Callable[[], object]], seconds: float = 3.0, least: int = 7) -> dict[str, list[float]]:
    """Milliseconds of each call, taken in turns so that a noisy moment hits all alike."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(next(iter(times.values()))) < least:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def environment() -> dict[str, object]:
    """Where and when a row was measured."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": os.environ.get("COMPACTATTN_COMMIT") or _commit(),  # for a machine that has the files but not their history
        "command": f"python -m {_module()}",
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "entmax": find_version("entmax"),
    }


def append(name: str, rows: list[dict[str, object]]) -> Path:
    """Adds rows to results/NAME.csv; a file with other columns is a mistake and is refused."""
    path = RESULTS / f"{name}.csv"
    try:
        results.append(path, rows)
    except RunError as error:
        raise SystemExit(str(error)) from error
    return path


def read(name: str) -> list[Row]:
    return results.read(RESULTS / f"{name}.csv")


def newest(rows: list[Row], *keys: str) -> list[Row]:
    """The last row for each value of the keys, in the order of their first appearance."""
    found: dict[tuple[str, ...], Row] = {}
    for row in rows:
        found[tuple(row[key] for key in keys)] = row
    return list(found.values())


def mark(text: str, reached: bool) -> str:
    """A number as every table shows it: bold where it misses its goal."""
    return text if reached else f"**{text}**, lost"


def source(name: str) -> str:
    row = read(name)[-1]
    place = row.get("device") or f"{row['cpu']}, {row['threads']} threads"
    return (
        f"`{row['command']}` on {place}, torch {row['torch']}, Python {row['python']}, {row['date']}, commit {row['commit']}."
    )


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else "benchmarks"


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent
        ).stdout.strip()

    dirty = "+" if git("status", "--porcelain", "--", "../src", "*.py") else ""
    return (git("rev-parse", "--short", "HEAD") or "unknown") + dirty


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return f"{name} ({os.cpu_count()} cores)"
