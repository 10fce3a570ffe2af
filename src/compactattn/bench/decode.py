"""One query for each head against a long cache: ours, with and without pages, beside SDPA.

Shapes: B batch, H heads, K keys, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from compactattn.attention import attend
from compactattn.bench.attention import LARGEST_ERROR, Timer, explain
from compactattn.bench.clock import record, require_gpu, spread, time_call
from compactattn.bench.contestants import name_kernels
from compactattn.bench.results import append, choose, describe_run, read_numbers
from compactattn.decoding import Pages, decode

BATCH, HEADS, DIM = 8, 8, 128
RUN = 256  # neighbouring keys that are alike, where they are clustered


class Cache(NamedTuple):
    """A query (B, H, 1, D) and what it looks at (B, H, K, D)."""

    q: Tensor
    k: Tensor
    v: Tensor


def run(
    kernels: str = "all",
    data: str = "all",
    lengths: str = "131072",
    minutes: float = 5.0,
    out: Path = Path("benchmarks/results/decode.csv"),
) -> None:
    """Time a decode step on this GPU: batch 8, 8 heads, head dim 128, fp16, beside PyTorch's SDPA.

    Each answer is first held against the reference in float64. With pages, keys are left unread that are certain to
    weigh nothing; the share of such pages is told.

    compactattn bench decode --kernels biweight,relumax --lengths 32768,131072

    Args:
        kernels: Names separated by commas, any of `compactattn kernels`; all stands for the nine of the table.
        data: random (keys N(0, 1)), clustered (runs of 256 keys are alike, and the query is like one of them), or all.
        lengths: Keys in the cache, separated by commas.
        minutes: No new measurement is begun after these.
        out: The CSV file.
    """
    named, kinds, sizes = name_kernels(kernels), choose("data", data, DATA), read_numbers("lengths", lengths)
    device = require_gpu()
    cells = [("sdpa", "gaussian"), *((who, kernel) for kernel in named for who in ("ours", "ours-pages"))]
    facts, end = describe_run(device), time.monotonic() + 60 * minutes
    for keys in sizes:
        for kind in kinds:
            cache = draw_cache(kind, keys, device)
            for contestant, kernel in cells:
                if time.monotonic() > end:
                    print(f"stopped after {minutes:g} minutes; give more with --minutes")
                    return
                row = {"data": kind, **measure(contestant, kernel, cache)}
                append(out, [{**row, **facts}])
                print(format_line(row), flush=True)


def draw_cache(kind: str, keys: int, device: torch.device | str, dtype: torch.dtype = torch.float16, seed: int = 0) -> Cache:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(length: int) -> Tensor:
        return torch.randn(BATCH, HEADS, length, DIM, generator=generator, device=device).to(dtype)

    return DATA[kind](normal, keys)


def _draw_random(normal: Callable[[int], Tensor], keys: int) -> Cache:
    return Cache(normal(1), normal(keys), normal(keys))


def _draw_clustered(normal: Callable[[int], Tensor], keys: int) -> Cache:
    """Runs of keys are alike, and the query is like one of them."""
    q, k, v = _draw_random(normal, keys)
    centres = normal(-(-keys // RUN))
    k = centres.repeat_interleave(RUN, dim=2)[:, :, :keys] + 0.3 * k
    return Cache(centres[:, :, centres.shape[2] // 2, None] + 0.3 * q, k, v)


DATA = {"random": _draw_random, "clustered": _draw_clustered}


def measure(contestant: str, kernel: str, cache: Cache, timer: Timer = time_call) -> dict[str, object]:
    """The row of one contestant; without a time where it is wrong, or fails."""
    batch, heads, keys, dim = cache.k.shape
    row: dict[str, object] = {
        "contestant": contestant, "kernel": kernel, "batch": batch, "heads": heads, "length": keys, "head_dim": dim,
        "dtype": str(cache.k.dtype).removeprefix("torch."), "status": "ok", "timed": "",
        "median_ms": "", "p20_ms": "", "p80_ms": "", "skipped_pages": "", "error_output": "",
    }  # fmt: skip
    try:
        call = prepare(contestant, kernel, cache)
        out, skipped = call()
        error = find_error(out, kernel, cache)
        row["error_output"] = f"{error:.1e}"
        if skipped is not None:
            row["skipped_pages"] = round(float(skipped.float().mean()) / -(-keys // 64), 4)
        if not error <= LARGEST_ERROR:
            return row | {"status": f"wrong: relative error {error:.1e} of output"}
        timed, row["timed"] = record(call) if cache.k.is_cuda else (call, "eager")
        return row | spread(timer(timed))
    except Exception as error:  # one that fails is a row of its own
        return row | {"status": explain(error, cache.k.device)}


def prepare(contestant: str, kernel: str, cache: Cache) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """A call that gives the output, and the pages (B, H) that were skipped where there are pages."""
    q, k, v = cache
    if contestant == "sdpa":
        return lambda: (scaled_dot_product_attention(q, k, v), None)
    backend = "fused" if k.is_cuda else "auto"  # a fall-back must not be taken for the fused kernels
    if contestant == "ours":
        return lambda: (decode(q, k, v, kernel, backend=backend), None)
    pages = Pages.of(k)
    return lambda: decode(q, k, v, kernel, backend=backend, pages=pages)


def find_error(out: Tensor, kernel: str, cache: Cache) -> float:
    """Of the first sample, against float64."""
    q, k, v = (x[:1].double() for x in cache)
    truth = attend(q, k, v, kernel, backend="reference")
    return float((out[:1].double() - truth).norm() / truth.norm())


def format_line(row: Mapping[str, Any]) -> str:
    place = f"{row['data']:<9} K {row['length']:<7} {row['kernel']:<16} {row['contestant']:<10}"
    if row["status"] != "ok":
        return f"{place} {row['status']}"
    skipped = f"  skipped {row['skipped_pages']}" if row["skipped_pages"] != "" else ""
    return f"{place} {row['median_ms']:7.3f} ms ({row['p20_ms']:.3f}–{row['p80_ms']:.3f})  error {row['error_output']}{skipped}"
