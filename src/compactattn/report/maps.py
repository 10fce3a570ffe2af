"""Attention from inside: maps in which exact zeros are blank, and the bandwidth and support of every head."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from compactattn.kernels import parse
from compactattn.report.figures import LINE_HEIGHT, STYLE, name_ends
from compactattn.report.inspection import Inspection
from compactattn.report.palette import FAINT, MUTED, colour_of, look_of
from compactattn.report.paper import Variant, name_kernel

WIDTH = 6.2  # inches
SMALLEST = 1e-4  # weights below share the palest colour, which is not the blank of an exact zero
SHADES = ListedColormap(matplotlib.colormaps["YlGnBu"](np.linspace(0.16, 1, 256)), name="weight").with_extremes(bad="white")
LABELLED = 26  # tokens that fit beside a map


def draw_attention(inspections: Sequence[Inspection]) -> Figure:
    """Maps of weights, queries down and keys across: blank where the weight is exactly zero, colour on a log scale."""
    columns = len(inspections) if len(inspections) < 4 else 2 if len(inspections) == 4 else 3
    rows = -(-len(inspections) // columns)
    labelled = any(_shows_tokens(inspection) for inspection in inspections)
    left, right, gap, drop = 0.55, 0.06, 0.3 + 0.3 * labelled, 0.62 + 0.3 * labelled  # inches
    side = min(2.9, (WIDTH - left - right - gap * (columns - 1)) / columns)
    with matplotlib.rc_context(STYLE):
        height = rows * (side + drop) + 0.72
        figure = Figure(figsize=(WIDTH, height))
        for index, inspection in enumerate(inspections):
            row, column = divmod(index, columns)
            bottom = height - (row + 1) * (side + drop) + drop - 0.48
            across = (left + column * (side + gap)) / WIDTH
            panel = figure.add_axes((across, bottom / height, side / WIDTH, side / height))
            _draw_map(panel, inspection)
            panel.set_ylabel("query" if column == 0 else "")
            panel.set_xlabel("key" if index + columns >= len(inspections) else "", labelpad=1)
        _draw_scale(figure, height)
    return figure


def draw_layer(looks: Sequence[Inspection]) -> Figure:
    """Maps of all heads of a layer, three or four in a row; the words stand at the left and below where there is room."""
    labelled, length = _shows_tokens(looks[0]), len(looks[0].weights)
    columns = 2 if labelled and len(looks) == 4 else min(3 if labelled else 4, len(looks))
    rows = -(-len(looks) // columns)
    left, gap, drop, foot = 0.8 if labelled else 0.5, 0.12, 0.3, 1.15 if labelled else 0.85  # inches
    side = min(2.6, (WIDTH - left - 0.06 - gap * (columns - 1)) / columns)
    height = rows * (side + drop) + foot
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        for index, look in enumerate(looks):
            row, column = divmod(index, columns)
            across, up = left + column * (side + gap), height - (row + 1) * (side + drop)
            panel = figure.add_axes((across / WIDTH, up / height, side / WIDTH, side / height))
            _draw_map(panel, look)
            panel.set_title(f"head {look.head + 1}", loc="left", pad=3, size=8.5)
            panel.texts[0].set_visible(False)
            panel.tick_params(labelleft=column == 0, labelbottom=index + columns >= len(looks), length=1.5, pad=1.5)
            panel.tick_params(labelsize=min(6.5, 72 * side / length) if labelled else 6.5)
        figure.text(0.01, 1 - (drop + side / 2) / height, "looks back", rotation=90, va="center", size=8.5, color=MUTED)
        _draw_scale(figure, height)
    return figure


def _draw_scale(figure: Figure, height: float) -> None:
    shades = ScalarMappable(norm=LogNorm(SMALLEST, 1), cmap=SHADES)
    bar = figure.colorbar(shades, cax=figure.add_axes((0.3, 0.3 / height, 0.42, 0.09 / height)), orientation="horizontal")
    bar.set_ticks([1e-4, 1e-3, 1e-2, 1e-1, 1], labels=["≤ 0.0001", "0.001", "0.01", "0.1", "1"])
    bar.minorticks_off()
    figure.text(0.285, 0.34 / height, "blank: exactly 0", ha="right", va="center", size=8.5, color=MUTED)
    figure.text(0.735, 0.34 / height, "weight, log scale", ha="left", va="center", size=8.5, color=MUTED)


def _shows_tokens(inspection: Inspection) -> bool:
    return 0 < len(inspection.tokens) <= LABELLED


def _draw_map(panel: Axes, inspection: Inspection) -> None:
    w = inspection.weights
    shown = np.ma.masked_equal(w, 0).clip(SMALLEST, 1)
    panel.imshow(shown, cmap=SHADES, norm=LogNorm(SMALLEST, 1), interpolation="none", aspect="auto", extent=_count_from_one(w))
    panel.set_title(
        name_kernel(inspection.kernel), color=colour_of(parse(inspection.kernel)), loc="left", pad=14, weight="bold"
    )
    about = f"layer {inspection.layer + 1}, head {inspection.head + 1}: {(w > 0).sum(1).mean():.1f} keys a query"
    panel.text(0, 1.02, about, transform=panel.transAxes, size=7, color=MUTED)
    if _shows_tokens(inspection):
        words = [token.replace("$", r"\$") for token in inspection.tokens]  # a dollar would start a formula
        panel.set_xticks(range(1, len(words) + 1), words, rotation=90, size=6.5)
        panel.set_yticks(range(1, len(w) + 1), words[: len(w)], size=6.5)
    else:
        panel.set_xticks(_list_places(w.shape[1]))
        panel.set_yticks(_list_places(w.shape[0]))
    panel.spines[:].set_visible(True)


def _count_from_one(image: np.ndarray) -> tuple[float, float, float, float]:
    """The edges of an image whose first row and column are number 1."""
    rows, columns = image.shape
    return 0.5, columns + 0.5, rows + 0.5, 0.5


def _list_places(count: int) -> list[int]:
    """The first of so many places, and about five round ones after it."""
    places = MaxNLocator(5, integer=True).tick_values(0, count)
    return [1, *(int(place) for place in places if 1 < place <= count)]


def draw_heads(inspections: Sequence[Inspection]) -> Figure:
    """Support and bandwidth of each head, down, at each position, across; one colour scale for all."""
    with matplotlib.rc_context(STYLE):
        each = len({inspection.support.shape[1] for inspection in inspections}) > 1  # positions below each panel
        rise = 0.38 + 0.17 * each + 0.095 * max(len(inspection.support) for inspection in inspections)  # inches of a row
        height = rise * len(inspections) + 0.95 - 0.17 * each
        figure = Figure(figsize=(WIDTH, height))
        known = any(np.isfinite(inspection.bandwidth).any() for inspection in inspections)
        _draw_head_column(figure, inspections, "support", (0.09, 0.42 if known else 0.9), rise, each)
        if known:
            _draw_head_column(figure, inspections, "bandwidth", (0.57, 0.42), rise, each)
    return figure


def _draw_head_column(
    figure: Figure, inspections: Sequence[Inspection], name: str, across: tuple[float, float], rise: float, each: bool
) -> None:
    """One quantity of all inspections, with its colour bar below; `each` panel or the last alone has its positions named."""
    height = figure.get_figheight()
    parts = [np.ma.masked_invalid(getattr(inspection, name)) for inspection in inspections]
    log = name == "support"
    parts = [np.ma.masked_less(part, 1) for part in parts] if log else parts
    values = np.concatenate([part.compressed() for part in parts] + [np.ones(1)][: not any(part.count() for part in parts)])
    most = max(2.0, float(values.max()))
    norm = LogNorm(1, most) if log else Normalize(0, values.max())
    for row, (inspection, part) in enumerate(zip(inspections, parts, strict=True)):
        heads = len(part)
        bottom = 1 - ((row + 1) * rise - 0.17 * each) / height
        panel = figure.add_axes((across[0], bottom, across[1], (rise - 0.3 - 0.17 * each) / height))
        panel.imshow(
            part, cmap="viridis" if log else "cividis", norm=norm, aspect="auto", interpolation="none",
            extent=_count_from_one(part),
        )  # fmt: skip
        panel.set_title(f"{name_kernel(inspection.kernel)}, layer {inspection.layer + 1}", loc="left", pad=2.5, size=8.5)
        panel.set_yticks(sorted({1, heads}))
        panel.set_xticks(_list_places(part.shape[1]))
        panel.set_ylabel("head" if log else "", labelpad=-2 if heads > 5 else 2)
        last = row == len(inspections) - 1
        panel.tick_params(labelbottom=last or each, pad=1.5)
        panel.set_xlabel("position" if last else "", loc="left", labelpad=1)
    shades = ScalarMappable(norm=norm, cmap="viridis" if log else "cividis")
    box = (across[0] + 0.35 * across[1], 0.3 / height, 0.65 * across[1], 0.07 / height)
    bar = figure.colorbar(shades, cax=figure.add_axes(box), orientation="horizontal")
    if log and most < 30:  # powers of ten alone would leave a single number
        bar.set_ticks([count for count in (1, 2, 5, 10, 20) if count <= most])
    bar.ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    bar.minorticks_off()
    figure.text(
        box[0] - 0.01, 0.33 / height, "keys used" if log else "bandwidth", ha="right", va="center", size=8.5, color=MUTED
    )


def draw_support(inspections: Sequence[Inspection]) -> Figure:
    """How many keys a query uses against how many came before it: the median head, and all of them as a band."""
    layers = sorted({inspection.layer for inspection in inspections})
    with matplotlib.rc_context(STYLE):
        names = {inspection.kernel for inspection in inspections}
        most = max(inspection.support.shape[1] for inspection in inspections)
        ends: dict[str, tuple[str, float, float, object]] = {}  # of each kernel in the last layer that it is drawn in
        height = max(2.6, 0.8 + LINE_HEIGHT * len(names))
        figure = Figure(figsize=(WIDTH, height))
        grid = figure.add_gridspec(
            1, len(layers), left=0.085, right=0.77, top=1 - 0.3 / height, bottom=0.5 / height, wspace=0.1
        )
        for column, layer in enumerate(layers):
            panel = figure.add_subplot(grid[column])
            drawn = [_draw_support_line(panel, inspection) for inspection in inspections if inspection.layer == layer]
            ends = {name: (name, y, float(most), look) for name, y, _, look in ends.values()} | {end[0]: end for end in drawn}
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2)
            panel.set(xlim=(1, most), ylim=(0.8, most * 1.1), title=f"layer {layer + 1}")
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            panel.plot([1, most], [1, most], color=FAINT, linewidth=0.8, zorder=0)
            panel.tick_params(labelleft=column == 0)
            if column == 0:
                panel.set(ylabel="keys with weight", xlabel="position of the query")
            if column == len(layers) - 1:
                name_ends(panel, sorted(ends.values(), key=lambda end: end[1]), np.log2)
    return figure


def _draw_support_line(panel: Axes, inspection: Inspection) -> tuple[str, float, float, object]:
    variant = Variant("mosaic", parse(inspection.kernel))
    look = look_of(variant)
    support = np.maximum(inspection.support, 0.5)
    positions = np.arange(1, support.shape[1] + 1)
    middle = np.median(support, 0)
    panel.fill_between(positions, support.min(0), support.max(0), color=look.colour, alpha=0.1, linewidth=0)
    panel.plot(positions, middle, color=look.colour, linestyle=look.dashes, linewidth=1.2)
    return variant.label, float(middle[-1]), float(positions[-1]), look
