"""Training a small model on a GPU: what compiled parts, a CUDA graph and several runs side by side gain.

The models of RegBench keep the host busier than the GPU. Each is trained for some hundred steps in every way, and the steps of
runs that share the GPU are added up.

python -m benchmarks.small_models [MODEL …]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.common import append, environment
from compactattn.experiments import in_context
from compactattn.training.config import vary
from compactattn.training.records import TIMING

STEPS, INTERVAL, WARM = 300, 20, 5  # steps, steps of a reading, readings left out at the beginning
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


def measure(variant: str, settings: dict[str, object]) -> float:
    """Steps in a second of one run, the median of its readings."""
    name, _, kernel = variant.partition(":")
    few = {"steps": STEPS, "warmup": 0, "log_every": INTERVAL, "checkpoint_every": STEPS, "validate_every": 0, "patience": 0}
    config = vary(in_context.paper(name, 1000), model={"kernel": kernel or "gaussian"}, training={**few, **settings})
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        in_context.run(config, folder, show_progress=False)
        lines = [json.loads(line) for line in (folder / TIMING).read_text().splitlines()]
    return INTERVAL / statistics.median(line["seconds"] for line in lines[WARM:])


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("python -m benchmarks.small_models needs a GPU that PyTorch can use")
    rows, context = [], get_context("spawn")
    with ProcessPoolExecutor(max(way.runs for way in WAYS), mp_context=context) as pool:
        for variant in sys.argv[1:] or VARIANTS:
            for way in WAYS:
                rates = list(pool.map(measure, [variant] * way.runs, [way.settings] * way.runs))
                rows.append({"model": variant, "way": way.name, "runs": way.runs, "steps_per_second": round(sum(rates), 1)})
                print(rows[-1], flush=True)
    facts = environment() | {"device": torch.cuda.get_device_name()}
    print("rows added to", append("small_models", [row | facts for row in rows]))


if __name__ == "__main__":
    main()
