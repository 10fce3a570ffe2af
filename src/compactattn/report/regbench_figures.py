"""The lines of RegBench: accuracy and TVD by number of examples, beside the paper's; accuracy by position; validation loss.

In the style of `figures`: a line is named at its end rather than in a legend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from compactattn.report.evaluations import Bins
from compactattn.report.figures import (
    BANDS,
    LINE_HEIGHT,
    STYLE,
    WIDTH,
    draw_curve,
    draw_losses,
    draw_panels,
    name_ends,
    one_panel,
)
from compactattn.report.palette import FAINT, MUTED, look_of
from compactattn.report.regbench_comparison import MEASURES, Comparison, Line, count_epochs
from compactattn.report.runs import Run

FEW = 0.02  # of the fullest bin, below which a bin of positions is too thin to be drawn
TITLES = {
    "accuracy": "accuracy (higher is better; log scale of the rest)",
    "tvd": "TVD (lower is better; log scale)",
}
TICKS = {
    "accuracy": (0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.98, 0.99),
    "tvd": (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1),
}


def draw_sizes(comparison: Comparison) -> Figure:
    """Accuracy above, TVD below, against the number of training examples; one line for each variant."""
    with matplotlib.rc_context(STYLE):
        each = max(2.6, 0.2 + LINE_HEIGHT * len(comparison.lines))
        height = 2 * each + 1.15
        figure = Figure(figsize=(WIDTH, height))
        for measure, bottom in zip(MEASURES, (each + 0.9, 0.45), strict=True):
            panel = figure.add_axes((0.13, bottom / height, 0.53, each / height))
            for line in comparison.lines:
                _draw_line(panel, line, measure, bands=shows_bands(comparison))
            references = _draw_references(panel, comparison, measure)
            _scale_sizes(panel, comparison.sizes, named=True)
            _scale_shares(panel, measure)
            _name_references(panel, references, measure)
            panel.set_title(TITLES[measure], loc="left", pad=4)
            panel.set_xlabel("training examples" if measure == MEASURES[-1] else "", labelpad=2)
            ends = [
                (line.label, line.cells[max(line.cells)].of(measure).mean, max(line.cells), look_of(line.variant))
                for line in comparison.lines
            ]
            name_ends(panel, sorted(ends, key=lambda end: end[1]), math.log10)
    return figure


def _draw_references(panel: Axes, comparison: Comparison, measure: str) -> dict[str, float]:
    """A thin grey line at what each n-gram of the context reaches without training; returns their names and heights."""
    found = {r.name: getattr(r, measure) for r in comparison.references if "gram" in r.name}
    for share in found.values():
        panel.axhline(share, color=MUTED, linewidth=0.7, zorder=1)
    return {name.removeprefix("a ").removesuffix(" of the context"): share for name, share in found.items()}


def _name_references(panel: Axes, references: Mapping[str, float], measure: str) -> None:
    """Each name at the worse side of its line, where fewer curves are, and further right than the one before."""
    rise, side = (-1.5, "top") if measure == "accuracy" else (1.5, "bottom")
    for index, (name, share) in enumerate(references.items()):
        panel.annotate(
            name, (0.6 + 0.16 * index, share), xycoords=panel.get_yaxis_transform(), xytext=(0, rise),
            textcoords="offset points", color=MUTED, size=7, va=side, zorder=4,
        )  # fmt: skip


def shows_bands(comparison: Comparison) -> bool:
    """Whether the lines show their intervals: only over seeds, and only while the bands can be told apart."""
    several = any(cell.accuracy.seeds > 1 for line in comparison.lines for cell in line.cells.values())
    return several and len(comparison.lines) <= BANDS


def _draw_line(panel: Axes, line: Line, measure: str, bands: bool, width: float = 1.4) -> None:
    look, spreads = look_of(line.variant), {size: cell.of(measure) for size, cell in line.cells.items()}
    known = {size: spread.interval for size, spread in spreads.items() if spread.interval}
    if bands and known:
        low, high = zip(*known.values(), strict=True)
        panel.fill_between(list(known), low, high, color=look.colour, alpha=0.13, linewidth=0)
        if len(known) == 1:  # a band needs two ends
            panel.vlines(list(known), low, high, color=look.colour, alpha=0.4, linewidth=3)
    panel.plot(
        list(spreads), [spread.mean for spread in spreads.values()], color=look.colour, linestyle=look.dashes, linewidth=width,
        clip_on=False, zorder=3, marker=look.marker, markersize=2.2 + width,
        markerfacecolor="none" if look.hollow else look.colour,
    )  # fmt: skip


def _scale_shares(panel: Axes, measure: str) -> None:
    """Shares on a scale that parts the best from the very best: the logarithm of the TVD, or of the share that is not legal."""
    low, high = panel.get_ylim()
    if sum(low <= share <= high for share in TICKS[measure]) < 2:  # all the same: a scale needs something to be read by
        low = max((share for share in TICKS[measure] if share < low), default=low)
        high = min((share for share in TICKS[measure] if share > high), default=high)
    if measure == "accuracy":
        panel.set_yscale("function", functions=(lambda y: -np.log10(np.maximum(1 - y, 1e-4)), lambda x: 1 - 10.0**-x))
    else:
        panel.set_yscale("log")
    panel.set_ylim(max(low, 0.01), min(high, 0.999 if measure == "accuracy" else 1))
    ticks = [share for share in TICKS[measure] if panel.get_ylim()[0] <= share <= panel.get_ylim()[1]]
    panel.set_yticks(ticks, [f"{100 * share:.3g} %" for share in ticks])
    panel.set_yticks([], minor=True)


def _scale_sizes(panel: Axes, sizes: Sequence[int], named: bool) -> None:
    panel.set_xscale("log")
    panel.set_xlim(min(sizes) / 1.15, max(sizes) * 1.15)
    shown = sizes if named or len(sizes) < 4 else sizes[::2]
    panel.set_xticks(shown, [f"{size:,}" if named else f"{size / 1000:g}k" for size in shown])
    panel.set_xticks([], minor=True)
    panel.grid(axis="y", color=FAINT, linewidth=0.6)
    panel.set_axisbelow(True)


def draw_beside_paper(comparison: Comparison) -> Figure:
    """One panel for each variant: our accuracy (the thick line) and TVD (the thin one), and the paper's."""

    def draw(panel: Axes, line: Line) -> None:
        theirs = {size: cell for size in comparison.sizes if (cell := comparison.papers_cell(line, size)) is not None}
        for measure, width in zip(MEASURES, (1.8, 0.8), strict=True):
            values = [getattr(cell, measure) for cell in theirs.values()]
            panel.plot(
                list(theirs), values, color=MUTED, linewidth=width, linestyle=(0, (2, 1.5)), marker="o",
                markersize=2.2 + width, markerfacecolor="none", clip_on=False,
            )  # fmt: skip
            _draw_line(panel, line, measure, bands=True, width=width)
        _scale_sizes(panel, comparison.sizes, named=False)
        panel.set(ylim=(0, 1.02), yticks=(0, 0.5, 1))
        panel.set_yticks((0, 0.5, 1), ("0 %", "50 %", "100 %"))

    lines = [line for line in comparison.lines if any(comparison.papers_cell(line, size) for size in comparison.sizes)]
    return draw_panels(lines, draw, "grey, hollow: the paper      colour: here      thick: accuracy      thin: TVD")


def pool_positions(line: Line, size: int) -> list[tuple[float, float]]:
    """(middle of a bin of positions, accuracy in it) over all seeds; bins with few positions are left out.

    Runs whose bins are not those of the first are left out too.
    """
    bins = [row.by_position for row in line.rows.get(size, ()) if row.by_position is not None]
    return _pool([one for one in bins if one.edges == bins[0].edges]) if bins else []


def _pool(bins: Sequence[Bins]) -> list[tuple[float, float]]:
    positions, right = (np.sum([getattr(one, name) for one in bins], axis=0) for name in ("positions", "right"))
    edges = np.array(bins[0].edges)
    middles = (edges[:-1] + edges[1:] - 1) / 2
    full = (positions > 0) & (positions >= FEW * positions.max(initial=0))
    return [(float(x), float(y)) for x, y in zip(middles[full], right[full] / positions[full], strict=True)]


def draw_positions(comparison: Comparison, size: int) -> Figure | None:
    """Accuracy against the position in the sequence with one number of examples; None where no run has noted it."""
    curves = {line.label: (line, curve) for line in comparison.lines if (curve := pool_positions(line, size))}
    if not curves:
        return None
    with matplotlib.rc_context(STYLE):
        figure, panel = one_panel(len(curves))
        for line, curve in curves.values():
            draw_curve(panel, line, curve)
        panel.set_xlim(0, max(x for _, curve in curves.values() for x, _ in curve) * 1.01)
        panel.set(xlabel="position in the sequence", ylabel="legal next tokens")
        panel.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
        ends = [(label, curve[-1][1], curve[-1][0], look_of(line.variant)) for label, (line, curve) in curves.items()]
        name_ends(panel, sorted(ends, key=lambda end: end[1]))
    return figure


def draw_validation(comparison: Comparison, size: int) -> Figure | None:
    """Validation loss against epoch, one curve for each run with one number of examples; None where no run has kept it."""
    runs = [(line, [run for run in line.runs if run.config.data.get("examples") == size]) for line in comparison.lines]
    curves = [(line, [_by_epoch(run) for run in found if run.validations]) for line, found in runs]
    return draw_losses(curves, "epoch", "validation loss, log scale")


def _by_epoch(run: Run) -> list[tuple[float, float]]:
    return [(count_epochs(run, step), loss) for step, loss in run.validations]
