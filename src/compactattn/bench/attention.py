"""Attention, forward and backward, ours beside every peer: error against float64 first, then time.

Shapes: B batch, H heads, T time, D head dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from compactattn.attention import attend
from compactattn.bench.ahead import compile_ahead
from compactattn.bench.clock import record, require_gpu, spread, time_call
from compactattn.bench.contestants import CONTESTANTS, OURS, PEERS, Cell, Contestant, name_kernels, run_both
from compactattn.bench.goals import HEAD_DIMS, LENGTHS, format_goals, serves_a_goal
from compactattn.bench.regimes import HEADS, MEMORY, REGIMES, TOKENS, Inputs, Problem, draw
from compactattn.bench.results import append, choose, describe_run, read, read_numbers
from compactattn.kernels import parse
from compactattn.masks import Causal
from compactattn.training.config import RunError

TILE = 64
CHECKED = 2048  # the longest at which contestants are held against float64: from 1,024 keys on ours skips tiles
ERRORS = ("output", "dq", "dk", "dv")
# of the norm; bf16 alone errs by 2e-3 to 2e-2 here, a dropped tile or a missing factor by more than this
LARGEST_ERROR = 0.05
SMALLEST = 1e-30  # a gradient that vanishes has no relative error
Timer = Callable[[Callable[[], object]], list[float]]


def run(
    kernels: str = "all",
    peers: str = "all",
    regimes: str = "all",
    lengths: str = ",".join(map(str, LENGTHS)),
    head_dims: str = ",".join(map(str, HEAD_DIMS)),
    minutes: float = 10.0,
    jobs: int = 8,
    out: Path = Path("benchmarks/results/attention.csv"),
) -> None:
    """Time attention on this GPU, forward and forward + backward, beside every peer that is installed.

    bf16, causal, batch · length = 32,768, 16 heads; "memory" is the paper's contextual memory (batch 32, 12 heads,
    length 512, head dim 64, strictly causal). Each contestant is first held against the reference in float64; one that
    is wrong is shown as such and not timed. Rows are added to a CSV file one by one, so a run that is stopped loses none.

    compactattn bench attention --kernels biweight,sparsemax --regimes mild,local --minutes 3

    Args:
        kernels: Names separated by commas, any of `compactattn kernels`; all stands for the nine of the table.
        peers: sdpa-cudnn, sdpa-flash, adasplash-2, flex, adasplash-1, entmax, all or none.
        regimes: mild (scores N(0, 1)), sharp (six times that), local (neighbours attend to neighbours), memory, or all.
        lengths: Separated by commas.
        head_dims: Separated by commas.
        minutes: No new measurement is begun after these. What the goals need comes first, slow peers last.
        jobs: Processes that compile ahead, before anything is timed; 0 for none.
        out: The CSV file.
    """
    asked = (
        name_kernels(kernels),
        choose("peer", peers, (peer.name for peer in PEERS)),
        choose("regime", regimes, REGIMES),
        read_numbers("lengths", lengths),
        read_numbers("head dims", head_dims),
    )
    device = require_gpu()
    cells = plan(*asked)
    facts = describe_run(device)
    end, done = time.monotonic() + 60 * minutes, 0
    if device.type == "cuda":
        compile_ahead(cells, jobs)
    for row in measure_all(cells, device, lambda: time.monotonic() > end):
        append(out, [{**row, **facts}])
        print(format_line(row), flush=True)
        done += 1
    if done < len(cells):
        print(f"{len(cells) - done} of {len(cells)} cells were left out after {minutes:g} minutes; give more with --minutes")
    rows = [row for row in read(out) if row["started"] == facts["started"]]
    for dim in HEAD_DIMS:
        if any(row["head_dim"] == str(dim) for row in rows):
            print(f"\nhead dim {dim}\n\n{format_goals(rows, dim)}")
    print(f"\n{done} rows added to {out}")


# -- the plan ------------------------------------------------------------------------------------


def plan(
    kernels: Sequence[str], peers: Sequence[str], regimes: Sequence[str], lengths: Sequence[int], head_dims: Sequence[int]
) -> list[Cell]:
    """Every cell, in the order of its worth: what the goals need, then the memory, then the rest, slow peers last."""
    for peer in peers:
        if not CONTESTANTS[peer].installed:
            print(f"{peer} is left out: the package {CONTESTANTS[peer].package} is not installed")
    problems = [
        Problem(regime, max(1, TOKENS // length), HEADS, length, dim)
        for regime in regimes if regime != "memory" for dim in head_dims for length in lengths
    ] + [MEMORY] * ("memory" in regimes)  # fmt: skip
    cells = [Cell(problem, OURS, kernel) for problem in problems for kernel in kernels]
    # a softmax beside compact kernels: peers compute it whether or not it was asked of us
    asked = dict.fromkeys((*kernels, "gaussian"))
    cells += [
        Cell(problem, CONTESTANTS[peer], kernel)
        for problem in problems for peer in peers for kernel in asked
        if _takes_part(CONTESTANTS[peer], problem, kernel)
    ]  # fmt: skip
    return sorted(cells, key=lambda cell: (_rank(cell), problems.index(cell.problem)))


def _takes_part(peer: Contestant, problem: Problem, kernel: str) -> bool:
    able = peer.installed and problem.length <= peer.longest and problem.regime in peer.regimes
    return able and peer.prepare(parse(kernel)) is not None


def _rank(cell: Cell) -> int:
    problem, name = cell.problem, cell.contestant.name
    if serves_a_goal(name, cell.kernel, problem.regime, problem.length, problem.head_dim):
        return 0
    return 3 if cell.contestant.slow else 1 if problem == MEMORY else 2


# -- measuring -----------------------------------------------------------------------------------


def measure_all(
    cells: Sequence[Cell], device: torch.device, is_late: Callable[[], bool], timer: Timer = time_call
) -> Iterator[dict[str, object]]:
    """A row for each cell, until it is late."""
    for problem, group in groupby(cells, key=lambda cell: cell.problem):
        if is_late():
            return
        inputs = draw(problem, device)
        for cell in group:
            if is_late():
                return
            yield measure(cell, inputs, timer)


def measure(cell: Cell, inputs: Inputs, timer: Timer = time_call) -> dict[str, object]:
    """The row of a cell; without times where the contestant is wrong, or fails."""
    device = inputs.q.device
    errors, trouble = check(cell, device)
    times: dict[str, object] = {f"{what}_{which}_ms": "" for what in ("forward", "both") for which in ("median", "p20", "p80")}
    times |= {"timed": "", "memory_mib": ""}
    if not trouble:
        try:
            times = take_times(cell, inputs, timer)
        except Exception as error:  # of a peer's code, whatever it is: a row of its own, and the next one's turn
            trouble = explain(error, device)
    problem, share = cell.problem, ""
    try:
        share = f"{share_active_tiles(problem, cell.kernel, cell.offset, device):.3f}"
    except Exception as error:  # of our own kernels: the row of `ours` tells it too
        explain(error, device)
    return {
        "contestant": cell.contestant.name, "kernel": cell.kernel, "regime": problem.regime,
        "mask": "strict" if cell.offset else "causal", "batch": problem.batch, "heads": problem.heads,
        "length": problem.length, "head_dim": problem.head_dim, "dtype": str(inputs.q.dtype).removeprefix("torch."),
        "status": trouble or "ok", **times, "active_tiles": share,
        **{f"error_{name}": f"{errors[name]:.1e}" if name in errors else "" for name in ERRORS},
    }  # fmt: skip


def take_times(cell: Cell, inputs: Inputs, timer: Timer) -> dict[str, object]:
    """Times forward and forward + backward, and the most memory above the inputs that the second needs."""
    q, k, v, do = inputs
    attention = cell.call

    def forward() -> None:
        with torch.no_grad():
            attention(q, k, v, cell.problem.scale, cell.offset)

    def both() -> None:
        torch.autograd.grad(attention(q, k, v, cell.problem.scale, cell.offset), (q, k, v), do)

    with cell.contestant.context():
        times: dict[str, object] = {"timed": ""}
        for what, call in (("forward", forward), ("both", both)):
            timed, times["timed"] = record(call) if q.is_cuda else (call, "eager")
            times |= {f"{what}_{name}": value for name, value in spread(timer(timed)).items()}
        return {**times, "memory_mib": measure_memory(both, q.device)}


def measure_memory(call: Callable[[], None], device: torch.device) -> int | str:
    """MiB that a call holds at its peak above what was there before."""
    if device.type != "cuda":
        return ""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


def explain(error: Exception, device: torch.device) -> str:
    """A failure in one line; ends the run where it took the GPU with it."""
    words = str(error).strip().splitlines()
    reason = f"failed: {type(error).__name__}{f': {words[0]}' if words else ''}"[:200]
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise RunError(f"the GPU is lost to this process ({reason}); run again without the last kernel or peer") from error
        torch.cuda.empty_cache()  # what was left of a call that ran out of memory
    return reason


# -- correctness ---------------------------------------------------------------------------------


def check(cell: Cell, device: torch.device) -> tuple[Mapping[str, float], str]:
    """Errors against float64 at the length of the cell or CHECKED, and what is wrong with them, if anything.

    The batch stays full, though two heads of one sample are judged: a peer that tunes itself would else tune for less.
    """
    length = min(cell.problem.length, CHECKED)
    batch = cell.problem.batch * cell.problem.length // length
    return _check(replace(cell, problem=replace(cell.problem, batch=batch, length=length)), device)


@cache
def _check(cell: Cell, device: torch.device) -> tuple[Mapping[str, float], str]:
    inputs = draw(cell.problem, device)
    try:
        with cell.contestant.context():
            got = [pick(x) for x in run_both(cell.call, inputs, cell.problem.scale, cell.offset)]
    except Exception as error:  # of a peer's code
        return {}, explain(error, device)
    truths = _find_truth(cell.problem, cell.kernel, cell.offset, device)
    errors = {
        name: float((mine.double() - truth).norm() / truth.norm().clamp_min(SMALLEST))
        for name, mine, truth in zip(ERRORS, got, truths, strict=True)
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors, "" if errors[worst] <= LARGEST_ERROR else f"wrong: relative error {errors[worst]:.1e} of {worst}"


@cache
def _find_truth(problem: Problem, kernel: str, offset: int, device: torch.device) -> tuple[Tensor, ...]:
    """Output and gradients of the reference in float64, on the very numbers that the contestants are given."""
    inputs = Inputs(*(pick(x.detach()).double().requires_grad_() for x in draw(problem, device)))

    def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return attend(q, k, v, kernel, scale=scale, mask=Causal(offset), backend="reference")

    return run_both(reference, inputs, problem.scale, offset)


def pick(x: Tensor) -> Tensor:
    """The heads that are judged."""
    return x[:1, :2]


# -- sparsity ------------------------------------------------------------------------------------


@cache
def share_active_tiles(problem: Problem, kernel: str, offset: int, device: torch.device, heads: int = 2) -> float:
    """Share of the 64×64 tiles with a legal key that hold a non-zero weight, in the first heads of one sample.

    Scores are made again, a strip of queries at a time, and held against the thresholds that attend() tells.
    """
    small = replace(problem, batch=1, heads=min(heads, problem.heads))
    q, k, v, _ = (x.detach() for x in draw(small, device))
    _, readout = attend(q, k, v, kernel, scale=problem.scale, mask=Causal(offset), return_readout=True)
    active = legal_tiles = 0
    for first in range(0, problem.length, 16 * TILE):
        rows = slice(first, min(first + 16 * TILE, problem.length))
        scores = problem.scale * (q[:, :, rows].float() @ k[:, :, : rows.stop].float().mT)  # (1, H, strip, keys)
        seen = torch.arange(rows.start, rows.stop, device=device)[:, None] + 1 - offset  # keys that a query may see
        legal = torch.arange(rows.stop, device=device) < seen
        # a fixed kernel that reaches no key weighs all of them: its support says so
        weighs = (scores >= readout.threshold[:, :, rows, None]) | (readout.support[:, :, rows, None] >= seen)
        active += int(_mark_tiles(weighs & legal).sum())
        legal_tiles += int(_mark_tiles(legal[None, None]).sum()) * small.heads
    return active / legal_tiles


def _mark_tiles(marks: Tensor) -> Tensor:
    """(B, H, Q/64, K/64): whether a tile of (B, H, Q, K) holds a mark."""
    queries, keys = marks.shape[2:]
    whole = pad(marks, (0, -keys % TILE, 0, -queries % TILE))
    return whole.unflatten(3, (-1, TILE)).any(4).unflatten(2, (-1, TILE)).any(3)


# -- output --------------------------------------------------------------------------------------


def format_line(row: Mapping[str, object]) -> str:
    """One row for people."""
    place = f"{row['regime']:<6} d {row['head_dim']:<3} n {row['length']:<6} {row['kernel']:<16} {row['contestant']:<12}"
    tiles = f"tiles {row['active_tiles'] or 'unknown'}"
    if row["status"] != "ok":
        return f"{place} {tiles}  {row['status']}"
    errors = "/".join(str(row[f"error_{name}"]) for name in ERRORS)
    return (
        f"{place} {tiles}  forward {row['forward_median_ms']:8.3f} ms  both {row['both_median_ms']:8.3f} ms "
        f"({row['both_p20_ms']:.3f}–{row['both_p80_ms']:.3f})  {row['memory_mib']} MiB  errors {errors}"
    )
