"""Commands for a run of any experiment: resume, evaluate, report, generate; and the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich import box
from rich.table import Table
from tyro.conf import Positional

from compactattn.cli import length_gen, regbench
from compactattn.cli.app import UsageError, app, console, require_counts
from compactattn.cli.work import fit_to_machine, read_numbers, train_run, write_page
from compactattn.evaluation.exact_match import MODES, Mode
from compactattn.experiments import in_context, length_generalisation
from compactattn.experiments.registry import experiment_of
from compactattn.models.config import ARCHITECTURES
from compactattn.models.language_model import build, count_parameters
from compactattn.models.zoo import ZOO
from compactattn.training import checkpoint
from compactattn.training.distributed import choose_device, leads

Lengths = Annotated[str, tyro.conf.arg(metavar="N,N,...")]
COMMANDS: Mapping[str, Any] = {length_generalisation.NAME: length_gen, in_context.NAME: regbench}


@app.command
def resume(run: Positional[Path], evaluate: bool = True, tensorboard: bool = False) -> None:
    """Go on with a run that was stopped; on a CPU the weights are the same to the last bit as if it had not been.

    compactattn resume runs/length-gen/mqmtar-sparsemax-0

    Args:
        run: Folder of the run.
        evaluate: Test the trained model as `train` does.
        tensorboard: Also write TensorBoard files.
    """
    config = checkpoint.load_config(run)
    config = fit_to_machine(config, config.training.device)
    train_run(config, run, resume=True, tensorboard=tensorboard)
    if evaluate and leads():
        _commands_of(run).evaluate_and_show(run, config.training.device)


@app.command
def evaluate(
    run: Positional[Path],
    lengths: Lengths = "",
    mode: Mode = "teacher-forced",
    samples: int = 1000,
    split: Literal["test", "validation"] = "test",
    device: str = "auto",
) -> None:
    """Test a trained model: on sequences of given lengths, or on the held-out languages of RegBench.

    compactattn evaluate runs/length-gen/mqmtar-sparsemax-0 --lengths 64,128,256,512 --mode free-running

    compactattn evaluate runs/regbench/mosaic-biweight-1000-0

    Args:
        run: Folder of the run. Lengths, mode and samples are for length generalisation, split is for RegBench.
        lengths: Source lengths separated by commas; by default those of the paper's table.
        mode: teacher-forced, as published (each token is judged given the true ones before it), or free-running (the model
            goes on from its own tokens).
        samples: Test sequences at each length. The run keeps the line with the most samples.
        split: Which of the languages that were held out.
        device: auto, cpu or cuda.
    """
    choose_device(device)
    if _commands_of(run) is length_gen:
        if split != "test":
            raise UsageError(f"--split is for RegBench, and {run} is a run of length generalisation")
        numbers = read_numbers(lengths, "lengths") if lengths else None
        length_gen.print_matches(length_gen.evaluate_lengths(run, numbers, mode, samples, device))
    elif lengths or mode != MODES[0] or samples != 1000:
        raise UsageError(f"--lengths, --mode and --samples are for length generalisation, and {run} is a run of RegBench")
    else:
        regbench.evaluate_and_show(run, device, split)


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
    print(write_page(runs, out, device))


@app.command
def generate(
    run: Positional[Path], prompt: str = "", tokens: int = 256, temperature: float = 0.0, seed: int = 0, device: str = "auto"
) -> None:
    """Let a trained model answer a prompt.

    compactattn generate runs/length-gen/mqmtar-sparsemax-0

    compactattn generate runs/length-gen/sort-sparsemax-0 --prompt "7 31 0 7 2"

    compactattn generate demo/mqmtar-sparsemax-0 --prompt "1 2 [1] 3 4 [0] 5 6 [1] 7 8 [0] [2] 5 6 [2] 1 2"

    compactattn generate runs/regbench/mosaic-biweight-1000-0 --prompt "cafca|caf|ch" --tokens 20 --temperature 1

    Args:
        run: Folder of the run.
        prompt: A source in the task's own words, with or without <bos> and <sep>, or strings of a regular language; by
            default one of the test set.
        tokens: The most to write; the model stops at <eos>, where its task has one.
        temperature: 0 takes the likeliest token, 1 draws as the model believes.
        seed: Of the default prompt, and of the draws.
        device: auto, cpu or cuda.
    """
    require_counts(tokens=(tokens, 1))
    if not temperature >= 0:
        raise UsageError(f"temperature = {temperature} must be at least 0")
    try:
        _commands_of(run).answer(run, prompt, tokens, temperature, seed, device)
    except ValueError as error:  # as where learned positions come to their end
        raise UsageError(str(error)) from error


def _commands_of(run: Path) -> Any:
    """The module with the commands of the run's experiment."""
    return COMMANDS[experiment_of(checkpoint.load_config(run)).NAME]


@app.command
def models(name: Positional[str] = "") -> None:
    """List the named sizes: layers, width, heads, and parameters as a Memory Mosaic and as a transformer.

    compactattn models regular

    Args:
        name: Of a size, to see the parameters of every architecture there. Mamba has two layers for each of the others',
            which have an MLP; positions come on top where they are learned.
    """
    if name and name not in ZOO:
        raise UsageError(f"size {name!r} is unknown; choose one of {', '.join(ZOO)}")
    if name:
        table = Table("architecture", "layers", "parameters", box=box.SIMPLE_HEAD, show_edge=False)
        for architecture in ARCHITECTURES:
            table.add_row(architecture, str(ZOO[name].configure(architecture=architecture).layers), _count(name, architecture))
    else:
        table = Table("name", "layers", "width", "heads", "mosaic", "transformer", "for", box=box.SIMPLE_HEAD, show_edge=False)
        for name, size in ZOO.items():
            counts = (_count(name, architecture) for architecture in ("mosaic", "transformer"))
            table.add_row(name, str(size.layers), str(size.width), str(size.heads), *counts, size.origin)
    console().print(table)


def _count(size: str, architecture: str) -> str:
    with torch.device("meta"):
        return f"{count_parameters(build(ZOO[size].configure(architecture=architecture))):,}"
