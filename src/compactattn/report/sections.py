"""What a page is made of: a section for each comparison, with everything that is said and shown about it, in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from compactattn.report import (
    comparison,
    figures,
    finding,
    lm_comparison,
    lm_figures,
    lm_finding,
    lm_stories,
    lm_tables,
    palette,
    paper,
    regbench_comparison,
    regbench_figures,
    regbench_finding,
    regbench_tables,
    tables,
)
from compactattn.report.finding import Finding
from compactattn.report.lines import FORMER_START, Line
from compactattn.report.runs import Run

DEPARTURES, KERNELS = "Where this departs from the paper", "Compact kernels against Gaussian attention"
STORIES = "What the models write"


class Heading(NamedTuple):
    text: str


class Sentences(NamedTuple):
    sentences: Sequence[str]


class Items(NamedTuple):
    items: Sequence[str]


class Grid(NamedTuple):
    """A table or a story, ready for either page."""

    html: str
    markdown: str
    caption: str
    folded: bool = False  # away, until a reader asks for it


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows."""

    name: str
    figure: Figure
    caption: str


class Fold(NamedTuple):
    """Parts that are away, below their title, until a reader asks for them."""

    title: str
    parts: Sequence[Grid | Picture]


Part = Heading | Sentences | Items | Grid | Picture | Fold
Drawn = dict[str, tuple[Callable[[], Figure | None], str | Callable[[Figure], str]]]  # by key: how to draw it, and its caption


class Section(NamedTuple):
    """One comparison: its name as a link, what it is about, what it says, what it shows, and its lines."""

    name: str
    experiment: str
    subject: str
    title: str
    note: str
    link: str
    finding: Finding
    parts: list[Part]
    lines: Sequence[Line[Any, Any, Any]]

    @property
    def pictures(self) -> list[Picture]:
        return list_pictures(self.parts)


def list_pictures(parts: Sequence[Part]) -> list[Picture]:
    """The pictures among parts, also those that are folded away."""
    inner = [one for part in parts for one in (part.parts if isinstance(part, Fold) else [part])]
    return [part for part in inner if isinstance(part, Picture)]


def make_sections(runs: Sequence[Run], draw: Collection[str] | None = None) -> list[Section]:
    """A section for each comparison that the runs allow, experiment by experiment; a number tells equal names apart.

    `draw` names the pictures to draw, as in ("validation", "positions"); None stands for all of them.
    """
    found: list[tuple[Any, Callable[..., Section]]] = [
        *((compared, _make_length_generalisation) for compared in comparison.compare(runs)),
        *((compared, _make_regbench) for compared in regbench_comparison.compare(runs)),
        *((compared, _make_depth) for compared in lm_comparison.compare(runs)),
    ]
    names = [_slug(compared.name) for compared, _ in found]
    names = [f"{name}-{names[:i].count(name)}" if name in names[:i] else name for i, name in enumerate(names)]
    return [make(compared, name, draw) for (compared, make), name in zip(found, names, strict=True)]


def _show_table(compared: Any, grid: Grid) -> list[Part]:
    """A table; above that of Memory Mosaics of the former start, that it is not the published one."""
    warned = compared.former and any(line.variant.architecture == "mosaic" for line in compared.lines)
    return [*([Sentences([FORMER_START])] if warned else []), grid]


def _illustrate(picture: Picture | None, heading: str = "") -> list[Part]:
    """A picture below its heading; nothing where there is none."""
    return [] if picture is None else [Heading(heading), picture] if heading else [picture]


def _itemise(heading: str, items: Sequence[str]) -> list[Part]:
    """A list below its heading; nothing where it is empty."""
    return [Heading(heading), Items(items)] if items else []


def name_task(section: Section, run: Run) -> str:
    """What a run was trained on."""
    examples = run.config.data.get("examples")
    return f"{section.subject}, {examples:,} examples" if isinstance(examples, int) else section.subject


def _make_length_generalisation(compared: comparison.Comparison, name: str, draw: Collection[str] | None) -> Section:
    published = compared.mode == comparison.MODES[0]
    pictures = _draw_length_generalisation(compared, name, draw)
    grid = Grid(tables.format_html(compared, _colour), tables.format_markdown(compared), tables.describe(compared))
    parts = [*_illustrate(pictures.get("extrapolation")), *_show_table(compared, grid)]
    parts += _beside_paper(finding.hold_against_paper(compared), pictures.get("paper"), compared.not_run())
    parts += _itemise(DEPARTURES, finding.list_departures(compared) if published else [])
    parts += _illustrate(pictures.get("training"), "Training")
    title = compared.title if compared.published else f"{compared.title}, trained up to {compared.longest}"
    link = title if published else f"{title}, {compared.mode}"
    experiment, found = "Length generalisation", finding.find(compared)
    return Section(name, experiment, compared.title, title, compared.mode, link, found, parts, compared.lines)


def _draw_length_generalisation(compared: comparison.Comparison, name: str, draw: Collection[str] | None) -> dict[str, Picture]:
    caption = f"Exact match against the length of the source on {compared.title}, {compared.mode}."
    caption += palette.describe_looks(_variants(compared))
    if figures.shows_bands(compared):
        single = any(cell.seeds == 1 for line in compared.lines for cell in line.cells.values())
        caption += f" Bands: 95 % interval of the mean over seeds{', or of one seed over test samples' if single else ''}."
    drawn: Drawn = {"extrapolation": (lambda: figures.draw_extrapolation(compared), caption)}
    if finding.hold_against_paper(compared):
        caption = "Each kernel alone: our means and the paper's. The runs differ in their training, as listed below."
        drawn["paper"] = (lambda: figures.draw_against_paper(compared), caption)
    if compared.mode == comparison.MODES[0]:
        drawn["training"] = (lambda: figures.draw_training(compared.lines), _describe_training(compared.title))
    return _draw_all(drawn, name, draw)


def _describe_training(subject: str) -> str:
    return f"Training loss on {subject}, each point the mean of a stretch of logged steps; one line for each run."


def _beside_paper(sentences: Sequence[str], picture: Picture | None, missing: Sequence[str]) -> list[Part]:
    parts: list[Part] = [Heading("Beside the paper"), Sentences(sentences)] if sentences else []
    return [*parts, *_illustrate(picture), *_name_missing(missing)]


def _name_missing(rows: Sequence[str]) -> list[Part]:
    return [Sentences([f"Of the paper, not run here: {', '.join(rows)}."])] if rows else []


def _make_regbench(compared: regbench_comparison.Comparison, name: str, draw: Collection[str] | None) -> Section:
    title = compared.title[0].upper() + compared.title[1:]
    pictures = _draw_regbench(compared, name, draw)
    grid = Grid(
        regbench_tables.format_html(compared, _colour),
        regbench_tables.format_markdown(compared),
        regbench_tables.describe(compared),
    )
    parts = [*_illustrate(pictures.get("sizes")), *_show_table(compared, grid)]
    parts.append(Sentences(regbench_finding.list_references(compared)))
    parts += _itemise(KERNELS, regbench_finding.list_kernels(compared))
    parts += _beside_paper(regbench_finding.hold_against_paper(compared), pictures.get("paper"), compared.not_run())
    parts += _itemise("More than two points from the paper", regbench_finding.list_gaps(compared))
    parts += _itemise(DEPARTURES, regbench_finding.list_departures(compared))
    parts += _illustrate(pictures.get("positions"), "What context is worth")
    parts += _itemise("Epochs done, the one evaluated, and the time of training", regbench_finding.list_epochs(compared))
    parts += _illustrate(pictures.get("validation"))
    link = title if compared.split == regbench_comparison.SPLIT else f"{title}, {compared.split}"
    found = regbench_finding.find(compared)
    return Section(
        name, "In-context learning", compared.title, title, f"{compared.split} split", link, found, parts, compared.lines
    )


def _draw_regbench(compared: regbench_comparison.Comparison, name: str, draw: Collection[str] | None) -> dict[str, Picture]:
    size = compared.main_size
    caption = f"Accuracy and TVD against the number of training examples on {compared.title}."
    caption += palette.describe_looks(_variants(compared))
    caption += " Bands: 95 % interval of the mean over seeds." if regbench_figures.shows_bands(compared) else ""
    caption += " Grey lines: n-grams of the context, without training." if compared.references else ""
    drawn: Drawn = {
        "sizes": (lambda: regbench_figures.draw_sizes(compared), caption),
        "positions": (
            lambda: regbench_figures.draw_positions(compared, size),
            f"Accuracy against the position in the sequence, after training on {size:,} examples: the more of a language a "
            "model has seen, the better it should know it. Each point is a stretch of positions, over all seeds; stretches "
            "that few sequences reach are left out.",
        ),
        "validation": (
            lambda: regbench_figures.draw_validation(compared, size),
            f"Validation loss after each epoch on {compared.title}, with {size:,} examples; one line for each run. "
            "The epoch of the lowest is the one evaluated.",
        ),
    }
    if regbench_finding.hold_against_paper(compared):
        caption = "Each variant alone: our means (colour) and the paper's (grey, hollow); accuracy is thick, TVD thin."
        drawn["paper"] = (lambda: regbench_figures.draw_beside_paper(compared), caption)
    return _draw_all(drawn, name, draw)


def _draw_all(drawn: Drawn, name: str, wanted: Collection[str] | None) -> dict[str, Picture]:
    """The wanted pictures that there is something to draw for, each with its caption or what one says of the figure."""
    found = {key: (draw(), caption) for key, (draw, caption) in drawn.items() if wanted is None or key in wanted}
    return {
        key: Picture(f"{name}-{key}", figure, caption if isinstance(caption, str) else caption(figure))
        for key, (figure, caption) in found.items()
        if figure is not None
    }


def _variants(compared: Any) -> list[paper.Variant]:
    return [line.variant for line in compared.lines]


def _make_depth(compared: lm_comparison.Comparison, name: str, draw: Collection[str] | None) -> Section:
    pictures = _draw_language_modelling(compared, name, draw)
    grid = Grid(lm_tables.format_html(compared, _colour), lm_tables.format_markdown(compared), lm_tables.describe(compared))
    parts = [*_illustrate(pictures.get("validation")), *_show_table(compared, grid)]
    parts += _itemise("From the lowest loss up", lm_finding.rank(compared))
    parts += _itemise(KERNELS, lm_finding.list_kernels(compared))
    parts += _illustrate(pictures.get("positions"), "What context is worth")
    parts += _illustrate(pictures.get("differences"))
    parts += _tell_stories(compared)
    parts += [Heading("Beside the paper"), Sentences(lm_finding.state_published(compared))]
    claims = lm_finding.hold_against_paper(compared)
    parts += [*([Items(claims)] if claims else []), *_name_missing(compared.not_run())]
    parts += _itemise(DEPARTURES, lm_finding.list_departures(compared))
    parts += _illustrate(pictures.get("training"), "Training")
    steps = f"{compared.steps:,} steps of {compared.batch:,} windows"
    title = compared.title  # a corpus goes by its own name
    found = lm_finding.find(compared)
    return Section(name, "Language modelling", compared.title, title, steps, title, found, parts, compared.lines)


def _draw_language_modelling(compared: lm_comparison.Comparison, name: str, draw: Collection[str] | None) -> dict[str, Picture]:
    several = any(len(line.seeds) > 1 for line in compared.lines)
    over = f"windows{' and seeds' if several else ''}"
    smoothed = f"the mean over {over}, as a moving average over positions that fades by a tenth with each one"
    arrows, looks = lm_figures.describe_arrows, palette.describe_looks(_variants(compared))
    validation = f"Validation loss on held-out {compared.corpus} against the training step"
    validation += ", the mean over seeds" if several else ""
    positions = f"Loss against the tokens read in a window, in nats: {smoothed}."
    differences = "The same less that of Gaussian attention: below zero is better than it."
    drawn: Drawn = {
        "validation": (
            lambda: lm_figures.draw_validation(compared),
            lambda figure: f"{validation}{lm_figures.describe_views(figure)}.{arrows(figure)}{looks}",
        ),
        "positions": (lambda: lm_figures.draw_positions(compared), lambda figure: positions + arrows(figure)),
        "differences": (lambda: lm_figures.draw_differences(compared), lambda figure: differences + arrows(figure)),
        "training": (lambda: figures.draw_training(compared.lines), _describe_training(compared.title)),
    }
    return _draw_all(drawn, name, draw)


def _tell_stories(compared: lm_comparison.Comparison) -> list[Part]:
    """A story of each variant: those of the best to be read, the others' folded away."""
    told: list[Part] = [
        Grid(
            lm_stories.format_html(compared, line, story, folded),
            lm_stories.format_markdown(compared, line, story, folded),
            "",
            folded,
        )
        for folded, stories in zip((False, True), lm_stories.choose_stories(compared), strict=True)
        for line, story in stories
    ]
    return [Heading(STORIES), *told] if told else []


def _slug(text: str) -> str:
    return "-".join(re.findall("[a-z0-9]+", text.lower())) or "task"


def _colour(line: Line[Any, Any, Any]) -> str:
    return palette.css_colour(palette.look_of(line.variant).colour)
