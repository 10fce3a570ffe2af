"""What the commands of the laboratory do, once their arguments have been read."""

from __future__ import annotations

import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from compactattn.cli.app import Stopped, UsageError, parse_kernel, prepare_folder
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.runs import open_run, read_failure
from compactattn.experiments.storytelling import Wish
from compactattn.experiments.sweep import Job, finish, finish_all
from compactattn.kernels import split_names
from compactattn.memory.contextual import LARGEST_LOG_BETA
from compactattn.memory.inspection import summarise
from compactattn.models.config import RECURRENT, ModelConfig
from compactattn.models.language_model import build, count_parameters
from compactattn.training import checkpoint
from compactattn.training.checks import check_folder, check_machine
from compactattn.training.config import RunConfig, vary
from compactattn.training.distributed import Group, choose_device, leads
from compactattn.training.divergence import Diverged
from compactattn.training.interrupt import Interrupted

Preset = Literal["cpu-quick", "gpu-short", "paper"]
Start = Literal["published", "former"]
FURTHEST = 64  # times the length of training: what the paper tests, and where prompts end unless told otherwise
FEW = 4  # runs up to which each is named in a line of progress
SECONDS_BETWEEN_LINES = 30  # where there is no terminal to draw bars on


@dataclass(frozen=True)
class Asked:
    """What `generate` is to write."""

    prompts: tuple[str, ...]
    wish: Wish
    device: str
    samples: int = 1  # from each prompt
    save: bool = False
    longest: int | None = None  # tokens of a prompt that are allowed, where other than usual

    def only_prompt(self, title: str) -> str:
        """The prompt, empty where there is none; more than an experiment with one answer can do is refused."""
        if len(self.prompts) > 1 or self.samples > 1 or not self.wish.stop or self.save:
            raise UsageError(f"several prompts, --samples, --no-stop and --save are for language modelling, not for {title}")
        return self.prompts[0] if self.prompts else ""

    def check_lengths(self, config: RunConfig, prompts: Sequence[Sequence[int]]) -> None:
        """Refuses a prompt that is longer than allowed, before any is answered; learned positions say so themselves."""
        trained = experiment_of(config).window(config)
        most = FURTHEST * trained if self.longest is None else self.longest
        for number, tokens in enumerate(prompts, start=1):
            if len(tokens) > most and (self.longest is not None or not config.model.longest):
                which = f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
                why = f", {FURTHEST} times the {trained} it was trained on" if self.longest is None else ""
                raise UsageError(
                    f"{which} has {len(tokens):,} tokens, and this model takes at most {most:,}{why};"
                    f" shorten it, or allow it with --longest-prompt {len(tokens)}"
                )


@dataclass(frozen=True)
class Voice:
    """How an experiment speaks of its runs."""

    describe: Callable[[RunConfig], str]  # before training
    evaluate_and_show: Callable[[Path, str], None]  # after it, on a device
    choose_prompt: Callable[[RunConfig], str] | None = None  # to try with `generate`
    note: Callable[[RunConfig], str] | None = None  # what its numbers are not, told last; empty where there is nothing to tell


# -- configs -------------------------------------------------------------------------------------


def fit_to_machine(config: RunConfig, device: str) -> RunConfig:
    """The config without the preset's wishes for a GPU where there is none, or several processes.

    A RunError says where the device itself is not there.
    """
    choose_device(device)
    if has_gpu(device) and int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return config
    return vary(config, training={"compile": "none", "graph": False})


def warn_of_preset(preset: Preset, device: str) -> None:
    """Says so where a preset for GPUs is to run on a CPU."""
    if preset != "cpu-quick" and not has_gpu(device) and leads():
        print(f"Note: preset {preset} is made for a GPU, and a step on a CPU may take minutes; cpu-quick is quick.", flush=True)


def has_gpu(device: str) -> bool:
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def split_kernels(kernels: str) -> list[str]:
    """Names of kernels, each kernel once, by the first of its names."""
    names = split_names(kernels)
    once = {name if name == "transformer" else str(parse_kernel(name)): name for name in reversed(names)}
    names = [name for name in names if name in once.values()]
    if not names:
        raise UsageError("name at least one kernel, as in --kernels gaussian,sparsemax")
    return names


def read_numbers(text: str, what: str) -> list[int]:
    """Whole numbers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{what} {text!r} do not read as whole numbers separated by commas, as in 64,128,256") from None


# -- work ----------------------------------------------------------------------------------------


def check_run(config: RunConfig, folder: Path, resume: bool, tensorboard: bool) -> None:
    """Stops what cannot be trained here before anything is said of it."""
    group = Group(choose_device(config.training.device), size=int(os.environ.get("WORLD_SIZE", "1")))
    try:
        check_machine(config.training, group, tensorboard)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not resume and group.size == 1:  # of several processes the leading one may have made the folder by now
        check_folder(config, folder)


def train_run(config: RunConfig, folder: Path, *, resume: bool, tensorboard: bool = False) -> None:
    try:
        summary = experiment_of(config).run(config, folder, resume=resume, tensorboard=tensorboard)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if leads():
        best = f", best at step {summary.best_step}" if summary.best_step else ""
        validation = _describe_validation(summary.validation, config.data.get("validation_windows"))
        took = f"{summary.seconds:.0f} s{' with validation' if summary.validation else ''}"
        print(f"{folder}: step {summary.step}, loss {summary.loss:.4f}{validation}{best}, {took}", flush=True)


def _describe_validation(found: Mapping[str, float], windows: int | None) -> str:
    """The last validation: a loss as it is, shares in per cent, as the tables have them."""
    named = {"tvd": "TVD"}
    values = [
        f"{named.get(name, name.replace('_', ' '))} {f'{value:.4f}' if name == 'loss' else f'{100 * value:.1f} %'}"
        for name, value in found.items()
    ]
    of = f" of at most {windows} windows" if windows else ""
    return f", last validation{of}: {', '.join(values)}" if values else ""


def train_and_show(
    config: RunConfig, folder: Path, voice: Voice, *, resume: bool = False, evaluate: bool = True, tensorboard: bool = False,
    preset: Preset = "cpu-quick",
) -> None:  # fmt: skip
    """Trains a run and, unless told otherwise, tests it, shows how well it did and what can be done with it."""
    check_run(config, folder, resume, tensorboard)
    if leads():
        with torch.device("meta"):
            print(f"{voice.describe(config)}: {count_parameters(build(config.model)):,} parameters", flush=True)
    warn_of_preset(preset, config.training.device)
    train_run(config, folder, resume=resume, tensorboard=tensorboard)
    if leads():
        if evaluate:
            show_run(config, folder, voice)
        conclude(voice.note(config) if voice.note else "")


def show_run(config: RunConfig, folder: Path, voice: Voice) -> None:
    """Tests a trained run, shows how well it did and what can be done with it."""
    voice.evaluate_and_show(folder, config.training.device)
    prompt = f" --prompt {shlex.quote(voice.choose_prompt(config))}" if voice.choose_prompt else ""
    named = shlex.quote(str(folder))
    print(f"\nNext: compactattn report {named} --out report")
    print(f"      compactattn generate {named}{prompt}")
    if config.model.architecture in ("mosaic", "transformer"):
        print(f"      compactattn inspect {named}")


def conclude(note: str) -> None:
    """Prints what is told last, if anything is."""
    if note:
        print(f"\nNote: {note}", flush=True)


def finish_sweep(todo: Sequence[Job], jobs: int, out: Path, show: Callable[[Sequence[Job]], None], note: str = "") -> None:
    """Finishes all runs of a sweep, writes their report and shows how well they did; those that diverged are told last."""
    diverged = finish_jobs(todo, jobs)
    if len(diverged) < len(todo):
        page = write_page([job.folder for job in todo], out / "report", todo[0].device)
        show(todo)
        print(f"\nReport: {page}")
        conclude(note)
    complain(diverged, todo)


def complain(diverged: Mapping[int, Diverged], todo: Sequence[Job]) -> None:
    """A UsageError, so that no script takes a sweep for whole that is not."""
    if diverged:
        count, named = f"{len(diverged)} of {len(todo)} runs", "".join(f"\n{diverged[number]}" for number in sorted(diverged))
        raise UsageError(f"{count} diverged; to try one again, remove its folder and give the same command{named}")


def finish_jobs(todo: Sequence[Job], jobs: int) -> dict[int, Diverged]:
    """Trains and evaluates what is not trained and evaluated yet, with a bar for each run; returns which diverged."""
    diverged: dict[int, Diverged] = {}
    if jobs == 1:
        for number, job in enumerate(todo):
            print(f"[{number + 1}/{len(todo)}] {job.folder}", flush=True)
            try:
                _run(lambda job=job: finish(job, show_progress=True))  # type: ignore[misc]
            except Diverged as error:
                diverged[number] = error
        return diverged
    with progress() as bar:
        bars, lines = [bar.add_task(job.folder.name, total=job.config.training.steps) for job in todo], Lines()

        def watch(steps: Sequence[int]) -> None:
            for task, done in zip(bars, steps, strict=True):
                bar.update(task, completed=done)
            lines.tell(lambda: describe_jobs(todo, steps))

        _run(lambda: diverged.update(finish_all(todo, jobs, watch)))
    return diverged


def describe_jobs(todo: Sequence[Job], steps: Sequence[int]) -> str:
    """How far jobs are, in a line: where they are many, only those that have begun and are not done."""
    counts = [(job.folder.name, done, job.config.training.steps) for job, done in zip(todo, steps, strict=True)]
    if len(counts) <= FEW:
        return "  ".join(f"{name} {done}/{total}" for name, done, total in counts)
    running = (f"{name} {done}/{total}" for name, done, total in counts if 0 < done < total)
    return f"{sum(done == total for _, done, total in counts)} of {len(counts)} runs trained  {'  '.join(running)}"


def _run(work: Callable[[], None]) -> None:
    try:
        work()
    except Interrupted as error:
        raise Stopped(f"{str(error).partition(';')[0]}; the same command goes on from there", error.number) from None
    except ValueError as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt as error:
        number = error.args[0] if error.args else signal.SIGINT
        raise Stopped("stopped; what was trained is saved, and the same command goes on from there", number) from None


def write_page(runs: Sequence[Path], out: Path, device: str) -> Path:
    # matplotlib takes a second: only commands that draw wait for it
    from compactattn.report.page import check_evaluated, write_report
    from compactattn.report.runs import load

    try:
        found = load(runs)
        check_evaluated(found)  # so that no folder is left behind for runs that make no report
        inspections, missing, others = inspect_runs(runs, device)
        for note in missing:
            print(f"compactattn: attention from inside is left out for {note}", file=sys.stderr)
        prepare_folder(out)
        return write_report(found, out, inspections, [*(f"Left out is {note}." for note in missing), *others])
    except ValueError as error:
        raise UsageError(str(error)) from error


def inspect_runs(runs: Sequence[Path], device: str) -> tuple[list[Any], list[str], list[str]]:
    """A look into one run of each kernel that still has its weights; where its example is gone, why; and what is not shown."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    twins: list[str] = []
    others: list[str] = []
    for folder in (path for run in runs for path in [run, *sorted(run.glob("*/"))] if (path / "config.json").is_file()):
        config = checkpoint.load_config(folder)
        kernel = str(parse_kernel(config.model.kernel))
        if config.model.architecture != "mosaic":
            others.append(str(folder))
        elif kernel in found:
            twins.append(str(folder))
        elif checkpoint.exists(folder) and not read_failure(folder):  # else its weights are those of some step before
            try:
                example = experiment_of(config).example(config)
            except ValueError as error:  # a corpus that has moved must not cost the rest of the page
                missing[kernel] = f"{folder}: {error}"
                continue
            found[kernel] = _look_into(folder, example, device)
    notes = [f"Of each kernel one run is shown; not shown: {', '.join(twins)}."] if twins else []
    reason = "On its first test example only a Memory Mosaic is shown, whose keys of unit length give the bandwidth a meaning"
    notes += [f"{reason}; not shown: {', '.join(others)}."] if others else []
    return list(found.values()), [note for kernel, note in missing.items() if kernel not in found], notes


def _look_into(folder: Path, example: tuple[list[int], list[str]], device: str) -> Any:
    """The last layer of a run on an example."""
    from compactattn.report.inspection import Inspection

    tokens, words = example
    trained = open_run(folder, device)
    model, data = trained.config.model, trained.config.data
    subject = data.get("corpus") or data.get("task") or f"RegBench, {data['examples']:,} examples"
    with torch.inference_mode():
        looks = trained.model.inspect(torch.tensor([tokens], device=trained.device))
    weights, readout, _ = looks[-1]
    head = int(readout.support[0].float().mean(-1).argmin())  # the head that looks at the fewest keys
    return Inspection(
        model.kernel, model.layers - 1, head, weights[0, head].cpu().numpy(),
        readout.support[0].cpu().numpy(), readout.bandwidth[0].cpu().numpy(), words, summarise(looks, words),
        str(folder), str(subject),
    )  # fmt: skip


def name_model(model: ModelConfig, has_kernel: bool = True) -> str:
    form = ":own" if model.architecture in RECURRENT and model.form == "own" else ""
    changes = f" ({', '.join(name_changes(model))})" if name_changes(model) else ""
    return f"{model.architecture}{form}{f':{model.kernel}' if has_kernel else ''}{changes}"


def name_changes(model: ModelConfig) -> list[str]:
    """What a folder's name says of a model that is not the published one."""
    changes = [f"as-released-{model.as_released}"] if model.as_released else []
    changes += [f"bandwidth-{model.beta_squared:g}"] if model.beta_squared else []
    return changes + ([f"{model.start}-start"] if model.start != ("unit" if model.bare else "published") else [])


def read_bandwidth(beta_squared: float | None) -> float | None:
    """The β² that was asked for, if any."""
    largest = math.exp(2 * LARGEST_LOG_BETA)
    if beta_squared is not None and not 0 < beta_squared <= largest:
        raise UsageError(f"--bandwidth-start {beta_squared:g} must be above 0 and at most {largest:,.0f}: it is β² = 1/h²")
    return beta_squared


def describe_model(model: ModelConfig, has_kernel: bool = True) -> str:
    layers = f"{model.layers} {'layer' if model.layers == 1 else 'layers'}"
    return f"{name_model(model, has_kernel)}, {layers}, width {model.width}"


def note_positions(written: int, wished: int, longest: int) -> None:
    """Says so on stderr where a text has come to the end of the learned positions, and not to its own."""
    if longest and written < wished:
        print(f"{written} of {wished} tokens: this model learned positions for {longest}, prompt included", file=sys.stderr)


class Lines:
    """A line now and then, where there is no terminal to draw bars on."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def tell(self, describe: Callable[[], str]) -> None:
        now = time.monotonic()
        if not sys.stderr.isatty() and now > self._told + SECONDS_BETWEEN_LINES:
            self._told = now
            print(describe(), flush=True)


@contextmanager
def progress() -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, transient=True, disable=not sys.stderr.isatty()) as bar:
        yield bar
