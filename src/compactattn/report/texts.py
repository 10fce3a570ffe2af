"""The texts that runs were inspected on, layer by layer: how sparse it is, how far its heads reach, and what they used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compactattn.report import attended, maps
from compactattn.report.inspected import Inspected
from compactattn.report.runs import Run
from compactattn.report.sections import Fold, Grid, Heading, Part, Picture

OPEN = 2  # layers up to which each is shown unfolded
SHOWN = 60  # characters of a text in a heading
LETTERS = 12  # of a word beside a map
HOW = 'Of another text: compactattn inspect RUN --text "…" --save, and then this report again.'


def show_texts(runs: Sequence[Run]) -> list[Part]:
    """Every text that a run was inspected on; nothing where there is none."""
    found = [(run, one) for run in runs for one in run.inspected]
    return [part for number, (run, one) in enumerate(found, start=1) for part in _show_text(run, one, f"text-{number}")]


def _show_text(run: Run, one: Inspected, name: str) -> list[Part]:
    kernel, layers = run.config.model.kernel, range(len(one.weights))
    text = one.text or "the first test example"
    short = text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
    about = f"{run.variant.label}, {run.source}, after step {one.step:,}, on {len(one.words)} tokens."
    bandwidth = attended.has_bandwidth(one.summary)
    caption = f"{about} How sparse each layer is: its weights that are zero to the last bit, and the keys that a query uses."
    caption += " h is the bandwidth, a distance between vectors of unit length." if bandwidth else ""
    reach = f"“{short}”: keys used{' and bandwidth' if bandwidth else ''}, for every head at every position, layer by layer."
    return [
        Heading(f"“{short}”" if one.text else f"{text[0].upper()}{text[1:]}"),
        Grid(attended.format_layers_html(one.summary, caption), attended.format_layers_markdown(one.summary), caption),
        Picture(f"{name}-heads", maps.draw_heads([one.look(kernel, layer, 0) for layer in layers]), reach),
        *(part for layer in layers for part in _show_layer(kernel, one, layer, f"{name}-layer-{layer + 1}", short)),
    ]


def _show_layer(kernel: str, one: Inspected, layer: int, name: str, short: str) -> list[Part]:
    whole = one.summary.layers[layer]
    title = f"Layer {layer + 1}: {100 * whole.zeros:.1f} % zero weights, {whole.support:.1f} keys a query"
    names = [attended.name_word(word)[:LETTERS] for word in one.words]
    looks = [replace(one.look(kernel, layer, head), tokens=names) for head in range(len(one.weights[layer]))]
    caption = f"“{short}”, layer {layer + 1}: the weights of every head. A row looks back, at the tokens of its columns."
    parts = (
        Picture(name, maps.draw_layer(looks), caption),
        Grid(
            attended.format_strips(one.summary, layer),
            attended.format_markdown(one.summary, layer),
            attended.describe(one.summary, layer),
        ),
    )
    return [Fold(title, parts)] if len(one.weights) > OPEN else list(parts)
