"""Commands of length generalisation: train and sweep, and the demo."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from compactattn.cli.app import UsageError, app, console, prepare_folder, read_kernel, require_counts, sweep, train
from compactattn.cli.work import (
    Asked,
    Preset,
    Start,
    Voice,
    describe_model,
    finish_sweep,
    fit_to_machine,
    has_gpu,
    name_changes,
    progress,
    read_bandwidth,
    read_numbers,
    split_kernels,
    train_and_show,
    warn_of_preset,
)
from compactattn.data.sequences import TASKS
from compactattn.evaluation.exact_match import MODES, Match, Mode
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.length_generalisation import default_lengths, evaluate_run
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.experiments.sweep import Job
from compactattn.models.config import Released
from compactattn.models.generation import generate
from compactattn.training.config import RunConfig, vary

TITLE = "length generalisation"
OPTIONS = ("lengths", "mode", "samples")  # of `evaluate`
TEMPERATURE = 0.0
Task = Literal["mqmtar", "sort", "reverse", "copy"]
assert set(TASKS) == set(Task.__args__)  # type: ignore[attr-defined]

# -- commands ------------------------------------------------------------------------------------


@train.command(name="length-gen")
def train_length_gen(
    task: Task = "mqmtar",
    kernel: str = "sparsemax",
    preset: Preset = "cpu-quick",
    model: Literal["mosaic", "transformer"] = "mosaic",
    positions: Literal["auto", "none", "alibi", "learned"] = "auto",
    as_released: Released = "",
    bandwidth_start: float | None = None,
    start: Start | None = None,
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    accumulation: int | None = None,
    compile: Literal["none", "parts", "whole"] | None = None,
    graph: bool | None = None,
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
            or paper (the published recipe, about two hours on a fast GPU).
        model: A Memory Mosaic, or a GPT-2 transformer.
        positions: auto is none for a mosaic and alibi for a transformer, as in the paper.
        as_released: Weigh keys as a path of the published code does. plain applies β² twice to normalised ReLU and 1-ReLUmax.
            efficient leaves β out of normalised ReLU. It hides the newest key from normalised ReLU, 1-ReLUmax and uniform
            top-k. Other kernels are the paper's on both.
        bandwidth_start: β² = 1/h² of every head before training, as in 0.5; if not given e² = 7.4, as published. A wide start
            helps normalised ReLU, which sends no gradient where no key is within h.
        start: Of the embedding; former is the start of runs from before it was mended, not the published one.
        seed: Of the first weights and of the data.
        steps: Updates of the weights, if other than the preset's; the cosine then ends with them.
        batch: Samples in an update, over all processes.
        rate: The highest learning rate.
        layers: Number of blocks.
        width: Of the model.
        heads: Of each block.
        precision: bf16 runs matrix products in bfloat16 under autocast.
        accumulation: Micro-batches in an update.
        compile: torch.compile for what surrounds attention (parts, seconds) or for everything (whole, minutes).
        graph: Replay updates as a CUDA graph, faster for small models; by default on a GPU, unless the preset is cpu-quick.
        device: auto, cpu, cuda or cuda:1.
        out: The run's folder; by default runs/length-gen/TASK-KERNEL-SEED.
        evaluate: Test the trained model at the lengths of the paper's table, as multiples of the longest in training.
        tensorboard: Also write TensorBoard files (pip install 'compactattn[track]').
    """
    config = configure(
        task, kernel, preset, seed,
        model={"architecture": model, "positions": positions, "as_released": as_released,
               "beta_squared": read_bandwidth(bandwidth_start), "start": start,
               "layers": layers, "width": width, "heads": heads},
        training={"steps": steps, "batch": batch, "rate": rate, "precision": precision, "accumulation": accumulation,
                  "compile": compile, "graph": graph, "device": device},
    )  # fmt: skip
    folder = out or Path("runs") / length_gen.NAME / name_run(config)
    train_and_show(config, folder, VOICE, evaluate=evaluate, tensorboard=tensorboard, preset=preset)


@sweep.command(name="length-gen")
def sweep_length_gen(
    task: Task = "mqmtar",
    kernels: str = "gaussian,sparsemax,entmax43,relumax",
    seeds: int = 1,
    preset: Preset = "cpu-quick",
    steps: int | None = None,
    device: str = "auto",
    samples: int = 1000,
    jobs: int = 0,
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
        jobs: Runs side by side; 0 is one on a GPU and one for each core on a CPU, where small models gain little from threads.
        out: Folder of the runs; the report goes to its subfolder report.
    """
    require_counts(seeds=(seeds, 1), samples=(samples, 1), jobs=(jobs, 0))
    variants = split_kernels(kernels)
    configs = [configure_variant(task, variant, preset, seed, steps, device) for seed in range(seeds) for variant in variants]
    prepare_folder(out)
    warn_of_preset(preset, device)
    todo = [Job(config, out / name_run(config), samples, device) for config in configs]
    finish_sweep(todo, jobs or (1 if has_gpu(device) else min(len(todo), os.cpu_count() or 1)), out, print_sweep)


@app.command
def demo(out: Path = Path("demo"), kernels: str = "gaussian,sparsemax,biweight") -> None:
    """Train small Memory Mosaics that differ in their kernel alone, and see which ones extrapolate.

    Associative recall on sources of at most 32 tokens, tested on up to 16 times as many. Some minutes on two CPU cores.

    Args:
        out: Folder of the runs and of the report, made if need be.
        kernels: Names separated by commas; see `compactattn kernels`.
    """
    names = split_kernels(kernels)
    print(f"Associative recall: {len(names)} small models learn on sources of 16 to 32 tokens and are tested on longer ones.")
    sweep_length_gen(kernels=kernels, device="cpu", samples=500, jobs=len(names), out=out)
    last = out / name_run(configure_variant("mqmtar", names[-1]))
    print(f"Open it in a browser; let a model answer with `compactattn generate {shlex.quote(str(last))}`.")


# -- what they do ---------------------------------------------------------------------------------


def configure(task: str, kernel: str, preset: str, seed: int, model: dict[str, Any], training: dict[str, Any]) -> RunConfig:
    """The preset with what was asked for in place of its own; what is None stays."""
    kernel = read_kernel(kernel)
    if model.get("positions") == "auto":
        model["positions"] = "alibi" if model.get("architecture") == "transformer" else "none"
    given = {"kernel": kernel, **model}
    try:
        base = fit_to_machine(length_gen.PRESETS[preset](task), training.get("device") or "auto")
        if model.get("positions") == "learned":
            data, furthest = length_gen.Data.of(base), max(default_lengths(base))
            given["longest"] = data.make_task().prompt_length(furthest) + data.make_task().answer_length(furthest)
        return vary(
            base,
            seed=seed,
            model={name: value for name, value in given.items() if value is not None},
            training={name: value for name, value in training.items() if value is not None},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


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
    extras += name_changes(model)
    return "-".join([config.data["task"], variant, *extras, str(config.seed)])


def describe(config: RunConfig) -> str:
    return f"{describe_model(config.model)}, {config.data['task']}"


def evaluate_lengths(folder: Path, lengths: Sequence[int] | None, mode: Mode, samples: int, device: str) -> list[Match]:
    with progress() as bar:
        task = bar.add_task("evaluating", total=samples)
        return evaluate_run(
            folder, lengths, mode, samples, device,
            lambda length, done, total: bar.update(task, description=f"length {length}", completed=done, total=total),
        )  # fmt: skip


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
        rows = {row["length"]: row for row in read_evaluation(job.folder) if row["mode"] == MODES[0]}
        shares = (f"{rows[n]['exact'] / rows[n]['samples']:.2f}" if n in rows else "–" for n in lengths)
        table.add_row(job.folder.name, *shares)
    console().print(table)


def evaluate_and_show(folder: Path, device: str, lengths: str = "", mode: Mode = MODES[0], samples: int = 1000) -> None:
    """Exact match at some lengths, or those of the paper's table, printed and kept."""
    numbers = read_numbers(lengths, "lengths") if lengths else None
    print_matches(evaluate_lengths(folder, numbers, mode, samples, device))


VOICE = Voice(describe, evaluate_and_show)


def answer(run: Path, asked: Asked) -> None:
    """Prints a prompt, what the model makes of it as it comes, and what is right."""
    prompt, wish = asked.only_prompt(TITLE), asked.wish
    trained = open_run(run, asked.device)
    data = length_gen.Data.of(trained.config)
    task = data.make_task()
    try:
        if prompt:
            given = task.read_prompt(prompt)
        else:
            given = task.split(length_gen.open_test_set(trained.config, data.longest).tokens(wish.seed, 1)[0])[0]
        asked.check_lengths(trained.config, [given])
        expected = task.render(task.solve(given))
    except ValueError as error:
        raise UsageError(str(error)) from error
    written = generate(trained.model, [given], wish.tokens, **asdict(wish.sampling), stop=task.eos, seed=wish.seed)
    print(f"prompt    {task.render(given)}")
    print("model     ", end="", flush=True)
    said = []
    for token in written:
        said.append(int(token))
        print(task.render(said[-1:]), end=" ", flush=True)
    verdict = "right" if task.render(said) == expected else "wrong"
    print(f"\nexpected  {expected}\n{verdict}")
