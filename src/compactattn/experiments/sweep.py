"""Several runs, one after another or side by side; what is finished is never done again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as processes

from compactattn.experiments.registry import experiment_of
from compactattn.experiments.runs import check_same, read_failure
from compactattn.training.checks import is_trained
from compactattn.training.config import RunConfig, RunError
from compactattn.training.divergence import Diverged
from compactattn.training.records import read_metrics

Evaluate = Callable[[RunConfig, Path, int, str], None]  # as an experiment's complete_evaluation


class Job(NamedTuple):
    """A run to be trained and evaluated in a folder."""

    config: RunConfig
    folder: Path
    samples: int
    device: str = "auto"
    evaluate: Evaluate | None = None  # in place of its experiment's own


def finish(job: Job, show_progress: bool = False) -> None:
    """Trains and evaluates what is not trained and evaluated yet. A folder with another config in it is refused.

    Raises Diverged where the run does, or did before: it would again.
    """
    experiment = experiment_of(job.config)
    resume = (job.folder / "config.json").exists()
    if resume:
        check_same(job.folder, job.config)
        if failure := read_failure(job.folder):
            raise Diverged(f"{job.folder} {failure}")
    if not is_trained(job.folder, job.config):
        experiment.run(job.config, job.folder, resume=resume, show_progress=show_progress)
    evaluate = job.evaluate or experiment.complete_evaluation
    evaluate(job.config, job.folder, job.samples, job.device)


def finish_all(jobs: Sequence[Job], side_by_side: int, watch: Callable[[Sequence[int]], None]) -> dict[int, Diverged]:
    """Finishes every job, `side_by_side` at a time, each in a process with its share of the CPU's cores.

    `watch` is given the steps done of each job, now and then. After Ctrl-C every process saves before it ends.
    Returns what was said of the jobs that diverged, by their number; any other trouble stops all of them.
    """
    context = processes.get_context("spawn")
    outcomes: Any = context.Queue()
    waiting = list(enumerate(jobs))
    running: dict[int, SpawnProcess] = {}
    diverged: dict[int, Diverged] = {}
    threads = max(1, (os.cpu_count() or 1) // side_by_side)
    with _stopped_by(signal.SIGTERM, signal.SIGHUP):
        try:
            while waiting or running:
                while waiting and len(running) < side_by_side:
                    number, job = waiting.pop(0)
                    running[number] = _start(context.Process(target=_work, args=(number, job, threads, outcomes)))
                time.sleep(0.2)
                watch([_steps_done(job) for job in jobs])
                diverged |= _reap(running, outcomes)
        finally:
            for process in running.values():
                process.terminate()  # asks it, once, to save and end
            for process in running.values():
                process.join()
    return diverged


@contextmanager
def _stopped_by(*signals: signal.Signals) -> Iterator[None]:
    """Takes these signals as Ctrl-C, so that no process of the sweep is left behind."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, stop) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(process: SpawnProcess) -> SpawnProcess:
    """Starts a process that is deaf to Ctrl-C, which reaches the whole group: asked twice, a run stops without saving."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.start()
    finally:
        signal.signal(signal.SIGINT, before)
    return process


def _work(number: int, job: Job, threads: int, outcomes: Any) -> None:
    torch.set_num_threads(threads)
    try:
        finish(job)
        outcomes.put((number, None))
    except Diverged as error:
        outcomes.put((number, error))
    except (RunError, ValueError, KeyboardInterrupt) as error:
        outcomes.put((number, RunError(str(error) or "stopped")))


def _reap(running: dict[int, SpawnProcess], outcomes: Any) -> dict[int, Diverged]:
    """Takes ended processes off the list and returns which diverged; a RunError says what another one stumbled over."""
    diverged = {}
    while not outcomes.empty():
        number, trouble = outcomes.get()
        running.pop(number).join()
        if isinstance(trouble, Diverged):
            diverged[number] = trouble
        elif trouble is not None:
            raise trouble
    for number, process in list(running.items()):
        if process.exitcode not in (None, 0):
            del running[number]
            raise RunError(f"a process of the sweep ended with status {process.exitcode}; give the same command to go on")
    return diverged


def _steps_done(job: Job) -> int:
    return max((line["step"] for line in read_metrics(job.folder)), default=0) if job.folder.exists() else 0
