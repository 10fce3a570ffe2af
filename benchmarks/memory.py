"""Peak memory of attend() on a CPU above its inputs, forward + backward, each case in a fresh process.

python -m benchmarks.memory
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.common import append, environment
from compactattn import Causal, attend

CASES = (
    ("biweight", 4096),
    ("sparsemax", 16384),
    ("biweight", 16384),
    ("relumax", 16384),
    ("topk_softmax(32)", 16384),
    ("gaussian", 16384),
)
HEADS, DIM, LIMIT_MIB = 4, 64, 1536


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure(kernel: str, length: int) -> dict[str, object]:
    """Runs in a process of its own: a peak cannot be taken back."""
    torch.manual_seed(0)
    warm = torch.randn(1, 1, 8, DIM, requires_grad=True)
    attend(warm, warm, warm, kernel).sum().backward()
    q, k, v = (torch.randn(1, HEADS, length, DIM, requires_grad=True) for _ in range(3))
    gradient = torch.randn(1, HEADS, length, DIM)
    before = resident_mib()
    start = time.perf_counter()
    attend(q, k, v, kernel, mask=Causal()).backward(gradient)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    shape = f"1x{HEADS}x{length}x{DIM}"
    return {
        "kernel": kernel,
        "shape": shape,
        "mask": "causal",
        "above_inputs_mib": round(peak - before),
        "limit_mib": LIMIT_MIB,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    rows = []
    for kernel, length in CASES:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", kernel, str(length)], capture_output=True, text=True, check=True
        )
        row = json.loads(done.stdout)
        rows.append(row | environment())
        print(f"{kernel:>18} at {row['shape']}: {row['above_inputs_mib']} MiB above the inputs, {row['seconds']} s", flush=True)
    print("rows added to", append("cpu_memory", rows))


if __name__ == "__main__":
    main()
