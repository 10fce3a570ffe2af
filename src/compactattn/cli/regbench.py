"""Commands of RegBench: train and sweep, and the search for a recipe."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from rich import box
from rich.table import Table

from compactattn.cli.app import UsageError, console, parse_kernel, prepare_folder, read_kernel, require_counts, sweep, train
from compactattn.cli.work import (
    Asked,
    Preset,
    Start,
    Voice,
    complain,
    conclude,
    describe_model,
    finish_jobs,
    finish_sweep,
    fit_to_machine,
    has_gpu,
    name_changes,
    name_model,
    note_positions,
    progress,
    read_bandwidth,
    read_numbers,
    train_and_show,
    warn_of_preset,
)
from compactattn.data.regbench import Split
from compactattn.experiments import in_context
from compactattn.experiments.runs import open_run, read_evaluation
from compactattn.experiments.sweep import Job
from compactattn.kernels import split_names
from compactattn.models.config import FORMS, Architecture, Form, Released
from compactattn.models.generation import generate
from compactattn.models.language_model import build, count_parameters
from compactattn.training.config import RunConfig, vary

TITLE = "RegBench"
OPTIONS = ("split",)  # of `evaluate`
TEMPERATURE = 0.0

# -- commands ------------------------------------------------------------------------------------


@train.command(name="regbench")
def train_regbench(
    model: Architecture = "mosaic",
    kernel: str = "gaussian",
    examples: int = 1000,
    preset: Preset = "cpu-quick",
    recipe: str | None = None,
    form: Form | None = None,
    as_released: Released = "",
    bandwidth_start: float | None = None,
    start: Start | None = None,
    seed: int = 0,
    epochs: int | None = None,
    patience: int | None = None,
    rate: float | None = None,
    decay: float | None = None,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    matched: bool = False,
    precision: Literal["fp32", "bf16"] | None = None,
    compile: Literal["none", "parts", "whole"] | None = None,
    graph: bool | None = None,
    device: str = "auto",
    out: Path | None = None,
    evaluate: bool = True,
    tensorboard: bool = False,
) -> None:
    """Train a model to learn regular languages in context, and test it on languages it has never seen.

    compactattn train regbench --model mosaic --kernel biweight --examples 1000

    compactattn train regbench --model mamba --examples 2500 --preset paper --matched

    Each example holds strings of a random automaton of its own: 10 to 19 of up to 49 letters, and 4 to 12 states, as published,
    or with cpu-quick, the default, an easier task: 6 to 10 of up to 12 letters, and 4 to 6 states. The weights of the epoch
    with the lowest validation loss are kept. Ctrl-C saves; `compactattn resume RUN` goes on from there.

    Args:
        model: A Memory Mosaic, a transformer with learned positions, or a recurrent mixer with an MLP (Mamba without).
        kernel: Of a mosaic or a transformer; any of `compactattn kernels`, as in "relumax(r=2)".
        examples: Languages to train on, one example each.
        preset: cpu-quick (easier languages and a smaller model than published, minutes on two cores), gpu-short (the published
            data and models, at most 100 epochs) or paper (at most 200). Both stop before that when --patience is lost.
        recipe: Rate and weight decay of the benchmark (benchmark: 5e-4 and 0.1, as paper and gpu-short have them) or of the
            paper's repository (repository: 1e-4 and 0.01), or a recipe.json of `compactattn sweep regbench --search` in place
            of the preset's size and decay.
        form: Of a recurrent model: that of the benchmark's code, whose Mamba is one bare layer, or our own, residual blocks
            around the mixer of its paper. By default the benchmark's.
        as_released: Weigh keys as a path of the published code does. plain applies β² twice to normalised ReLU and 1-ReLUmax.
            efficient leaves β out of normalised ReLU. It hides the newest key from normalised ReLU, 1-ReLUmax and uniform
            top-k. Other kernels are the paper's on both.
        bandwidth_start: β² = 1/h² of every head of a mosaic before training, as in 0.5; if not given e² = 7.4, as published.
        start: Of the embedding; former is the start of runs from before it was mended, not the published one.
        seed: Of the first weights and of the order of the examples; the languages are the same for every seed.
        epochs: At most; the preset's if not given.
        patience: Epochs without a lower validation loss after which training stops; 0 stands for never. If not given 40 with
            paper, 15 with gpu-short, and 0 with cpu-quick.
        rate: The highest learning rate, if other than the recipe's; a tenth of it is left in the end.
        decay: Weight decay, if other than the recipe's.
        layers: Number of blocks.
        width: Of the model.
        heads: Of each block.
        matched: The sizes that `compactattn models regular` lists in place of the preset's: the depth and the parameters of
            a Memory Mosaic of width 128 for every model, recurrent ones in our own form (Mamba, whose blocks have no MLP,
            has twice the layers).
        precision: bf16 runs matrix products in bfloat16 under autocast.
        compile: torch.compile for what surrounds attention (parts) or for everything (whole).
        graph: Replay updates as a CUDA graph, faster for small models.
        device: auto, cpu, cuda or cuda:1.
        out: The run's folder; by default runs/regbench/MODEL-KERNEL-EXAMPLES-SEED, with other choices after the kernel.
        evaluate: Test the model on the held-out languages.
        tensorboard: Also write TensorBoard files (pip install 'compactattn[track]').
    """
    given: dict[str, Any] = {"layers": layers, "width": width, "heads": heads}
    if matched:
        refuse_sizes(recipe=is_file(recipe), form=form is not None, **{name: n is not None for name, n in given.items()})
    given |= {"as_released": as_released, "beta_squared": read_bandwidth(bandwidth_start), "start": start}
    final_rate = None if rate is None else rate / 10
    training = {"patience": patience, "rate": rate, "final_rate": final_rate, "decay": decay, "precision": precision,
                "compile": compile, "graph": graph, "device": device}  # fmt: skip
    config = configure(model, kernel, examples, preset, seed, epochs, recipe, given, training, matched, form or "")
    folder = out or Path("runs") / in_context.NAME / name_run(config, matched)
    train_and_show(config, folder, VOICE, evaluate=evaluate, tensorboard=tensorboard, preset=preset)


@sweep.command(name="regbench")
def sweep_regbench(
    models: str = "mosaic:gaussian,mosaic:sparsemax,transformer,gla",
    examples: str = "1000",
    seeds: int = 1,
    preset: Preset = "cpu-quick",
    search: bool = False,
    recipe: str | None = None,
    matched: bool = False,
    epochs: int | None = None,
    device: str = "auto",
    jobs: int = 0,
    out: Path = Path("runs/regbench-sweep"),
) -> None:
    """Train every model on every number of examples, test each on unseen languages, and write one report.

    compactattn sweep regbench --models "mosaic:gaussian,mosaic:relumax(r=2),transformer,gla" --examples 1000,2500 --seeds 3

    compactattn sweep regbench --search --models mosaic:gaussian --preset paper --out runs/search

    What is finished is not done again: after Ctrl-C the same command goes on.

    Args:
        models: Names separated by commas: mosaic:KERNEL, transformer, transformer:KERNEL, s4d, h3, gla, retnet, mamba: the
            benchmark's; mamba:own and so on are our own form of the recurrent ones.
        examples: Numbers of training examples separated by commas; the paper's are 1000,2500,5000,10000,20000,40000.
        seeds: How many, counted from 0.
        preset: cpu-quick, gpu-short or paper; see `compactattn train regbench --help`.
        search: Train one model at each point of the paper's search space instead: weight decay, depth, width and heads are 72
            runs, 18 of S4D and H3, which have no heads, and 6 of Mamba, which has one layer. The point with the lowest
            validation loss goes to OUT/recipe.json.
        recipe: Rate and weight decay of every run, benchmark or repository; see `compactattn train regbench --help`. Or a
            recipe.json, for every mosaic of the sweep: chosen for one kernel and reused for the others, as in the paper.
        matched: The sizes that `compactattn models regular` lists in place of the preset's: the depth and the parameters of
            a Memory Mosaic of width 128 for every model, recurrent ones in our own form (Mamba, whose blocks have no MLP,
            has twice the layers).
        epochs: At most; the preset's if not given.
        device: auto, cpu, cuda or cuda:1.
        jobs: Runs side by side; 0 is four on a GPU, so that one compiles or evaluates while others train, and one for each
            core on a CPU.
        out: Folder of the runs; the report goes to its subfolder report.
    """
    require_counts(seeds=(seeds, 1), jobs=(jobs, 0))
    numbers = list(dict.fromkeys(read_numbers(examples, "examples")))
    named = [read_variant(name) for name in split_names(models)]
    once = {(model, str(parse_kernel(kernel)), form): (model, kernel, form) for model, kernel, form in reversed(named)}
    variants = list(once.values())[::-1]
    check_sweep([model for model, *_ in variants], len(numbers), seeds, search, recipe, matched)
    configs = [
        configure(
            model,
            kernel,
            number,
            preset,
            seed,
            epochs,
            None if is_file(recipe) and model != "mosaic" else recipe,
            {},
            {"device": device},
            matched,
            form,
        )
        for seed in range(seeds)
        for number in numbers
        for model, kernel, form in variants
    ]
    if search:
        configs = list(in_context.list_grid(configs[0]))
    prepare_folder(out)
    warn_of_preset(preset, device)
    names = {name_point(config) if search else name_run(config, matched): config for config in configs}  # each once
    todo = [Job(config, out / name, 0, device) for name, config in names.items()]
    jobs = jobs or min(len(todo), 4 if has_gpu(device) else os.cpu_count() or 1)
    if search:
        diverged = finish_jobs(todo, jobs)
        if found := [job for number, job in enumerate(todo) if number not in diverged]:
            print_search(found, out, preset)
            conclude(note_languages(configs[0]))
        complain(diverged, todo)
    else:
        finish_sweep(todo, jobs, out, print_sweep, note_languages(configs[0]))


# -- configs -------------------------------------------------------------------------------------


def configure(
    model: str, kernel: str, examples: int, preset: str, seed: int, epochs: int | None, recipe: str | None,
    given: Mapping[str, Any], training: Mapping[str, Any], matched: bool = False, form: str = "",
) -> RunConfig:  # fmt: skip
    """The preset with the recipe or a mosaic's size, then with what was asked for in place of its own; what is None stays."""
    kernel = read_kernel(kernel)
    if kernel != "gaussian" and model not in in_context.WITH_KERNEL:
        raise UsageError(
            f"a {model} has no kernel, but {kernel!r} is given; only {' and '.join(in_context.WITH_KERNEL)} have one"
        )
    if epochs is not None and epochs < 1:
        raise UsageError(f"epochs = {epochs} must be at least 1")
    try:
        base = fit_to_machine(in_context.PRESETS[preset](model, examples, form), training.get("device") or "auto")
        if epochs is not None:
            steps = epochs * examples // base.training.batch
            base = vary(base, training={"steps": steps, "warmup": steps // 10})
        if recipe is not None and recipe in in_context.RATES:
            base = in_context.choose_rates(base, recipe)
        elif recipe is not None:
            base = in_context.apply_recipe(base, Path(recipe))
        if matched:
            base = in_context.match(base)
        return vary(
            base,
            seed=seed,
            model={"kernel": kernel} | {name: value for name, value in given.items() if value is not None},
            training={name: value for name, value in training.items() if value is not None},
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def is_file(recipe: str | None) -> bool:
    """Whether a recipe is none of the named ones, and so the file of a search."""
    return recipe is not None and recipe not in in_context.RATES


def check_sweep(models: Sequence[str], sizes: int, seeds: int, search: bool, recipe: str | None, matched: bool) -> None:
    """Refuses options of a sweep that do not go together."""
    if not models:
        raise UsageError("name at least one model, as in --models mosaic:gaussian,gla")
    if search and (len(models), sizes, seeds) != (1, 1, 1):
        raise UsageError(
            f"--search is for one model, one number of examples and one seed, but {len(models)}, {sizes} and {seeds}"
            " are asked for; name one, as in --search --models mosaic:gaussian --examples 1000"
        )
    if search and is_file(recipe):
        raise UsageError("--search tries every size and weight decay, which leaves nothing to --recipe; give one of them")
    if search and recipe is not None:
        raise UsageError(f"--search tries every weight decay at the preset's rate, which leaves nothing to --recipe {recipe}")
    if matched:
        refuse_sizes(recipe=is_file(recipe), search=search)
    if is_file(recipe) and "mosaic" not in models:
        raise UsageError(f"--recipe is for the mosaics of a sweep, and {', '.join(models)} are none; leave it out")


def refuse_sizes(**given: bool) -> None:
    """Refuses beside --matched the options that set a size too, each given as name=whether it is there."""
    if found := [f"--{name}" for name, there in given.items() if there]:
        do = "does" if len(found) == 1 else "do"
        raise UsageError(f"--matched sets the size of a model, and so {do} {' and '.join(found)}; leave one out")


def read_variant(name: str) -> tuple[str, str, str]:
    """Model, kernel and form of a name such as "mosaic:sparsemax", "gla" or "mamba:own"."""
    model, _, rest = name.partition(":")
    if model not in in_context.RECIPES:
        raise UsageError(f"model {model!r} is unknown; choose among {', '.join(in_context.RECIPES)}")
    return (model, "gaussian", rest) if rest in FORMS and model in in_context.OWN else (model, rest or "gaussian", "")


def describe(config: RunConfig) -> str:
    size = describe_model(config.model, has_kernel=config.model.architecture in in_context.WITH_KERNEL)
    languages = in_context.Data.of(config).make_languages()
    of = f"{languages.strings[0]} to {languages.strings[1]} strings, {languages.states[0]} to {languages.states[1]} states"
    return f"{size}, {config.data['examples']:,} examples of {of}"


def note_languages(config: RunConfig) -> str:
    """That the languages are not the published ones, and which preset has those; nothing where they are."""
    if not config.data["changes"]:
        return ""
    return (
        "the languages of cpu-quick are easier than the paper's, and no report sets the paper's table beside them; for that"
        " table use --preset paper, or gpu-short for fewer epochs"
    )


def name_run(config: RunConfig, matched: bool = False) -> str:
    """A folder's name for people; nothing is ever read out of it."""
    model = config.model
    kernel = [re.sub(r"[^A-Za-z0-9.]+", "-", model.kernel).strip("-")] if model.architecture in in_context.WITH_KERNEL else []
    form = ["own"] if model.architecture in in_context.OWN and model.form == "own" and not matched else []
    rates = ["repository"] if (config.training.rate, config.training.decay) == in_context.RATES["repository"] else []
    size = [*form, *(["matched"] if matched else []), *rates, *name_changes(model)]
    return "-".join([model.architecture, *kernel, *size, str(config.data["examples"]), str(config.seed)])


def name_point(config: RunConfig) -> str:
    model = config.model
    return f"{name_run(config)}-layers{model.layers}-width{model.width}-heads{model.heads}-decay{config.training.decay:g}"


# -- what they print -----------------------------------------------------------------------------


def evaluate_and_show(folder: Path, device: str, split: Split = "test") -> None:
    """Accuracy and TVD on the held-out languages, printed and kept, beside what needs no training."""
    with progress() as bar:
        task = bar.add_task("evaluating", total=None)
        score = in_context.evaluate_run(
            folder, split, device, lambda done, total: bar.update(task, completed=done, total=total)
        )
    table = Table("positions", "accuracy, %", "TVD, %", "number", box=box.SIMPLE_HEAD, show_edge=False)
    tallies = (("all", score.every), ("not before a separator", score.inside), ("the last of each example", score.last))
    for name, tally in tallies:
        table.add_row(name, f"{100 * tally.accuracy:.1f}", f"{100 * tally.tvd:.1f}", f"{tally.positions:,}")
    row = next(row for row in read_evaluation(folder) if row["split"] == split)
    for known in row["references"]:
        table.add_row(f"all, by {known['name']}", f"{100 * known['accuracy']:.1f}", f"{100 * known['tvd']:.1f}", "")
    console().print(table)


VOICE = Voice(describe, evaluate_and_show, note=note_languages)


def print_sweep(todo: Sequence[Job]) -> None:
    """Accuracy and TVD of every run on the test set."""
    table = Table("model", "examples", "seed", "accuracy, %", "TVD, %", "best epoch", box=box.SIMPLE_HEAD, show_edge=False)
    for job in todo:
        shown = ["–"] * 3
        if row := next((row for row in read_evaluation(job.folder) if row["split"] == "test"), None):
            shown = [f"{100 * row['right'] / row['positions']:.1f}", f"{100 * row['tvd']:.1f}", f"{row['epoch']:.0f}"]
        name = name_model(job.config.model, job.config.model.architecture in in_context.WITH_KERNEL)
        table.add_row(name, f"{job.config.data['examples']:,}", str(job.config.seed), *shown)
    console().print(table)


def print_search(todo: Sequence[Job], out: Path, preset: str) -> None:
    """The points of the search space, the best first, which is also written down."""
    ranked = sorted(todo, key=lambda job: in_context.best_validation(job.folder).loss)
    table = Table("layers", "width", "heads", "decay", "validation loss", "parameters", box=box.SIMPLE_HEAD, show_edge=False)
    for job in ranked:
        model, loss = job.config.model, in_context.best_validation(job.folder).loss
        with torch.device("meta"):
            size = count_parameters(build(model))
        numbers = (str(n) for n in (model.layers, model.width, model.heads, job.config.training.decay))
        table.add_row(*numbers, f"{loss:.4f}", f"{size:,}")
    console().print(table)
    path = out / "recipe.json"
    path.write_text(json.dumps(in_context.write_recipe(ranked[0].config), indent=2) + "\n")
    device = todo[0].device
    same = f"--preset {preset}{'' if device == 'auto' else f' --device {shlex.quote(device)}'}"
    print(f"\nThe best is in {path}; use it with: compactattn sweep regbench {same} --recipe {shlex.quote(str(path))}")


def answer(run: Path, asked: Asked) -> None:
    """Prints strings of a language and how the model goes on; of a test language, also which of its letters are legal."""
    prompt, wish = asked.only_prompt(TITLE), asked.wish
    trained = open_run(run, asked.device)
    try:
        start = in_context.begin(trained.config, prompt, wish.seed)
    except ValueError as error:
        raise UsageError(str(error)) from error
    asked.check_lengths(trained.config, [start.tokens])
    longest = trained.config.model.longest
    if longest and len(start.tokens) > longest:
        raise UsageError(
            f"the prompt has {len(start.tokens)} tokens, but this model learned positions for {longest} only; shorten it"
        )
    tokens = min(wish.tokens, longest - len(start.tokens) + 1) if longest else wish.tokens  # the last one is never read
    print(f"prompt  {start.languages.render(start.tokens)}")
    print("model   ", end="", flush=True)
    said = []
    for token in generate(trained.model, [start.tokens], tokens, **asdict(wish.sampling), seed=wish.seed):
        said.append(int(token))
        print(start.languages.render(said[-1:]), end="", flush=True)
    legal = start.judge(said)
    if legal:
        print(f"\nlegal   {''.join('+' if right else '-' for right in legal)}", end="")
        print("  no string of the language goes on so" if not legal[-1] else "", end="")
    print()
    note_positions(len(said), wish.tokens, longest)
