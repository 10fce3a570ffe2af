"""Commands for a run of any experiment: resume, evaluate, report, generate; and the list of models."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich import box
from rich.table import Table
from tyro.conf import Positional

from compactattn.cli import length_gen, lm, regbench
from compactattn.cli.app import UsageError, app, console, require_counts, require_text
from compactattn.cli.work import Asked, fit_to_machine, show_run, train_and_show, write_page
from compactattn.data.sources import TextFile
from compactattn.evaluation.exact_match import MODES, Mode
from compactattn.experiments import in_context, language_modelling, length_generalisation
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.runs import read_evaluation, read_failure
from compactattn.experiments.storytelling import Wish
from compactattn.models.config import ARCHITECTURES
from compactattn.models.generation import Sampling
from compactattn.models.language_model import build, count_parameters
from compactattn.models.zoo import ZOO
from compactattn.training import checkpoint
from compactattn.training.checks import is_trained
from compactattn.training.distributed import choose_device, leads

Lengths = Annotated[str, tyro.conf.arg(metavar="N,N,...")]
COMMANDS: Mapping[str, Any] = {length_generalisation.NAME: length_gen, in_context.NAME: regbench, language_modelling.NAME: lm}


@app.command
def resume(run: Positional[Path], evaluate: bool = True, tensorboard: bool = False) -> None:
    """Go on with a run that was stopped; on a CPU the weights are the same to the last bit as if it had not been.

    compactattn resume runs/length-gen/mqmtar-sparsemax-0

    Args:
        run: Folder of the run.
        evaluate: Test the trained model as `train` does.
        tensorboard: Also write TensorBoard files.
    """
    config, voice = checkpoint.load_config(run), _commands_of(run).VOICE
    if not is_trained(run, config):
        config = fit_to_machine(config, config.training.device)
        train_and_show(config, run, voice, resume=True, evaluate=evaluate, tensorboard=tensorboard)
    elif leads():
        print(f"{run} is complete at step {checkpoint.step_of(run)}: there is nothing left to train", flush=True)
        if evaluate and not read_evaluation(run):
            show_run(config, run, voice)


@app.command
def evaluate(
    run: Positional[Path],
    data: str = "",
    by_position: bool = False,
    lengths: Lengths = "",
    mode: Mode = MODES[0],
    samples: int = 1000,
    split: Literal["test", "validation"] = "test",
    device: str = "auto",
) -> None:
    """Test a trained model: on a text, on sequences of given lengths, or on the held-out languages of RegBench.

    compactattn evaluate runs/lm/demo-stories-mosaic-triweight-2-0 --data other-text.txt --by-position

    compactattn evaluate runs/length-gen/mqmtar-sparsemax-0 --lengths 64,128,256,512 --mode free-running

    compactattn evaluate runs/regbench/mosaic-biweight-1000-0

    Where a run has validated by loss, the weights of its lowest one are tested, else, or with --keep last, those of its last
    step.

    Args:
        run: Folder of the run. Data and by-position are for language modelling, lengths and mode for length generalisation,
            samples for both, split is for RegBench.
        data: A prepared corpus, all of whose documents are read; its name, if it lies in data/ or beside the run's own; or a
            text file (.txt, .jsonl, .gz of both), read with the run's tokenizer. By default, and for the run's own corpus,
            the validation split. Other text that the run was trained on is refused: the same file, or documents that begin
            as those of training do.
        by_position: Also show the loss against the position in the window.
        lengths: Source lengths separated by commas; by default those of the paper's table.
        mode: teacher-forced, as published (each token is judged given the true ones before it), or free-running (the model
            goes on from its own tokens).
        samples: Test sequences at each length, or windows of text at most. The run keeps the line with the most samples.
        split: Which of the languages that were held out.
        device: auto, cpu or cuda.
    """
    choose_device(device)
    usual = {"data": "", "by_position": False, "lengths": "", "mode": MODES[0], "samples": 1000, "split": "test"}
    given = {"data": data, "by_position": by_position, "lengths": lengths, "mode": mode, "samples": samples, "split": split}
    commands = _commands_of(run)
    for name, value in given.items():
        if value != usual[name] and name not in commands.OPTIONS:
            owners = " and ".join(other.TITLE for other in COMMANDS.values() if name in other.OPTIONS)
            raise UsageError(f"--{name.replace('_', '-')} is for {owners}, and {run} is a run of {commands.TITLE}")
    _note_unfinished(run)
    commands.evaluate_and_show(run, device, **{name: given[name] for name in commands.OPTIONS})


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
    run: Positional[Path],
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = (),
    prompts_file: Path | None = None,
    tokens: int = 256,
    longest_prompt: int | None = None,
    temperature: float | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    samples: int = 1,
    stop: bool = True,
    seed: int = 0,
    save: bool = False,
    device: str = "auto",
) -> None:
    """Let a trained model answer a prompt, or go on with a story.

    compactattn generate runs/lm/demo-stories-mosaic-triweight-2-0 --prompt "Once upon a time" --tokens 200 --temperature 0.8

    compactattn generate runs/length-gen/sort-sparsemax-0 --prompt "7 31 0 7 2"

    compactattn generate demo/mqmtar-sparsemax-0 --prompt "1 2 [1] 3 4 [0] 5 6 [1] 7 8 [0] [2] 5 6 [2] 1 2"

    compactattn generate runs/regbench/mosaic-biweight-1000-0 --prompt "cafca|caf|ch" --tokens 20 --temperature 1

    Args:
        run: Folder of the run. Several prompts, samples, stop and save are for language modelling.
        prompt: The beginning of a story, a source in the task's own words, with or without <bos> and <sep>, or strings of a
            regular language; by default a new story, or one of the test set. Given several times, all are answered at once.
        prompts_file: A prompt in each line, beside those given.
        tokens: The most to write; the model stops at <eos>, where its task has one, or at the end of a story.
        longest_prompt: Tokens of a prompt, at most: a longer one is refused. By default 64 times the length of training, as far
            as the paper tests, or what learned positions are for. The time before the first token grows with it.
        temperature: 0 takes the likeliest token, 1 draws as the model believes; by default 0.8 for stories, else 0.
        top_k: Draw from the k likeliest tokens; 0 stands for all.
        top_p: Draw from the likeliest tokens that make up this share of the probability.
        min_p: Draw from tokens at least this likely, as a share of the likeliest one's probability.
        samples: Stories from each prompt.
        stop: Stop at the end of the story.
        seed: Of the default prompt, and of the draws.
        save: Keep the stories in RUN/stories.jsonl, for the report.
        device: auto, cpu or cuda.
    """
    require_counts(
        tokens=(tokens, 1), samples=(samples, 1), longest_prompt=(1 if longest_prompt is None else longest_prompt, 1)
    )
    for given in prompt:
        require_text("--prompt", given)
    try:
        sampling = Sampling(temperature or 0.0, top_k, top_p, min_p)
        prompts = (*prompt, *read_prompts(prompts_file))
        commands = _commands_of(run)
        if temperature is None:
            sampling = replace(sampling, temperature=commands.TEMPERATURE)
        _note_unfinished(run)
        commands.answer(run, Asked(prompts, Wish(tokens, sampling, seed, stop), device, samples, save, longest_prompt))
    except ValueError as error:  # as where learned positions come to their end
        raise UsageError(str(error)) from error


def read_prompts(path: Path | None) -> list[str]:
    """The lines of a text file that are not blank; a ValueError says why there are none."""
    if path is None:
        return []
    source = TextFile(path)
    lines = [line for block in source.blocks() for text in source.documents(block) for line in text.splitlines()]
    if not (prompts := [line for line in lines if line.strip()]):
        raise ValueError(f"there is no prompt in {str(path)!r}; write one in each line")
    return prompts


def _note_unfinished(run: Path) -> None:
    """Says so on stderr where a run has not come to its end, though it could."""
    config = checkpoint.load_config(run)
    if checkpoint.exists(run) and not is_trained(run, config) and not read_failure(run):
        done, go_on = f"{checkpoint.step_of(run):,} of {config.training.steps:,}", f"compactattn resume {shlex.quote(str(run))}"
        print(f"compactattn: {run} has come to step {done}; it goes on with {go_on}", file=sys.stderr)


def _commands_of(run: Path) -> Any:
    """The module with the commands of the run's experiment."""
    return COMMANDS[experiment_of(checkpoint.load_config(run)).NAME]


@app.command
def models(name: Positional[str] = "") -> None:
    """List the named sizes: layers, width, heads, and parameters as a Memory Mosaic and as a transformer.

    compactattn models regular

    Args:
        name: Of a size, to see the parameters of every architecture there. Mamba has two layers for each of the others',
            which have an MLP. The transformer of regular learns positions, as RegBench's does.
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
