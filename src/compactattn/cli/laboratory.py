"""Commands that train, evaluate, report and generate."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich import box
from rich.table import Table
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from compactattn.cli.app import UsageError, app, console, prepare_folder
from compactattn.cli.work import (
    configure,
    configure_variant,
    evaluate_lengths,
    finish_jobs,
    fit_to_machine,
    has_gpu,
    name_run,
    print_matches,
    print_sweep,
    read_lengths,
    split_kernels,
    train_run,
    write_page,
)
from compactattn.data.sequences import TASKS
from compactattn.evaluation.exact_match import Mode
from compactattn.experiments import length_generalisation as length_gen
from compactattn.experiments.runs import open_run
from compactattn.experiments.sweep import Job
from compactattn.models.generation import generate as generate_tokens
from compactattn.models.language_model import build, count_parameters
from compactattn.models.zoo import ZOO
from compactattn.training import checkpoint
from compactattn.training.distributed import leads

Task = Literal["mqmtar", "sort", "reverse", "copy"]
Preset = Literal["cpu-quick", "gpu-short", "paper"]
assert set(TASKS) == set(Task.__args__)  # type: ignore[attr-defined]
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
            or paper (the published recipe, an hour or so on a fast GPU).
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
        graph: Replay updates as a CUDA graph, faster for small models; by default on a GPU, unless the preset is cpu-quick.
        device: auto, cpu, cuda or cuda:1.
        out: The run's folder; by default runs/length-gen/TASK-KERNEL-SEED.
        evaluate: Test the trained model at the lengths of the paper's table, as multiples of the longest in training.
        tensorboard: Also write TensorBoard files (pip install 'compactattn[track]').
    """
    config = configure(
        task, kernel, preset, seed,
        model={"architecture": model, "positions": positions, "as_released": as_released,
               "layers": layers, "width": width, "heads": heads},
        training={"steps": steps, "batch": batch, "rate": rate, "precision": precision, "accumulation": accumulation,
                  "compile": compile, "graph": graph, "device": device},
    )  # fmt: skip
    folder = out or Path("runs") / length_gen.NAME / name_run(config)
    train_run(config, folder, resume=False, tensorboard=tensorboard)
    if evaluate and leads():
        print_matches(evaluate_lengths(folder, None, "teacher-forced", 1000, device))
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
    if seeds < 1 or jobs < 0 or samples < 1:
        raise UsageError(f"seeds = {seeds} and samples = {samples} must be at least 1, jobs = {jobs} at least 0")
    variants = split_kernels(kernels)
    configs = [configure_variant(task, variant, preset, seed, steps, device) for seed in range(seeds) for variant in variants]
    prepare_folder(out)
    todo = [Job(config, out / name_run(config), samples, device) for config in configs]
    finish_jobs(todo, jobs or (1 if has_gpu(device) else min(len(todo), os.cpu_count() or 1)))
    page = write_page([job.folder for job in todo], out / "report", device)
    print_sweep(todo)
    print(f"\nReport: {page}")


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
    print(f"Open it in a browser; let a model answer with `compactattn generate {last}`.")


@app.command
def resume(run: Positional[Path], evaluate: bool = True, tensorboard: bool = False) -> None:
    """Go on with a run that was stopped; on a CPU the weights are the same to the last bit as if it had not been.

    compactattn resume runs/length-gen/mqmtar-sparsemax-0

    Args:
        run: Folder of the run.
        evaluate: Test the trained model at the lengths of the paper's table.
        tensorboard: Also write TensorBoard files.
    """
    config = checkpoint.load_config(run)
    config = fit_to_machine(config, config.training.device)
    train_run(config, run, resume=True, tensorboard=tensorboard)
    if evaluate and leads():
        print_matches(evaluate_lengths(run, None, "teacher-forced", 1000, config.training.device))


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
        samples: Test sequences at each length. The run keeps the line with the most samples.
        device: auto, cpu or cuda.
    """
    print_matches(evaluate_lengths(run, read_lengths(lengths), mode, samples, device))


@app.command
def report(runs: Positional[tuple[Path, ...]], out: Path = Path("report"), device: str = "auto") -> None:
    """Write one HTML page about runs: tables beside the paper's, curves, and attention from inside.

    compactattn report runs/length-gen --out report

    compactattn report results/length-gen

    Args:
        runs: Folders of runs, folders of such folders, or files of results; those of several experiments share the page.
        out: Folder of the report, made if need be.
        device: Where attention is looked at: auto, cpu or cuda.
    """
    if not runs:
        raise UsageError("name at least one run, as in: compactattn report runs/length-gen/mqmtar-sparsemax-0")
    prepare_folder(out)
    print(write_page(runs, out, device))


@app.command
def generate(
    run: Positional[Path], prompt: str = "", tokens: int = 256, temperature: float = 0.0, seed: int = 0, device: str = "auto"
) -> None:
    """Let a trained model answer a prompt.

    compactattn generate runs/length-gen/mqmtar-sparsemax-0

    compactattn generate runs/length-gen/sort-sparsemax-0 --prompt "7 31 0 7 2"

    compactattn generate demo/mqmtar-sparsemax-0 --prompt "1 2 [1] 3 4 [0] 5 6 [1] 7 8 [0] [2] 5 6 [2] 1 2"

    Args:
        run: Folder of the run.
        prompt: A source in the task's own words, with or without <bos> and <sep>; by default one of the test set.
        tokens: The most to write; the model stops at <eos>.
        temperature: 0 takes the likeliest token, 1 draws as the model believes.
        seed: Of the default prompt, and of the draws.
        device: auto, cpu or cuda.
    """
    if tokens < 1 or temperature < 0:
        raise UsageError(f"tokens = {tokens} must be at least 1, and temperature = {temperature} at least 0")
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
