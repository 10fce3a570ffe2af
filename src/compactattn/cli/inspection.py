"""The command that shows attention from inside, token by token."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich import box
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from compactattn.cli.app import UsageError, app, console, require_text
from compactattn.experiments.inspections import INSPECTIONS, check_length, describe, save_inspection
from compactattn.experiments.registry import experiment_of
from compactattn.experiments.runs import open_run
from compactattn.memory.inspection import HeadSummary, Look, Summary, Used, summarise
from compactattn.report.attended import format_weight, name_word
from compactattn.training.distributed import choose_device

MOST = 10  # tokens listed of a head
PAPER, INK = (255, 255, 255), (0, 103, 168)  # behind a token of weight 0 and of weight 1
LIGHT = 0.45  # the shade up to which dark letters read well
NO_BANDWIDTH = "–"


@app.command
def inspect(
    run: Positional[Path],
    text: Annotated[str, tyro.conf.arg(aliases=("--prompt",))] = "",
    layer: int | None = None,
    head: int | None = None,
    position: int | None = None,
    save: bool = False,
    device: str = "auto",
) -> None:
    """Show which past tokens each head really used, how far its kernel reached, and how sparse each layer is.

    compactattn inspect runs/length-gen/mqmtar-sparsemax-0

    compactattn inspect runs/length-gen/sort-sparsemax-0 --text "7 31 0 7 2 <sep> 0 2" --layer 1 --head 3

    compactattn inspect runs/regbench/mosaic-biweight-1000-0 --text "cafca|caf|ch" --position 9

    compactattn inspect runs/lm/demo-stories-mosaic-triweight-2-0 --text "The fox took the red kite" --save

    Layers, heads and positions are numbered from 1. With --save the text comes into `compactattn report RUN` too: every layer
    and head at every position.

    Args:
        run: Folder of the run.
        text: In the task's own words; by default the first of the test set.
        layer: Whose heads to show; by default the last.
        head: One head of the layer, with every token it used; by default all, with the heaviest tokens of each.
        position: Of the token that looks back; by default the last.
        save: Keep what all layers do with the text in RUN/inspections.jsonl, for the report; at most 256 tokens.
        device: auto, cpu or cuda.
    """
    choose_device(device)
    require_text("--text", text)
    trained = open_run(run, device)
    experiment = experiment_of(trained.config)
    try:
        tokens, words = experiment.read(trained.config, text) if text else experiment.example(trained.config)
        model = trained.config.model
        at = _index("position", position, len(words), "tokens")
        shown = _index("layer", layer, model.layers, "layers")
        chosen = None if head is None else _index("head", head, model.heads, "heads")
        if not 0 < model.longest < len(words):  # of learned positions the model itself tells
            check_length(words, save)
        with torch.inference_mode():
            looks: Iterable[Look] = trained.model.looks(torch.tensor([tokens], device=trained.device))
            looks = list(looks) if save else looks
            summary = summarise(looks, words, at)
    except ValueError as error:
        raise UsageError(str(error)) from error
    unit = model.architecture == "mosaic"
    print_summary(summary, shown, chosen, unit=unit)
    if isinstance(looks, list):
        save_inspection(run, describe(text, summary, looks, trained.step, unit=unit))
        print(f"\nKept in {run / INSPECTIONS} for: compactattn report {shlex.quote(str(run))} --out report")


def _index(name: str, number: int | None, count: int, what: str) -> int:
    """From 0, of a number from 1; the last where none is given."""
    if number is None:
        return count - 1
    if not 1 <= number <= count:
        raise UsageError(f"{name} = {number} is not there: the {what} are numbered from 1 to {count}")
    return number - 1


def print_summary(summary: Summary, layer: int, head: int | None, *, unit: bool) -> None:
    """A table of the layers, and one of the heads of a layer; h has a meaning for unit keys only."""
    terminal = console()
    terminal.print(_tabulate_layers(summary, unit))
    terminal.print(
        f"\nLayer {layer + 1}: what {name_word(summary.words[summary.position])!r}, token {summary.position + 1} of"
        f" {len(summary.words)}, looked back at; token@position and weight, exact zeros left out.\n",
        markup=False,
    )
    heads = [one for one in summary.of(layer) if head in (None, one.head)]
    terminal.print(_tabulate_heads(heads, summary.position, unit, MOST if head is None else len(summary.words)))


def _tabulate_layers(summary: Summary, unit: bool) -> Table:
    table = Table("layer", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("zero weights, %", "keys a query", *(["h, median"] if unit else [])):
        table.add_column(name, justify="right")
    for layer in summary.layers:
        numbers = [f"{100 * layer.zeros:.1f}", f"{layer.support:.1f}", *([_write_bandwidth(layer.bandwidth)] if unit else [])]
        table.add_row(str(layer.layer + 1), *numbers)
    return table


def _tabulate_heads(heads: Iterable[HeadSummary], position: int, unit: bool, most: int) -> Table:
    table = Table("head", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("zero weights, %", "keys here", *(["h here"] if unit else [])):
        table.add_column(name, justify="right")
    table.add_column("tokens used")
    for head in heads:
        reach = [_write_bandwidth(float(head.bandwidth[position]))] if unit else []
        table.add_row(str(head.head + 1), f"{100 * head.zeros:.1f}", str(len(head.used)), *reach, shade_words(head.used, most))
    return table


def _write_bandwidth(h: float) -> str:
    return f"{h:.2f}" if h == h else NO_BANDWIDTH


def shade_words(used: tuple[Used, ...], most: int) -> Text:
    """The heaviest tokens, each on a ground as dark as its weight, and what the others weigh together."""
    line = Text()
    for word in used[:most]:
        share = word.weight**0.5  # small weights would all look alike
        ground = (round(light + share * (dark - light)) for light, dark in zip(PAPER, INK, strict=True))
        style = f"{'black' if share < LIGHT else 'white'} on rgb({','.join(map(str, ground))})"
        line.append(f" {name_word(word.word)}@{word.position + 1} ", style)
        line.append(f" {format_weight(word.weight)}  ")
    if rest := used[most:]:
        line.append(f"and {len(rest)} more: {format_weight(sum(word.weight for word in rest))}", "dim")
    return line if used else Text("none")
