"""Compiles what will be timed beforehand, in several processes: their results meet in Triton's cache on disk.

A peer that autotunes compiles some sixty variants for each length; one process would spend most of a run on that.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context

import torch

from compactattn.attention import attend
from compactattn.bench.contestants import CONTESTANTS, Cell, run_both, shorten_autotuning
from compactattn.bench.regimes import Problem, draw
from compactattn.masks import Causal

Work = tuple[str, str, tuple[Problem, ...]]  # contestant, kernel, problems


def compile_ahead(cells: Iterable[Cell], jobs: int) -> None:
    """Runs each kernel once on one sample, `jobs` processes at a time. A failure here will show again in its own row."""
    work = gather(cells)
    if not work or jobs < 1:
        return
    print(f"compiling ahead: {len(work)} groups of kernels in {min(jobs, len(work))} processes", flush=True)
    with ProcessPoolExecutor(min(jobs, len(work)), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(_compile, *group) for group in work]):
            error = done.exception()
            if isinstance(error, BrokenProcessPool):
                print("a process that compiled ahead has died; what it left is compiled when its turn comes", flush=True)
                return
            if error is not None:
                print(f"compiling ahead: {type(error).__name__}: {str(error)[:200]}", flush=True)


def gather(cells: Iterable[Cell]) -> list[Work]:
    """What must be compiled, in groups that share nothing, the longest first."""
    groups: dict[tuple[str, str, int, int], dict[Problem, None]] = {}
    for cell in cells:
        contestant, problem = cell.contestant, replace(cell.problem, regime="mild", batch=1)
        if contestant.compiles and not contestant.slow:
            length = problem.length if contestant.compiles == "lengths" else 0
            groups.setdefault((contestant.name, cell.kernel, problem.head_dim, length), {})[problem] = None
    ordered = sorted(groups.items(), key=lambda item: not item[0][3])
    return [(name, kernel, tuple(problems)) for (name, kernel, _, _), problems in ordered]


def _compile(name: str, kernel: str, problems: tuple[Problem, ...]) -> None:
    """In a process of its own: timing must not wait for it, nor suffer from it."""
    contestant = CONTESTANTS[name]
    shorten_autotuning(lambda call, quantiles: (call(), [0.0] * len(quantiles))[1])
    for problem in problems:
        call, inputs = Cell(problem, contestant, kernel).call, draw(problem, "cuda")
        with contestant.context():
            run_both(call, inputs, problem.scale, 0)
        if name == "ours":  # the share of active tiles needs the thresholds
            attend(*inputs[:3], kernel, mask=Causal(), return_readout=True)
    torch.cuda.synchronize()
