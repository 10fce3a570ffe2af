"""What the commands of the laboratory do, once their arguments have been read."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from compactattn.cli.app import UsageError, console, parse_kernel
from compactattn.evaluation.exact_match import Match, Mode
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.length_generalisation import default_lengths
from compactattn.experiments.runs import evaluate_run, open_run, read_evaluation
from compactattn.experiments.sweep import MODE, Job, finish, finish_all
from compactattn.training import checkpoint
from compactattn.training.config import RunConfig
from compactattn.training.distributed import leads

SECONDS_BETWEEN_LINES = 30  # where there is no terminal to draw bars on

# -- configs -------------------------------------------------------------------------------------


def configure(task: str, kernel: str, preset: str, seed: int, model: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    """The preset with what was asked for in place of its own; what is None stays."""
    parse_kernel(kernel)
    if model.get("positions") == "auto":
        model["positions"] = "alibi" if model.get("architecture") == "transformer" else "none"
    given = {"kernel": kernel, **model}
    try:
        base = fit_to_machine(length_gen.PRESETS[preset](task), training.get("device") or "auto")
        if model.get("positions") == "learned":
            data, furthest = length_gen.Data.of(base), max(default_lengths(base))
            given["longest"] = data.make_task().prompt_length(furthest) + data.make_task().answer_length(furthest)
        return length_gen.vary(
            base,
            seed=seed,
            model={name: value for name, value in given.items() if value is not None},
            training={name: value for name, value in training.items() if value is not None},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def fit_to_machine(config: RunConfig, device: str) -> RunConfig:
    """The config without the preset's wishes for a GPU where there is none, or several processes."""
    if has_gpu(device) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return config
    return length_gen.vary(config, training={"compile": "none", "graph": False})


def has_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def configure_variant(
    task: str, variant: str, preset: str = "cpu-quick", seed: int = 0, steps: int | None = None, device: str = "auto"
) -> RunConfig:
    transformer = variant == "transformer"
    model = {"architecture": "transformer" if transformer else "mosaic", "positions": "auto"}
    kernel = "gaussian" if transformer else variant
    return configure(task, kernel, preset, seed, model, {"steps": steps, "device": device})


def name_run(config: RunConfig) -> str:
    """A folder's name for people; nothing is ever read out of it."""
    model = config.model
    variant = "transformer" if model.architecture == "transformer" else re.sub(r"[^A-Za-z0-9.]+", "-", model.kernel).strip("-")
    extras: list[str] = [model.positions] if model.positions != ("alibi" if variant == "transformer" else "none") else []
    extras += [f"as-released-{model.as_released}"] if model.as_released else []
    return "-".join([config.data["task"], variant, *extras, str(config.seed)])


def split_kernels(kernels: str) -> list[str]:
    """Names separated by commas, but not by those inside brackets."""
    names = [name.strip() for name in re.split(r",(?![^()]*\))", kernels) if name.strip()]
    kernels_once = {name if name == "transformer" else str(parse_kernel(name)): name for name in reversed(names)}
    names = [name for name in dict.fromkeys(names) if name in kernels_once.values()]  # the first of two names for a kernel
    if not names:
        raise UsageError("name at least one kernel, as in --kernels gaussian,sparsemax")
    return names


def read_lengths(text: str) -> list[int] | None:
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"lengths {text!r} do not read as whole numbers separated by commas, as in 64,128,256") from None


# -- work ----------------------------------------------------------------------------------------


def train_run(config: RunConfig, folder: Path, *, resume: bool, tensorboard: bool = False) -> None:
    try:
        summary = length_gen.run(config, folder, resume=resume, tensorboard=tensorboard)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if leads():
        validation = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in summary.validation.items())
        print(f"{folder}: step {summary.step}, loss {summary.loss:.4f}{validation}, {summary.seconds:.0f} s", flush=True)


def finish_jobs(todo: Sequence[Job], jobs: int) -> None:
    """Trains and evaluates what is not trained and evaluated yet, with a bar for each run."""
    if jobs == 1:
        for number, job in enumerate(todo, start=1):
            print(f"[{number}/{len(todo)}] {job.folder}", flush=True)
            _run(lambda job=job: finish(job, show_progress=True))  # type: ignore[misc]
        return
    with _progress() as bar:
        bars = [bar.add_task(job.folder.name, total=job.config.training.steps) for job in todo]
        told = time.monotonic()

        def watch(steps: Sequence[int]) -> None:
            nonlocal told
            for task, done in zip(bars, steps, strict=True):
                bar.update(task, completed=done)
            if not sys.stderr.isatty() and time.monotonic() > told + SECONDS_BETWEEN_LINES:
                told = time.monotonic()
                shown = (f"{job.folder.name} {done}/{job.config.training.steps}" for job, done in zip(todo, steps, strict=True))
                print("  ".join(shown), flush=True)

        _run(lambda: finish_all(todo, jobs, watch))


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        raise UsageError("stopped; what was trained is saved, and the same command goes on from there") from None


def evaluate_lengths(folder: Path, lengths: Sequence[int] | None, mode: Mode, samples: int, device: str) -> list[Match]:
    with _progress() as bar:
        task = bar.add_task("evaluating", total=samples)
        return evaluate_run(
            folder, lengths, mode, samples, device,
            lambda length, done, total: bar.update(task, description=f"length {length}", completed=done, total=total),
        )  # fmt: skip


def write_page(runs: Sequence[Path], out: Path, device: str) -> Path:
    from compactattn.report.page import write_report  # matplotlib takes a second: only commands that draw wait for it
    from compactattn.report.runs import load

    try:
        return write_report(load(runs), out, _inspect(runs, device))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _inspect(runs: Sequence[Path], device: str) -> list[Any]:
    """A look into one run of length generalisation of each kernel that still has its weights, on the first test sequence."""
    from compactattn.report.inspection import Inspection

    found: dict[str, Inspection] = {}
    for folder in (path for run in runs for path in [run, *sorted(run.glob("*/"))] if checkpoint.exists(path)):
        config = checkpoint.load_config(folder)
        if config.experiment != length_gen.NAME or config.model.kernel in found or config.model.architecture != "mosaic":
            continue
        model = open_run(folder, device).model
        data = length_gen.Data.of(config)
        task = data.make_task()
        tokens = torch.from_numpy(length_gen.open_test_set(config, data.longest).tokens(0, 1)).long()[:, :-1]
        with torch.inference_mode():
            weights, readout = model.inspect(tokens.to(next(model.parameters()).device))[-1]
        head = int(readout.support[0].float().mean(-1).argmin())  # the head that looks at the fewest keys
        found[config.model.kernel] = Inspection(
            config.model.kernel, config.model.layers - 1, head, weights[0, head].cpu().numpy(),
            readout.support[0].cpu().numpy(), readout.bandwidth[0].cpu().numpy(),
            [task.render([int(token)]) for token in tokens[0]],
        )  # fmt: skip
    return list(found.values())


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
        yield bar


def print_matches(found: Sequence[Match]) -> None:
    table = Table("length", "exact match", "token accuracy", "samples", "mode", box=box.SIMPLE_HEAD, show_edge=False)
    for match in found:
        table.add_row(
            str(match.length), f"{match.exact_match:.3f}", f"{match.token_accuracy:.3f}", str(match.samples), match.mode
        )
    console().print(table)


def print_sweep(todo: Sequence[Job]) -> None:
    """Exact match of every run at every length."""
    lengths = default_lengths(todo[0].config)
    table = Table("exact match at length", *map(str, lengths), box=box.SIMPLE_HEAD, show_edge=False)
    for job in todo:
        rows = {row["length"]: row for row in read_evaluation(job.folder) if row["mode"] == MODE}
        table.add_row(job.folder.name, *(f"{rows[n]['exact'] / rows[n]['samples']:.2f}" for n in lengths))
    console().print(table)
