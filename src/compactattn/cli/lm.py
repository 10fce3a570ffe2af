"""Commands of language modelling: train and sweep, and what evaluate and generate do for it."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.table import Table

from compactattn.cli.app import UsageError, console, prepare_folder, read_kernel, require_counts, sweep, train
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
    note_positions,
    progress,
    read_bandwidth,
    split_kernels,
    train_and_show,
    warn_of_preset,
)
from compactattn.data import grammar
from compactattn.data.corpus import Corpus
from compactattn.data.meta import META, VERSION
from compactattn.data.preparation import prepare
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import load_tokenizer
from compactattn.experiments import language_modelling
from compactattn.experiments.language_modelling import OWN, Data, Model
from compactattn.experiments.runs import read_evaluation
from compactattn.experiments.storytelling import SAMPLING, Teller, save_stories
from compactattn.experiments.sweep import Job
from compactattn.folders import cache_folder
from compactattn.models.config import Released, own_output
from compactattn.training.config import RunConfig
from compactattn.training.distributed import choose_device, leads

TITLE = "language modelling"
OPTIONS = ("data", "by_position", "samples")  # of `evaluate`
TEMPERATURE = SAMPLING.temperature
KERNELS: Mapping[Model, str] = {"mosaic": "triweight", "transformer": "gaussian"}  # where none is given
DEMO_STORIES = 20_000
WORDS = 4  # of a prompt to try
STRETCHES, COLUMNS = 16, 40  # of a curve in the terminal
# an untrained model writes any byte, and a terminal obeys some of them
HARMLESS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

# -- commands ------------------------------------------------------------------------------------


@train.command(name="lm")
def train_lm(
    data: Path | None = None,
    kernel: str | None = None,
    layers: int | None = None,
    preset: Preset = "cpu-quick",
    model: Model = "mosaic",
    seed: int = 0,
    steps: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    rate: float | None = None,
    final_rate: float | None = None,
    dropout: float | None = None,
    width: int | None = None,
    heads: int | None = None,
    output: Literal["scaled", "plain"] | None = None,
    fast_embedding: bool = False,
    as_released: Released = "",
    bandwidth_start: float | None = None,
    start: Start | None = None,
    keep: Literal["best", "last"] | None = None,
    precision: Literal["fp32", "bf16"] | None = None,
    accumulation: int | None = None,
    compile: Literal["none", "parts", "whole"] | None = None,
    graph: bool | None = None,
    device: str = "auto",
    out: Path | None = None,
    evaluate: bool = True,
    tensorboard: bool = False,
) -> None:
    """Train a model on text, to foretell each next token.

    compactattn train lm                       a small model on built-in stories, minutes on two CPU cores

    compactattn train lm --kernel triweight --layers 8 --data data/stories --preset gpu-short

    torchrun --nproc-per-node 8 -m compactattn train lm --data data/babistories --layers 12 --preset paper

    The weights of the lowest validation loss are tested, or with --preset paper those of the last step, unless told otherwise.
    Ctrl-C saves; `compactattn resume RUN` goes on from there.

    Args:
        data: A corpus that `compactattn data` has prepared; by default the built-in stories, prepared on the fly.
        kernel: Any kernel of `compactattn kernels`, as in "relumax(r=2)"; by default triweight, or gaussian for a transformer.
        layers: Number of blocks: 2 for cpu-quick and 8 for the others, if not given. The paper has 1, 8 and 12.
        preset: cpu-quick (width 128, windows of 128 tokens, plain output), gpu-short (the published model, 2,000 steps of 32
            windows) or paper (80,000 steps of 512 windows).
        model: A Memory Mosaic, or a GPT-2 transformer of that depth and width with learned positions.
        seed: Of the first weights and of the windows.
        steps: Updates of the weights, if other than the preset's; the warm-up is at most a tenth of them.
        batch: Windows in an update, over all processes.
        length: Tokens of a window.
        rate: The highest learning rate; by default that of the paper for this depth and kernel, or 5e-3 for cpu-quick.
        final_rate: The learning rate of the last step; by default the paper's too, or 5e-4 for cpu-quick.
        dropout: Of the weights of attention and of persistent memory, and of what each block adds; 0.05 if not given, 0 for
            cpu-quick.
        width: Of the model.
        heads: Of each block.
        output: Logits divided by √width and an embedding that starts as N(0, 1/width), as in Memory Mosaics (scaled), or
            logits as they are and N(0, 0.02²), as in GPT-2 (plain); by default plain for cpu-quick, whose few steps are too few
            for the other, else the model's own.
        fast_embedding: Train the tied embedding at √width times the rate, which makes up for the division of the logits of a
            scaled output.
        as_released: Weigh keys as a path of the published code does. plain applies β² twice to normalised ReLU and 1-ReLUmax.
            efficient leaves β out of normalised ReLU. It hides the newest key from normalised ReLU, 1-ReLUmax and uniform
            top-k. Other kernels are the paper's on both.
        bandwidth_start: β² = 1/h² of every head of a mosaic before training, as in 0.5; if not given e² = 7.4, as published.
        start: Of the embedding; former is the start of runs from before it was mended, not the published one.
        keep: Which weights are tested and tell stories: those of the lowest validation loss (best), or of the last step (last,
            as in the paper); by default last for paper, best for the other presets.
        precision: bf16 runs matrix products in bfloat16 under autocast, as all presets but cpu-quick do.
        accumulation: Micro-batches in an update, on each process; by default the fewest that hold at most 32 windows each.
        compile: torch.compile for what surrounds attention (parts) or for everything (whole); by default parts on a GPU, but
            none for cpu-quick and under torchrun.
        graph: Replay updates as a CUDA graph, as gpu-short does; for one process and one micro-batch.
        device: auto, cpu, cuda or cuda:1.
        out: The run's folder; by default runs/lm/CORPUS-MODEL-KERNEL-LAYERS-SEED, with other choices after the kernel.
        evaluate: Test the model on the validation split.
        tensorboard: Also write TensorBoard files (pip install 'compactattn[track]').
    """
    given = {"width": width, "heads": heads, "output": output, "as_released": as_released, "start": start,
             "beta_squared": read_bandwidth(bandwidth_start),
             **({} if dropout is None else language_modelling.drop(dropout, model))}  # fmt: skip
    training = {"steps": steps, "batch": batch, "rate": rate, "final_rate": final_rate, "keep": keep, "precision": precision,
                "accumulation": accumulation, "compile": compile, "graph": graph, "device": device}  # fmt: skip
    counts = {"layers": layers, "steps": steps, "batch": batch, "length": length, "width": width, "heads": heads}
    require_counts(**{name: (count, 1) for name, count in counts.items() if count is not None})
    choose_device(device)  # before stories are prepared
    kernel = read_kernel(KERNELS[model] if kernel is None else kernel)
    config = configure(open_corpus(data), preset, model, kernel, layers, seed, length, given, training)
    if fast_embedding:
        try:
            config = language_modelling.hasten_embedding(config)
        except ValueError as error:
            raise UsageError(f"--fast-embedding: {error}") from error
    folder = out or Path("runs") / language_modelling.NAME / name_run(config, output)
    train_and_show(config, folder, VOICE, evaluate=evaluate, tensorboard=tensorboard, preset=preset)


@sweep.command(name="lm")
def sweep_lm(
    data: Path | None = None,
    kernels: str = "gaussian,sparsemax,triweight,relumax",
    layers: int | None = None,
    seeds: int = 1,
    preset: Preset = "cpu-quick",
    steps: int | None = None,
    output: Literal["scaled", "plain"] | None = None,
    ood: str = "",
    device: str = "auto",
    samples: int = 1000,
    jobs: int = 0,
    out: Path = Path("runs/lm-sweep"),
) -> None:
    """Train a model for every kernel and seed on the same text, and write one report.

    compactattn sweep lm --kernels "gaussian,triweight,relumax(r=2),transformer"

    compactattn sweep lm --data data/stories --ood simplewiki=data/simplewiki,book.txt

    What is finished is not done again: after Ctrl-C the same command goes on. "transformer" among the kernels is the GPT-2
    transformer with learned positions.

    Args:
        data: A corpus that `compactattn data` has prepared; by default the built-in stories, prepared on the fly.
        kernels: Names separated by commas.
        layers: Number of blocks; see `compactattn train lm --help`.
        seeds: How many, counted from 0.
        preset: cpu-quick, gpu-short or paper; see `compactattn train lm --help`.
        steps: Updates of the weights, if other than the preset's.
        output: Of every model: scaled, as in Memory Mosaics, or plain, as in GPT-2; by default plain for cpu-quick, else each
            model's own.
        ood: Other texts that each model is tested on, out of its distribution: prepared corpora or text files, separated by
            commas, each with a name of your own before "=" if you like.
        device: auto, cpu, cuda or cuda:1.
        samples: Windows of the validation split, and of each other text, that each model is tested on, at most.
        jobs: Runs side by side; 0 is one on a GPU and one for each core on a CPU.
        out: Folder of the runs; the report goes to its subfolder report.
    """
    require_counts(seeds=(seeds, 1), samples=(samples, 1), jobs=(jobs, 0))
    choose_device(device)
    variants, corpus = split_kernels(kernels), open_corpus(data)
    configs = [
        configure(
            corpus, preset, *read_variant(variant), layers, seed, None, {"output": output}, {"steps": steps, "device": device}
        )
        for seed in range(seeds)
        for variant in variants
    ]
    try:
        texts = language_modelling.read_texts(ood, Data.of(configs[0]))
    except ValueError as error:
        raise UsageError(f"--ood {error}") from error
    evaluate = partial(language_modelling.complete_evaluation, texts=texts)
    prepare_folder(out)
    warn_of_preset(preset, device)
    todo = [Job(config, out / name_run(config, output), samples, device, evaluate) for config in configs]
    finish_sweep(todo, jobs or (1 if has_gpu(device) else min(len(todo), os.cpu_count() or 1)), out, print_sweep)


# -- configs -------------------------------------------------------------------------------------


def open_corpus(folder: Path | None) -> Corpus:
    """A prepared corpus, or the built-in stories, which take a second."""
    try:
        return Corpus.open(prepare_demo() if folder is None else folder)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def prepare_demo() -> Path:
    """Where the built-in stories are. Those of another version lie elsewhere, where the runs that learnt them find them."""
    folder = cache_folder() / f"stories-{VERSION}.{grammar.VERSION}-{DEMO_STORIES}" / "demo-stories"
    if not (folder / META).is_file():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("several processes need a corpus that is there already; prepare one and name it with --data")
        print(f"No --data: {DEMO_STORIES:,} built-in stories go to {folder}.", flush=True)
        prepare([Stories(DEMO_STORIES)], load_tokenizer("bytes"), folder)
    elif leads():
        print(f"No --data: the built-in stories in {folder}.", flush=True)
    return folder


def configure(
    corpus: Corpus, preset: str, model: str, kernel: str, layers: int | None, seed: int, length: int | None,
    given: Mapping[str, Any], training: Mapping[str, Any],
) -> RunConfig:  # fmt: skip
    """The preset with what was asked for in place of its own; what is None stays."""
    kernel = read_kernel(kernel)
    asked = {name: value for name, value in training.items() if value is not None}
    size = {name: value for name, value in given.items() if value is not None}
    depth = {} if layers is None else {"layers": layers}
    windows = {} if length is None else {"length": length}
    try:
        config = language_modelling.PRESETS[preset](corpus, model, kernel, **depth, **windows)
        config = fit_to_machine(config, asked.get("device", "auto"))
        return language_modelling.adjust(config, seed=seed, model=size, training=asked)
    except ValueError as error:
        raise UsageError(str(error)) from error


def read_variant(name: str) -> tuple[str, str]:
    """Model and kernel of a name such as "sparsemax" or "transformer"."""
    return ("transformer", KERNELS["transformer"]) if name == "transformer" else ("mosaic", name)


def choose_prompt(config: RunConfig) -> str:
    """The first words of the first document that was held out."""
    _, pieces = language_modelling.example(config)
    return " ".join("".join(pieces).split()[:WORDS])


def describe(config: RunConfig) -> str:
    data, model = config.data, config.model
    scaled = "scaled" if model.scales_output else "plain"
    output = "" if scaled == own_output(model.architecture) else f", {scaled} output"
    return f"{describe_model(model)}{output}, windows of {data['length']} tokens ({data['tokenizer']}) of {data['corpus']}"


def name_run(config: RunConfig, output: str | None) -> str:
    """A folder's name for people, with what was asked for beside the kernel; nothing is ever read out of it."""
    model = config.model
    kernel = re.sub(r"[^A-Za-z0-9.]+", "-", model.kernel).strip("-")
    asked = [*([output] if output else []), *name_changes(model)]
    asked += ["fast-embedding"] if config.training.embedding_rate != 1 else []
    return "-".join([config.data["corpus"], model.architecture, kernel, *asked, str(model.layers), str(config.seed)])


# -- what they print -----------------------------------------------------------------------------


def evaluate_and_show(folder: Path, device: str, data: str = "", by_position: bool = False, samples: int = 1000) -> None:
    """The loss on a text, printed and kept."""
    require_counts(samples=(samples, 1))
    with progress() as bar:
        task = bar.add_task("evaluating", total=None)
        row = language_modelling.evaluate_run(
            folder, data, samples, device, lambda done, total: bar.update(task, completed=done, total=total)
        )
    table = Table(
        "text", "loss, nats", "perplexity", "bits per byte", "tokens", "windows", box=box.SIMPLE_HEAD, show_edge=False
    )
    counts = f"{row['tokens']:,}", f"{row['samples']:,}"
    table.add_row(row["split"], f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.4f}", *counts)
    console().print(table)
    if data and row["split"] == OWN:
        print(f"\n{data} is the corpus of the run, which is judged on the documents that were held out.")
    if by_position:
        print()
        console().print(tabulate_positions(row["by_position"]))


VOICE = Voice(describe, evaluate_and_show, choose_prompt)


def tabulate_positions(curve: Mapping[str, Sequence[Any]]) -> Table:
    """The curve in few stretches: a dot for each, between the lowest and the highest loss."""
    size = -(-len(curve["loss"]) // STRETCHES)
    found = []
    for first in range(0, len(curve["loss"]), size):
        end = min(first + size, len(curve["loss"]))
        counts, losses = curve["tokens"][first:end], curve["loss"][first:end]
        total = sum(count * loss for count, loss in zip(counts, losses, strict=True) if count)
        found.append((curve["edges"][first] + 1, curve["edges"][end], total / max(sum(counts), 1)))
    low, high = min(loss for *_, loss in found), max(loss for *_, loss in found)
    table = Table("tokens read", "loss, nats", f"{low:.2f} to {high:.2f}", box=box.SIMPLE_HEAD, show_edge=False)
    for start, end, loss in found:
        place = round(COLUMNS * (loss - low) / max(high - low, 1e-9))
        table.add_row(f"{start}–{end}" if end > start else str(end), f"{loss:.3f}", "·" * place + "●")
    return table


def print_sweep(todo: Sequence[Job]) -> None:
    """The loss of every run on the validation split, and on the other texts that it has been tested on."""
    found = [{row["split"]: row for row in read_evaluation(job.folder)} for job in todo]
    others = sorted({name for rows in found for name in rows} - {OWN})
    header = "run", "validation loss", "perplexity", "bits per byte", "best step", *(f"{name} loss" for name in others)
    table = Table(*header, box=box.SIMPLE_HEAD, show_edge=False)
    for job, rows in zip(todo, found, strict=True):
        numbers = ["–"] * 4
        if row := rows.get(OWN):  # a run that diverged has none
            numbers = [f"{row['loss']:.4f}", f"{row['perplexity']:.2f}", f"{row['bits_per_byte']:.4f}", str(row["step"])]
        table.add_row(job.folder.name, *numbers, *(f"{rows[name]['loss']:.4f}" if name in rows else "–" for name in others))
    console().print(table)


def answer(run: Path, asked: Asked) -> None:
    """Writes stories: a single one as it comes, several when all are done. How fast goes to stderr."""
    wish = asked.wish
    if asked.samples > 1 and not wish.sampling.temperature:
        raise UsageError(
            f"temperature = 0 draws nothing, so that all {asked.samples} samples would be the same text; choose another"
            " --temperature, as in 0.8, or leave out --samples"
        )
    teller = Teller.open(run, asked.device)
    prompts = [prompt for prompt in asked.prompts or ("",) for _ in range(asked.samples)]
    asked.check_lengths(teller.trained.config, [teller.tokenizer.encode(prompt) for prompt in prompts])
    began = time.monotonic()
    told = [teller.stream(prompts[0], wish)] if len(prompts) == 1 else teller.tell(prompts, wish)
    lines = []
    for row, (prompt, pieces) in enumerate(zip(prompts, told, strict=True)):
        if len(prompts) > 1:
            print(f"{'' if row == 0 else chr(10)}[{row + 1}/{len(prompts)}]")
        text = ""
        print(prompt, end="", flush=True)
        for piece in pieces:
            text += piece
            print(piece.translate(HARMLESS), end="", flush=True)
        print()
        lines.append(teller.describe(prompt, text, wish, pieces.ended, row))
    count, seconds = sum(len(pieces.tokens) for pieces in told), time.monotonic() - began
    print(f"{count} tokens in {seconds:.1f} s, {count / seconds:.0f} tokens/s", file=sys.stderr)
    cut = [len(pieces.tokens) for pieces in told if not (wish.stop and pieces.ended)]
    note_positions(max(cut, default=wish.tokens), wish.tokens, teller.trained.config.model.longest)
    if asked.save:
        save_stories(run, lines)
