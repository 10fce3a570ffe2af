"""Commands that train, evaluate, report and generate."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich import box
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from compactattn.cli.app import UsageError, app, console, parse_kernel, prepare_folder
from compactattn.data.sequences import TASKS
from compactattn.evaluation.exact_match import Match, Mode
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.runs import evaluate_run, evaluated, open_run
from compactattn.models.generation import generate as generate_tokens
from compactattn.models.language_model import build, count_parameters
from compactattn.models.zoo import ZOO
from compactattn.training import checkpoint
from compactattn.training.config import RunConfig
from compactattn.training.distributed import leads

Task = Literal["mqmtar", "sort", "reverse", "copy"]
Preset = Literal["cpu-quick", "gpu-short", "paper"]
Lengths = Annotated[str, tyro.conf.arg(metavar="N,N,...")]

train, sweep = SubcommandApp(), SubcommandApp()
app.command(train, name="train", help="Train one model: compactattn train length-gen --help")
app.command(sweep, name="sweep", help="Train, evaluate and report several: compactattn sweep length-gen --help")


# -- commands ------------------------------------------------------------------------------------


@train.command(name="length-gen")
def train_length_gen(
    task: Task = "mqmtar",
    kernel: str = "sparsemax",
    preset: Preset = "cpu-quick",
    model: Literal["mosaic", "transformer"] = "mosaic",
    positions: Literal["auto", "none", "alibi", "learned"] = "auto",
    as_released: Literal["", "efficient", "plain"] = "",
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    accumulation: int | None = None,
    compile: Literal["none", "parts", "whole"] = "none",
    device: str = "auto",
    out: Path | None = None,
    evaluate: bool = True,
    tensorboard: bool = False,
) -> None:
    """Train a model on short sequences and test it on long ones.

    compactattn train length-gen --task mqmtar --kernel sparsemax --preset cpu-quick

    torchrun --nproc-per-node 8 -m compactattn train length-gen --preset paper --kernel biweight

    Ctrl-C saves; `compactattn resume RUN` goes on from there.

    Args:
        task: mqmtar (associative recall), sort, reverse or copy.
        kernel: Any kernel of `compactattn kernels`, as in "relumax(r=2)".
        preset: cpu-quick (a small task, minutes on two cores), gpu-short (the published model and data, 2,000 steps)
            or paper (the published recipe, days on a GPU).
        model: A Memory Mosaic, or a GPT-2 transformer.
        positions: auto is none for a mosaic and alibi for a transformer, as in the paper.
        as_released: Train with a departure of the published code, to measure what it costs.
        seed: Of the first weights and of the data.
        steps: Updates of the weights, if other than the preset's.
        batch: Samples in an update, over all processes.
        rate: The highest learning rate.
        layers: Number of blocks.
        width: Of the model.
        heads: Of each block.
        precision: bf16 runs matrix products in bfloat16 under autocast.
        accumulation: Micro-batches in an update.
        compile: torch.compile for what surrounds attention (parts, seconds) or for everything (whole, minutes).
        device: auto, cpu, cuda or cuda:1.
        out: The run's folder; by default runs/length-gen/TASK-KERNEL-SEED.
        evaluate: Test the trained model at the lengths of the paper's table, as multiples of the longest in training.
        tensorboard: Also write TensorBoard files (pip install 'compactattn[track]').
    """
    config = _configure(
        task, kernel, preset, seed,
        model={"architecture": model, "positions": positions, "as_released": as_released,
               "layers": layers, "width": width, "heads": heads},
        training={"steps": steps, "batch": batch, "rate": rate, "precision": precision, "accumulation": accumulation,
                  "compile": compile, "device": device},
    )  # fmt: skip
    folder = out or Path("runs") / length_gen.NAME / _name(config)
    _train(config, folder, resume=False, tensorboard=tensorboard)
    if evaluate and leads():
        _print_matches(_evaluate(folder, None, "teacher-forced", 1000, device))
        print(f"\nNext: compactattn report {folder} --out report")


@sweep.command(name="length-gen")
def sweep_length_gen(
    task: Task = "mqmtar",
    kernels: str = "gaussian,sparsemax,entmax43,relumax",
    seeds: int = 1,
    preset: Preset = "cpu-quick",
    steps: int | None = None,
    device: str = "auto",
    samples: int = 1000,
    out: Path = Path("runs/sweep"),
) -> None:
    """Train a model for every kernel and seed, test each on long sequences, and write one report.

    compactattn sweep length-gen --task mqmtar --kernels "gaussian,sparsemax,relumax(r=2)" --seeds 3

    What is finished is not done again: after Ctrl-C the same command goes on. "transformer" among the kernels is
    the GPT-2 transformer with ALiBi.

    Args:
        task: mqmtar (associative recall), sort, reverse or copy.
        kernels: Names separated by commas.
        seeds: How many, counted from 0.
        preset: cpu-quick, gpu-short or paper; see `compactattn train length-gen --help`.
        steps: Updates of the weights, if other than the preset's.
        device: auto, cpu, cuda or cuda:1.
        samples: Test sequences at each length.
        out: Folder of the runs; the report goes to its subfolder report.
    """
    variants = _split(kernels)
    configs = [_variant(task, variant, preset, seed, steps, device) for seed in range(seeds) for variant in variants]
    prepare_folder(out)
    for number, config in enumerate(configs, start=1):
        folder = out / _name(config)
        print(f"[{number}/{len(configs)}] {folder}", flush=True)
        _finish(config, folder, samples, device)
    page = _report([out / _name(config) for config in configs], out / "report", device)
    print(f"\nReport: {page}")


@app.command
def demo(out: Path = Path("demo"), kernels: str = "gaussian,sparsemax,relumax") -> None:
    """Train small Memory Mosaics that differ in their kernel alone, and see which ones extrapolate.

    Associative recall on sequences of at most 32 tokens, tested on up to 16 times as many. Some minutes on two CPU cores.

    Args:
        out: Folder of the runs and of the report, made if need be.
        kernels: Names separated by commas; see `compactattn kernels`.
    """
    names = _split(kernels)
    print(f"Associative recall: {len(names)} small models see sequences of 16 to 32 tokens and are tested on longer ones.")
    sweep_length_gen(kernels=kernels, out=out)
    print("Next: open the report in a browser, talk to a model with `compactattn generate`, or list the kernels.")


@app.command
def resume(run: Positional[Path], evaluate: bool = True, tensorboard: bool = False) -> None:
    """Go on with a run that was stopped: the same weights, to the last bit, as if it had not been.

    compactattn resume runs/length-gen/mqmtar-sparsemax-0

    Args:
        run: Folder of the run.
        evaluate: Test the trained model at the lengths of the paper's table.
        tensorboard: Also write TensorBoard files.
    """
    config = checkpoint.load_config(run)
    _train(config, run, resume=True, tensorboard=tensorboard)
    if evaluate and leads():
        _print_matches(_evaluate(run, None, "teacher-forced", 1000, config.training.device))


@app.command
def evaluate(
    run: Positional[Path],
    lengths: Lengths = "",
    mode: Mode = "teacher-forced",
    samples: int = 1000,
    device: str = "auto",
) -> None:
    """Test a trained model on sequences of given lengths.

    compactattn evaluate runs/length-gen/mqmtar-sparsemax-0 --lengths 64,128,256,512 --mode free-running

    Args:
        run: Folder of the run.
        lengths: Source lengths separated by commas; by default those of the paper's table.
        mode: teacher-forced, as published (each token is judged given the true ones before it), or free-running (the model
            goes on from its own tokens).
        samples: Test sequences at each length.
        device: auto, cpu or cuda.
    """
    _print_matches(_evaluate(run, _read_lengths(lengths), mode, samples, device))


@app.command
def report(runs: Positional[tuple[Path, ...]], out: Path = Path("report"), device: str = "auto") -> None:
    """Write one HTML page about runs: tables beside the paper's, curves, and attention from inside.

    compactattn report runs/length-gen --out report

    compactattn report results/length-gen

    Args:
        runs: Folders of runs, folders of such folders, or files of results.
        out: Folder of the report, made if need be.
        device: Where attention is looked at: auto, cpu or cuda.
    """
    if not runs:
        raise UsageError("name at least one run, as in: compactattn report runs/length-gen/mqmtar-sparsemax-0")
    prepare_folder(out)
    print(_report(runs, out, device))


@app.command
def generate(
    run: Positional[Path], prompt: str = "", tokens: int = 256, temperature: float = 0.0, seed: int = 0, device: str = "auto"
) -> None:
    """Let a trained model answer a prompt.

    compactattn generate runs/length-gen/mqmtar-sparsemax-0

    compactattn generate runs/length-gen/sort-sparsemax-0 --prompt "7 31 0 7 2"

    Args:
        run: Folder of the run.
        prompt: A source in the task's own words, with or without <bos> and <sep>; by default one of the test set.
        tokens: The most to write; the model stops at <eos>.
        temperature: 0 takes the likeliest token, 1 draws as the model believes.
        seed: Of the default prompt, and of the draws.
        device: auto, cpu or cuda.
    """
    trained = open_run(run, device)
    data = length_gen.Data.of(trained.config)
    task = data.make_task()
    try:
        given = (
            task.read_prompt(prompt)
            if prompt
            else task.split(length_gen.open_test_set(trained.config, data.longest).tokens(seed, 1)[0])[0]
        )
        expected = task.render(task.solve(given))
    except ValueError as error:
        raise UsageError(str(error)) from error
    where = next(trained.model.parameters()).device
    written = generate_tokens(
        trained.model, torch.tensor([given], device=where), tokens, temperature=temperature, stop=task.eos, seed=seed
    )
    print(f"prompt    {task.render(given)}")
    print("model     ", end="", flush=True)
    answer = []
    for token in written:
        answer.append(int(token))
        print(task.render(answer[-1:]), end=" ", flush=True)
    verdict = "right" if task.render(answer) == expected else "wrong"
    print(f"\nexpected  {expected}\n{verdict}")


@app.command
def models() -> None:
    """List the named sizes: layers, width, heads, and parameters as a Memory Mosaic and as a transformer."""
    table = Table("name", "layers", "width", "heads", "mosaic", "transformer", "for", box=box.SIMPLE_HEAD, show_edge=False)
    for name, size in ZOO.items():
        counts = []
        for architecture in ("mosaic", "transformer"):
            with torch.device("meta"):
                counts.append(f"{count_parameters(build(size.configure(architecture=architecture))):,}")
        table.add_row(name, str(size.layers), str(size.width), str(size.heads), *counts, size.origin)
    console().print(table)


# -- configs -------------------------------------------------------------------------------------


def _configure(task: str, kernel: str, preset: str, seed: int, model: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    """The preset with what was asked for in place of its own; what is None stays."""
    parse_kernel(kernel)
    if model.get("positions") == "auto":
        model["positions"] = "alibi" if model.get("architecture") == "transformer" else "none"
    given = {"kernel": kernel, **model}
    try:
        return length_gen.vary(
            length_gen.PRESETS[preset](task),
            seed=seed,
            model={name: value for name, value in given.items() if value is not None},
            training={name: value for name, value in training.items() if value is not None},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _variant(task: str, variant: str, preset: str, seed: int, steps: int | None, device: str) -> RunConfig:
    transformer = variant == "transformer"
    model = {"architecture": "transformer" if transformer else "mosaic", "positions": "auto"}
    kernel = "gaussian" if transformer else variant
    return _configure(task, kernel, preset, seed, model, {"steps": steps, "device": device})


def _name(config: RunConfig) -> str:
    """A folder's name for people; nothing is ever read out of it."""
    model = config.model
    variant = "transformer" if model.architecture == "transformer" else re.sub(r"[^A-Za-z0-9.]+", "-", model.kernel).strip("-")
    extras: list[str] = [model.positions] if model.positions != ("alibi" if variant == "transformer" else "none") else []
    extras += [f"as-released-{model.as_released}"] if model.as_released else []
    return "-".join([config.data["task"], variant, *extras, str(config.seed)])


def _split(kernels: str) -> list[str]:
    """Names separated by commas, but not by those inside brackets."""
    names = [name.strip() for name in re.split(r",(?![^()]*\))", kernels) if name.strip()]
    if not names:
        raise UsageError("name at least one kernel, as in --kernels gaussian,sparsemax")
    return names


def _read_lengths(text: str) -> list[int] | None:
    if not text:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"lengths {text!r} do not read as whole numbers separated by commas, as in 64,128,256") from None


# -- work ----------------------------------------------------------------------------------------


def _train(config: RunConfig, folder: Path, *, resume: bool, tensorboard: bool = False) -> None:
    try:
        summary = length_gen.run(config, folder, resume=resume, tensorboard=tensorboard)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if leads():
        validation = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in summary.validation.items())
        print(f"{folder}: step {summary.step}, loss {summary.loss:.4f}{validation}, {summary.seconds:.0f} s", flush=True)


def _finish(config: RunConfig, folder: Path, samples: int, device: str) -> None:
    """Trains and evaluates what is not trained and evaluated yet."""
    started = (folder / "config.json").exists()
    done = checkpoint.exists(folder) and checkpoint.load(folder).step == config.training.steps
    if not done:
        _train(config, folder, resume=started)
    if leads() and (missing := [n for n in length_gen.default_lengths(config) if n not in evaluated(folder, "teacher-forced")]):
        _print_matches(_evaluate(folder, missing, "teacher-forced", samples, device))


def _evaluate(folder: Path, lengths: Sequence[int] | None, mode: Mode, samples: int, device: str) -> list[Match]:
    with _progress() as bar:
        task = bar.add_task("evaluating", total=samples)
        return evaluate_run(
            folder, lengths, mode, samples, device,
            lambda length, done, total: bar.update(task, description=f"length {length}", completed=done, total=total),
        )  # fmt: skip


def _report(runs: Sequence[Path], out: Path, device: str) -> Path:
    from compactattn.report.page import write_report  # matplotlib takes a second: only commands that draw wait for it
    from compactattn.report.runs import load

    try:
        return write_report(load(runs), out, _inspect(runs, device))
    except ValueError as error:
        raise UsageError(str(error)) from error


def _inspect(runs: Sequence[Path], device: str) -> list[Any]:
    """A look into one run of each kernel that still has its weights, on the first test sequence."""
    from compactattn.report.inspection import Inspection

    found: dict[str, Inspection] = {}
    for folder in (path for run in runs for path in [run, *sorted(run.glob("*/"))] if checkpoint.exists(path)):
        config = checkpoint.load_config(folder)
        if config.model.kernel in found or config.model.architecture != "mosaic":
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


def _print_matches(found: Sequence[Match]) -> None:
    table = Table("length", "exact match", "token accuracy", "samples", "mode", box=box.SIMPLE_HEAD, show_edge=False)
    for match in found:
        table.add_row(
            str(match.length), f"{match.exact_match:.3f}", f"{match.token_accuracy:.3f}", str(match.samples), match.mode
        )
    console().print(table)


assert set(TASKS) == set(Task.__args__)  # type: ignore[attr-defined]
