"""Training a small model on a GPU: what compiled parts, a CUDA graph and several runs side by side gain.

The models of RegBench keep the host busier than the GPU. Each is trained in every way for some seconds. Runs that share the GPU
begin and end when they can: their steps are counted between the moment when the last of them is warm and the moment when the
first of them stops.

python -m benchmarks.small_models [--minutes 10] [MODEL …]

Processes share a GPU in time slices, or at once under NVIDIA's MPS where CUDA_MPS_PIPE_DIRECTORY says that its daemon runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.common import append, environment
from compactattn.experiments import in_context
from compactattn.training.config import vary
from compactattn.training.interrupt import Interrupted
from compactattn.training.records import TIMING

INTERVAL, WARM = 20, 5  # steps of a reading, readings left out at the beginning
SECONDS = 5.0  # in which all runs of a way are counted
ENDLESS = 1_000_000  # steps: a run is stopped
VARIANTS = ("mosaic:gaussian", "mosaic:biweight", "transformer", "h3", "mamba")


class Way(NamedTuple):
    """How runs are trained: so many at a time, each as the settings have it."""

    name: str
    runs: int
    settings: dict[str, object]


GRAPH = {"compile": "parts", "graph": True}
WAYS = (
    Way("plain", 1, {"compile": "none", "graph": False}),
    Way("compiled parts", 1, {"compile": "parts", "graph": False}),
    Way("and a CUDA graph", 1, GRAPH),
    Way("and 4 runs side by side", 4, GRAPH),
    Way("and 8 runs side by side", 8, GRAPH),
)


class Reading(NamedTuple):
    """The steps that a run has done at a time."""

    time: float
    step: int


class Together(NamedTuple):
    """What runs did while all of them ran warm."""

    seconds: float
    steps: float

    @property
    def rate(self) -> float:
        return self.steps / self.seconds


def count_together(runs: Sequence[Sequence[Reading]]) -> Together | None:
    """The steps of all runs in the time that they share after the first readings of each; None without such a time."""
    if any(len(run) <= WARM for run in runs):
        return None
    start, end = max(run[WARM].time for run in runs), min(run[-1].time for run in runs)
    if end <= start:
        return None
    counts = (np.interp([start, end], [one.time for one in run], [one.step for one in run]) for run in runs)
    return Together(end - start, float(sum(last - first for first, last in counts)))


def train(variant: str, settings: dict[str, object], folder: Path) -> None:
    """A run, in a process of its own, until it is stopped."""
    name, _, kernel = variant.partition(":")
    endless = {
        "steps": ENDLESS,
        "warmup": 0,
        "log_every": INTERVAL,
        "checkpoint_every": ENDLESS,
        "validate_every": 0,
        "patience": 0,
    }
    config = vary(in_context.paper(name, 1000), model={"kernel": kernel or "gaussian"}, training={**endless, **settings})
    with contextlib.suppress(Interrupted):
        in_context.run(config, folder, show_progress=False)


def read(folder: Path) -> list[Reading]:
    lines = (folder / TIMING).read_bytes().splitlines(keepends=True) if (folder / TIMING).exists() else []
    found = (json.loads(line) for line in lines if line.endswith(b"\n"))  # the last may be half written
    return [Reading(line["time"], line["step"]) for line in found]


def measure(variant: str, way: Way, end: float) -> Together | None:
    """What the runs of a way do together; None where they are not warm before the clock is at `end`."""
    with tempfile.TemporaryDirectory() as parent:
        folders = [Path(parent) / str(number) for number in range(way.runs)]
        with running([(variant, way.settings, folder) for folder in folders]) as processes:
            while time.monotonic() < end:
                time.sleep(0.2)
                if failed := [process.exitcode for process in processes if process.exitcode is not None]:
                    raise SystemExit(f"a run of {variant} ended with status {failed[0]}")
                found = count_together([read(folder) for folder in folders])
                if found and found.seconds >= SECONDS:
                    return found
        return None


@contextmanager
def running(jobs: Sequence[tuple[str, dict[str, object], Path]]) -> Iterator[list[SpawnProcess]]:
    """A process for each run; in the end each is asked to stop, and waited for."""
    processes = [get_context("spawn").Process(target=train, args=job) for job in jobs]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="no measurement goes on after these")
    parser.add_argument("models", nargs="*", default=VARIANTS, metavar="MODEL", help=f"by default {', '.join(VARIANTS)}")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks.small_models needs a GPU that PyTorch can use")
    shared = "CUDA MPS" if "CUDA_MPS_PIPE_DIRECTORY" in os.environ else "time slices"
    facts = environment() | {"device": torch.cuda.get_device_name(), "shared": shared}
    end = time.monotonic() + 60 * given.minutes
    for number, variant in enumerate(given.models):
        for way in WAYS:
            if (found := measure(variant, way, end)) is None:
                left = ", ".join(given.models[number:])
                print(f"{left}: left out after {given.minutes:g} minutes; give more with --minutes")
                return
            row: dict[str, object] = {"model": variant, "way": way.name, "runs": way.runs, "seconds": round(found.seconds, 1)}
            row["steps_per_second"] = round(found.rate, 1)
            print(row, "added to", append("small_models", [row | facts]), flush=True)


if __name__ == "__main__":
    main()
