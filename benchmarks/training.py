"""What a training step must not wait for, on a CPU: the leaky average and the data.

The step itself is timed on a GPU, by `compactattn bench training`.

python -m benchmarks.training
"""

from __future__ import annotations

import os
from itertools import count

import torch

from benchmarks.common import append, environment, spread, time_in_turns
from compactattn.data.sequences import TASKS, Sequences
from compactattn.memory.features import leaky_average, leaky_scan

LENGTHS = (512, 1024, 2048, 4096)
BATCH, HEADS, DIM = 1, 8, 64


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


def time_data(task: str, batch: int = 256) -> dict[str, object]:
    """Batches of the published task, on one thread: NumPy uses no more."""
    stream, steps = Sequences(TASKS[task], seed=0), count()
    tokens = sum(int((stream.batch(i * batch, batch).inputs != TASKS[task].pad).sum()) for i in range(4)) / 4
    times = spread(time_in_turns({task: lambda: stream.batch(next(steps) * batch, batch)}, seconds=2)[task])
    return {
        "what": "data", "case": f"{task}, batch {batch}", "ours_ms": times["median_ms"], "ours_p20_ms": times["p20_ms"],
        "ours_p80_ms": times["p80_ms"], "definition_ms": "", "faster_by": "",
        "tokens_per_second": round(tokens / times["p80_ms"] * 1e3), "goal": "5,000,000 tokens/s",
    }  # fmt: skip


def main() -> None:
    rows = [time_averages(length) for length in LENGTHS] + [time_data(task) for task in TASKS]
    for row in rows:
        print({name: value for name, value in row.items() if value != ""}, flush=True)
    print("rows added to", append("cpu_training", [row | environment() for row in rows]), f"({os.cpu_count()} cores)")


if __name__ == "__main__":
    main()
