"""Time on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

FLUSH = 256 * 2**20  # bytes, several times the L2 cache of any GPU


def require_gpu() -> torch.device:
    """The GPU to measure on."""
    from compactattn.training.config import RunError

    if not torch.cuda.is_available():
        raise RunError(
            f"benchmarks of the fused kernels need a GPU, and torch {torch.__version__} sees none; run this where one is"
        )
    return torch.device("cuda", torch.cuda.current_device())


def time_call(call: Callable[[], object], warm_ms: float = 30, measured_ms: float = 120, least: int = 5) -> list[float]:
    """Milliseconds of each of several calls, from event to event, every one with a cold L2 cache."""
    flush = torch.empty(FLUSH, dtype=torch.int8, device="cuda")

    def once() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        call()
        end.record()
        return start, end

    call()  # compiles
    first = _read([once() for _ in range(3)])
    for _ in range(int(warm_ms / min(first))):
        call()
    return _read([once() for _ in range(min(300, max(least, int(measured_ms / min(first)))))])


def record(call: Callable[[], object]) -> tuple[Callable[[], object], str]:
    """The call as a CUDA graph, so that a slow host does not count; as it is ("eager") where it cannot be recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and tunes, which a recording cannot
        call()
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        return call, "eager"
    return graph.replay, "graph"


def _read(events: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> list[float]:
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events]


def spread(times: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    fifths = statistics.quantiles(times, n=5, method="inclusive")
    return {"median_ms": round(statistics.median(times), 4), "p20_ms": round(fifths[0], 4), "p80_ms": round(fifths[3], 4)}
