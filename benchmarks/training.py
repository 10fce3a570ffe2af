"""What a training step must not wait for, on a CPU: the leaky average and the data.

The step itself is timed on a GPU, by `compactattn bench training`.

python -m benchmarks.training
"""

from __future__ import annotations

import os
import tempfile
from itertools import count
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import append, environment, spread, time_in_turns
from compactattn.data.batches import Stream
from compactattn.data.corpus import Windows
from compactattn.data.sequences import TASKS, Sequences
from compactattn.memory.features import leaky_average, leaky_scan

LENGTHS = (512, 1024, 2048, 4096)
BATCH, HEADS, DIM = 1, 8, 64
WINDOWS, WINDOW, TOKENS, GPT2 = 32, 512, 2**25, 50257  # a file of 64 MiB, more than a cache holds


def time_averages(length: int) -> dict[str, object]:
    """Forward + backward of the scan and of the T×T definition."""
    x = torch.randn(BATCH, HEADS, length, DIM, requires_grad=True)
    leak = torch.linspace(0.5, 5.0, HEADS).requires_grad_()
    slope = torch.randn(BATCH, HEADS, length, DIM)
    calls = {
        name: (lambda average=average: torch.autograd.grad(average(x, leak), (x, leak), slope))
        for name, average in (("scan", leaky_scan), ("definition", leaky_average))
    }
    times = {name: spread(found) for name, found in time_in_turns(calls, seconds=1.5).items()}
    scan, definition = times["scan"]["median_ms"], times["definition"]["median_ms"]
    return {
        "what": "leaky average",
        "case": f"{BATCH}x{HEADS}x{length}x{DIM}",
        "ours_ms": scan,
        "ours_p20_ms": times["scan"]["p20_ms"],
        "ours_p80_ms": times["scan"]["p80_ms"],
        "definition_ms": definition,
        "faster_by": round(definition / scan, 1),
        "tokens_per_second": "",
        "goal": "5 times faster" if length == 4096 else "",
    }


def time_task(task: str, batch: int = 256) -> dict[str, object]:
    """Batches of the published task."""
    stream = Sequences(TASKS[task], seed=0)
    tokens = sum(int((stream.batch(i * batch, batch).inputs != TASKS[task].pad).sum()) for i in range(4)) / 4
    return time_data(f"{task}, batch {batch}", stream, batch, tokens)


def time_windows() -> dict[str, object]:
    """Windows of language modelling, out of a file of tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.bin"
        np.random.default_rng(0).integers(GPT2, size=TOKENS, dtype=np.uint16).tofile(path)
        stream = Windows(np.memmap(path, np.uint16, "r"), WINDOW, seed=0, ids=GPT2)
        return time_data(f"lm, {WINDOWS} windows of {WINDOW}", stream, WINDOWS, WINDOWS * WINDOW)


def time_data(case: str, stream: Stream, batch: int, tokens: float) -> dict[str, object]:
    """Batches of so many tokens, on one thread."""
    steps, threads = count(), torch.get_num_threads()
    torch.set_num_threads(1)  # NumPy uses no more, but a copy of PyTorch would wait for a second core that is busy elsewhere
    times = spread(time_in_turns({case: lambda: stream.batch(next(steps) * batch, batch)}, seconds=2)[case])
    torch.set_num_threads(threads)
    return {
        "what": "data", "case": case, "ours_ms": times["median_ms"], "ours_p20_ms": times["p20_ms"],
        "ours_p80_ms": times["p80_ms"], "definition_ms": "", "faster_by": "",
        "tokens_per_second": round(tokens / times["p80_ms"] * 1e3), "goal": "5,000,000 tokens/s",
    }  # fmt: skip


def main() -> None:
    rows = [*map(time_averages, LENGTHS), *map(time_task, TASKS), time_windows()]
    for row in rows:
        print({name: value for name, value in row.items() if value != ""}, flush=True)
    print("rows added to", append("cpu_training", [row | environment() for row in rows]), f"({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
