"""The lines of a report: exact match past the training length, ours against the paper's, and the training loss.

Drawn with matplotlib's object API in one style, so that the same numbers give the same bytes. A line is
named at its end rather than in a legend.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from compactattn.report import lines
from compactattn.report.comparison import Comparison, Line
from compactattn.report.gallery import STYLE
from compactattn.report.palette import FAINT, MUTED, SHADE, TEXT, look_of
from compactattn.report.runs import thin

WIDTH = 5.3  # inches; the text stays readable when a phone shrinks it
STYLE = STYLE | {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
LINE_HEIGHT = 0.155  # inches from one name to the next
LONGEST_NAME = 21  # characters in one line of a name: as many as fit beside a panel
MARKERS = 8  # on a curve of many points
BANDS = 5  # lines up to which each gets a band
SMOOTH = 60  # points of a loss curve
Curve = Sequence[tuple[float, float]]


def draw_extrapolation(comparison: Comparison) -> Figure:
    """Exact match against test length, one line for each variant; the lengths of training are shaded."""
    with matplotlib.rc_context(STYLE):
        height = max(3.4, 1.0 + LINE_HEIGHT * sum(count_lines(line.label) for line in comparison.lines))
        figure = Figure(figsize=(WIDTH, height))
        panel = figure.add_axes((0.13, 0.62 / height, 0.53, 1 - 0.86 / height))
        _draw_lines(panel, comparison, comparison.lines, bands=shows_bands(comparison))
        _scale_lengths(panel, comparison, _measured(comparison), tokens=True)
        panel.set_ylabel("samples answered exactly", labelpad=4)
        panel.set_title("seen in training", loc="left", color=MUTED, fontsize=8, pad=3)
        ends = [
            (line.label, line.cells[max(line.cells)].mean, max(line.cells), look_of(line.variant)) for line in comparison.lines
        ]
        order = sorted(range(len(ends)), key=lambda i: _rank(comparison.lines[i]))
        name_ends(panel, [ends[i] for i in order], math.log2)
    return figure


def shows_bands(comparison: Comparison) -> bool:
    """Whether the curves show their intervals: only over seeds, and only while the bands can be told apart."""
    return len(comparison.lines) <= BANDS and any(s.seeds > 1 for line in comparison.lines for s in line.cells.values())


def _rank(line: Line) -> tuple[float, ...]:
    """Sorts lines by their last number, and where those agree by the ones before."""
    return tuple(line.cells[length].mean for length in sorted(line.cells, reverse=True))


def draw_against_paper(comparison: Comparison) -> Figure:
    """One panel for each variant: our means with their interval, and the paper's means."""

    def draw(panel: Axes, line: Line) -> None:
        theirs = [(n, cell.mean) for n in comparison.lengths if (cell := comparison.papers_cell(line, n)) is not None]
        panel.plot(*zip(*theirs, strict=True), color=MUTED, linewidth=1.1, linestyle=(0, (2, 1.5)), marker="o", markersize=2.6)
        _draw_lines(panel, comparison, [line], bands=True)
        _scale_lengths(panel, comparison, comparison.lengths, tokens=False)

    lines = [line for line in comparison.lines if any(comparison.papers_cell(line, n) for n in comparison.lengths)]
    return draw_panels(lines, draw, "dashed grey: the paper      colour: here, with its 95 % interval")


def draw_panels(lines: Sequence[Any], draw: Callable[[Axes, Any], None], note: str) -> Figure:
    """A small panel for each line, three in a row, with a note below them."""
    columns = min(3, len(lines))
    rows = -(-len(lines) // columns)
    with matplotlib.rc_context(STYLE):
        height = 0.95 + 1.3 * rows
        figure = Figure(figsize=(WIDTH, height))
        grid = figure.add_gridspec(
            rows, columns, left=0.1, right=0.97, top=1 - 0.3 / height, bottom=0.6 / height, hspace=0.42, wspace=0.12
        )
        for index, line in enumerate(lines):
            panel = figure.add_subplot(grid[index // columns, index % columns])
            draw(panel, line)
            panel.tick_params(labelbottom=index + columns >= len(lines), labelleft=index % columns == 0)
            panel.set_title(line.label, color=look_of(line.variant).colour, loc="left", pad=3)
        figure.text(0.075, 0.06 / height, note, color=MUTED, size=8.5)
    return figure


def _draw_lines(panel: Axes, comparison: Comparison, lines: Sequence[Line], bands: bool) -> None:
    left, right = comparison.shortest, comparison.longest
    panel.axvspan(left / 1.12 if left == right else left, right * 1.06, color=SHADE, linewidth=0, zorder=0)
    for line in lines:
        look, lengths = look_of(line.variant), list(line.cells)
        summaries = list(line.cells.values())
        if bands:
            band = [s.low for s in summaries], [s.high for s in summaries]
            panel.fill_between(lengths, *band, color=look.colour, alpha=0.13, linewidth=0)
        panel.plot(
            lengths, [s.mean for s in summaries], color=look.colour, linestyle=look.dashes, linewidth=1.5, clip_on=False,
            zorder=3, marker=look.marker, markersize=3.4, markerfacecolor="none" if look.hollow else look.colour,
        )  # fmt: skip


def _measured(comparison: Comparison) -> list[int]:
    """The lengths at which we have a number."""
    return sorted({length for line in comparison.lines for length in line.cells})


def _scale_lengths(panel: Axes, comparison: Comparison, lengths: Sequence[int], tokens: bool) -> None:
    """Lengths as powers of two across, shares up."""
    panel.set_xscale("log", base=2)
    panel.set_xlim(min(comparison.shortest, *lengths) / 1.05, max(*lengths, comparison.longest + 1) * 1.12)
    shown = lengths if tokens or len(lengths) < 5 else lengths[::2]
    text = [f"{comparison.factor(n)}\n{n:,}" if tokens else comparison.factor(n) for n in shown]
    panel.set_xticks(shown, text, linespacing=1.35)
    panel.set_xticks([], minor=True)
    panel.set(ylim=(0, 1.02), yticks=(0, 0.5, 1) if not tokens else (0, 0.25, 0.5, 0.75, 1))
    panel.set_yticks(panel.get_yticks(), [f"{100 * y:.0f} %" for y in panel.get_yticks()])
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    if tokens:
        panel.set_xlabel("test length, as a multiple of training and in tokens", labelpad=2)


def name_ends(panel: Axes, ends: Sequence[tuple[str, float, float, Any]], scale: Any = lambda x: x) -> None:
    """Writes each line's name to the right of the panel, as near to its end as the other names allow, and joins them.

    The ends come from the lowest to the highest. `scale` is the panel's scale of x.
    """
    low, high = panel.get_ylim()
    bottom, top = panel.yaxis.get_transform().transform([low, high])
    inches = panel.bbox.height / panel.figure.dpi

    def rise(value: float) -> float:
        return float((panel.yaxis.get_transform().transform([value])[0] - bottom) / (top - bottom))

    wanted = [rise(value) for label, value, _, _ in ends for _ in range(count_lines(label))]
    places = iter(spread(wanted, LINE_HEIGHT / inches, 0.0, 1.0))  # one for each line of text
    left, right = (scale(x) for x in panel.get_xlim())
    for label, value, x, look in ends:
        place = float(np.mean([next(places) for _ in range(count_lines(label))]))
        style = {"transform": panel.transAxes, "color": look.colour, "clip_on": False}
        if 0 <= rise(value) <= 1 and abs(rise(value) - place) < 0.12:  # one from further away would cross too many others
            start = (scale(x) - left) / (right - left)
            panel.plot([start + 0.012, 1.03], [rise(value), place], linewidth=0.5, alpha=0.5, **style)
        panel.plot([1.035, 1.115], [place, place], linewidth=1.5, linestyle=look.dashes, **style)
        fill = "none" if look.hollow else look.colour
        panel.plot([1.075], [place], linestyle="", marker=look.marker, markersize=3.2, markerfacecolor=fill, **style)
        name = break_name(label)
        panel.text(1.13, place, name, transform=panel.transAxes, color=look.colour, va="center", size=8.5)


def break_name(label: str) -> str:
    """A name in lines short enough to stand beside a panel."""
    return textwrap.fill(label, LONGEST_NAME)


def count_lines(label: str) -> int:
    return break_name(label).count("\n") + 1


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> np.ndarray:
    """Places in the given order, at least `gap` apart, as near as can be to those wanted and within low … high if they fit.

    Subtracting i · gap turns "at least a gap apart" into "not falling", whose least-squares answer is
    found by pooling neighbours that are out of order.
    """
    pools: list[list[float]] = []
    for i, place in enumerate(wanted):
        pools.append([place - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = np.concatenate([np.empty(0), *(np.full(len(pool), np.mean(pool)) for pool in pools)])
    room = max(high - gap * (len(wanted) - 1), low)
    return np.clip(level, low, room) + gap * np.arange(len(wanted))


def draw_training(lines: Sequence[lines.Line[Any, Any, Any]]) -> Figure | None:
    """Training loss against step, one curve for each run, smoothed; None where no run kept its losses."""
    curves = [(line, [thin(run.losses, SMOOTH) for run in line.runs if run.losses]) for line in lines]
    return draw_losses(curves, "training step", "training loss, log scale")


def draw_losses(found: Iterable[tuple[lines.Line[Any, Any, Any], Sequence[Curve]]], across: str, up: str) -> Figure | None:
    """The curves of every line, named at the mean of their ends; None where no line has one."""
    found = [(line, curves) for line, curves in found if curves]
    if not found:
        return None
    with matplotlib.rc_context(STYLE):
        figure, panel = one_panel(sum(count_lines(line.name) for line, _ in found))
        ends = []
        for line, curves in found:
            for curve in curves:
                draw_curve(panel, line, curve)
            last = float(np.exp(np.mean([math.log(max(curve[-1][1], 1e-12)) for curve in curves])))
            ends.append((line.name, last, max(curve[-1][0] for curve in curves), look_of(line.variant)))
        scale_losses(panel)
        panel.set_xlim(0, max(x for *_, x, _ in ends) * 1.01)
        panel.set(xlabel=across, ylabel=up)
        panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        name_ends(panel, sorted(ends, key=lambda end: end[1]))
    return figure


def scale_losses(panel: Axes) -> None:
    """A log scale that can be read where losses lie close together, and where they do not."""
    low, high = panel.dataLim.intervaly
    panel.set_yscale("log")
    if low > 0 and high < 1.4 * low:  # on so short a way there may be no round number of the usual ones
        middle, reach = math.sqrt(low * high), max((high / low) ** 0.6, 1.05)
        panel.set_ylim(middle / reach, middle * reach)
        panel.yaxis.set_major_locator(MaxNLocator(4))
        panel.yaxis.set_minor_locator(NullLocator())
    else:
        panel.yaxis.set_major_locator(LogLocator(10, (1, 1.5, 2, 3, 5, 7) if 0 < high < 30 * low else (1, 2, 5)))
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    panel.yaxis.set_minor_formatter(lambda y, _: "")


def one_panel(lines: int) -> tuple[Figure, Axes]:
    height = max(2.9, 0.9 + LINE_HEIGHT * lines)
    figure = Figure(figsize=(WIDTH, height))
    panel = figure.add_axes((0.13, 0.5 / height, 0.53, 1 - 0.65 / height))
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)
    return figure, panel


def draw_curve(panel: Axes, line: lines.Line[Any, Any, Any], curve: Curve, every: Any = None) -> None:
    """A curve with a few markers: at every so many points, or, as a share of the panel, at every so much of its way."""
    look, every = look_of(line.variant), every or max(1, len(curve) // MARKERS)
    panel.plot(
        *zip(*curve, strict=True), color=look.colour, linestyle=look.dashes, linewidth=1.1, alpha=0.9, marker=look.marker,
        markersize=2.8, markerfacecolor="none" if look.hollow else look.colour, markevery=every,
    )  # fmt: skip
