"""The family in pictures: the paper's Figure 1 redone, and the whole table of profiles and rules.

Every number comes from `compactattn.weights`. A figure is drawn with matplotlib's object API, so
nothing global is touched, and is saved with no date and a fixed salt, so the same versions write
the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from torch import Tensor

from compactattn.attention import weights
from compactattn.kernels import Fixed, Kernel, parse

STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so every machine sets the same text
    "mathtext.fontset": "dejavusans",
    "font.size": 7.5,
    "axes.titlesize": 7.5,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "compactattn",
}
PAGE = 6.9  # inches: the text width of a two-column paper

LIMIT = 4.0  # u₁ and u₂ run over ±LIMIT: 4/3-entmax needs a gap of 3 before it drops a key
CELLS = (400, 398)  # of u₂ and u₁; unequal and even, so that no cell has tied scores

_SHADES = matplotlib.colormaps["YlGnBu"](np.linspace(0.12, 0.68, 10))  # ends where black still reads
COLOURS = ListedColormap(_SHADES, name="weight").with_extremes(bad="white")
BANDS = BoundaryNorm(np.linspace(0, 1, 11), 10)

INK = {0.0: "#A0307A", 1.0: "#0067A8", 2.0: "#C44E00", 3.0: "#00805E", math.inf: "#1A1A1A"}  # of each profile, by r


class Curve(NamedTuple):
    """A classical kernel as a line: its name and its attention kernel at bandwidth h = 1."""

    name: str
    kernel: str
    dashes: Any = "-"


CURVES = (  # in the order of their peaks
    Curve("triweight, $r=3$", "rectified(3)"),
    Curve("biweight, $r=2$", "rectified(2)"),
    Curve("Epanechnikov, $r=1$", "rectified(1)"),
    Curve("truncated Gaussian (top-$k$)", "truncated_gaussian(1/2)", (0, (4, 1.5))),
    Curve("uniform (top-$k$)", "ball", (0, (1.2, 1.2))),
    Curve("Gaussian", "gaussian"),
)


class Cell(NamedTuple):
    """One transformation: what attention calls it, its kernel, and what regression calls that (in Figure 1)."""

    name: str
    kernel: str
    estimator: str = ""


SOFTMAX = Cell("softmax", "gaussian", "Gaussian")
NORM_RELU = Cell("normalised ReLU", "norm_relu", "Epanechnikov, $h=1$")
ENTMAX = (
    Cell("sparsemax", "epanechnikov", "adaptive Epanechnikov"),
    Cell("1.5-entmax", "biweight", "adaptive biweight"),
    Cell("4/3-entmax", "triweight", "adaptive triweight"),
)
RELUMAX = (
    Cell("1-ReLUmax", "relumax(r=1)", "anchored Epanechnikov"),
    Cell("2-ReLUmax", "relumax(r=2)", "anchored biweight"),
    Cell("3-ReLUmax", "relumax(r=3)", "anchored triweight"),
)
TOP_SOFTMAX = Cell("top-2 softmax", "topk_softmax(2)", "Gaussian kNN")
TOP_UNIFORM = Cell("top-2 uniform", "topk_uniform(2)", "uniform kNN")
FIGURE_1 = ((SOFTMAX, NORM_RELU, *ENTMAX), (TOP_SOFTMAX, TOP_UNIFORM, *RELUMAX))

COLUMNS = (  # of the table: the profiles
    ("step", "$K(t)=1[t>0]$"),
    ("Epanechnikov", "$K(t)=[t]_+$"),
    ("biweight", "$K(t)=[t]_+^2$"),
    ("triweight", "$K(t)=[t]_+^3$"),
    ("Gaussian", r"$K(t)=e^{\,t}$"),
)
ROWS = (  # of the table: the rules
    ("fixed bandwidth", r"$\theta=1/2$  ($h=1$)"),
    ("anchored", r"$\theta=\max\,u-1$"),
    ("normalising", r"$\theta$ such that $\Sigma\,w=1$"),
    ("nearest $\\mathbf{k}$", r"$\theta=u_{(k)}$"),
)
TABLE: tuple[tuple[Cell | str, ...], ...] = (
    (
        Cell("ε-ball average", "ball"),
        NORM_RELU,
        Cell("normalised ReLU²", "rectified(2)"),
        Cell("normalised ReLU³", "rectified(3)"),
        "softmax, as below:\n$e^{\\,t}$ has no edge\nto place",
    ),
    (Cell("margin average", "margin"), *RELUMAX, Cell("truncated softmax", "truncated_gaussian")),
    ("none: a step\nhas no $\\theta$ with\n$\\Sigma\\,w=1$", *ENTMAX, SOFTMAX),
    (
        TOP_UNIFORM,
        Cell("top-3 Epanechnikov", "topk_epanechnikov(3)"),
        Cell("top-3 biweight", "topk_biweight(3)"),
        Cell("top-3 triweight", "topk_triweight(3)"),
        TOP_SOFTMAX,
    ),
)
KEY = (
    "lines: where one of the three weights becomes zero",
    "digits: how many of the weights are not zero",
    "*  no key is in reach, so the weights are uniform",
)


# -- numbers -------------------------------------------------------------------------------------


def evaluate_profile(kernel: Kernel | str, cells: int = 2400, limit: float = 6.0) -> tuple[np.ndarray, np.ndarray]:
    """u and the kernel's density K(u), of unit integral at bandwidth h = 1.

    K(u) is what a query at the origin gives to keys spread evenly on a line: on unit vectors the
    score of a key at distance u is 1 − u²/2, and its weight per length du is the density.
    """
    u = _centres(cells, limit)
    return u.numpy(), weights(1 - u.square() / 2, kernel).numpy() * cells / (2 * limit)


def evaluate_plane(kernel: Kernel | str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u₁, u₂ and the weights (u₂, u₁, 3) of the scores [0, u₁, u₂] at the centres of a fine grid."""
    u2, u1 = (_centres(cells, LIMIT) for cells in CELLS)
    scores = torch.stack([torch.zeros(CELLS, dtype=torch.float64), *torch.meshgrid(u1, u2, indexing="xy")], dim=-1)
    return u1.numpy(), u2.numpy(), weights(scores, kernel).numpy()


def _centres(cells: int, limit: float) -> Tensor:
    """The centres of equal cells that cover ±limit."""
    return limit * ((2 * torch.arange(cells, dtype=torch.float64) + 1) / cells - 1)


def label_regions(w: np.ndarray) -> list[tuple[int, int, int]]:
    """(row, column, non-zero weights) at the heart of each region of constant support.

    The heart is the last cell to survive when the region is eaten away from its edges.
    """
    step = 4  # a quarter of the cells is plenty to centre a digit
    code = (w[::step, ::step] > 0) @ np.array([1, 2, 4])
    labels = []
    for support in np.unique(code):
        region = code == support
        while True:
            eroded = _erode(region)
            if not eroded.any():
                break
            region = eroded
        left = np.argwhere(region)
        row, column = left[np.square(left - left.mean(0)).sum(-1).argmin()]
        labels.append((step * int(row), step * int(column), int(support).bit_count()))
    return labels


def _erode(region: np.ndarray) -> np.ndarray:
    """The region without the cells next to another region or to the border."""
    padded = np.pad(region, 1)
    return region & padded[2:, 1:-1] & padded[:-2, 1:-1] & padded[1:-1, 2:] & padded[1:-1, :-2]


# -- drawing -------------------------------------------------------------------------------------


def draw_profiles() -> Figure:
    """The one-dimensional kernels of the paper's Figure 1 (left), each of unit integral, against u.

    The bandwidth is h = 1, and the top-k kernels are cut at distance 1.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE / 2, 2.7))
        grid = figure.add_gridspec(1, 1, left=0.125, right=0.98, top=0.825, bottom=0.135)
        _draw_curves(figure.add_subplot(grid[0]), columns=2)
    return figure


def _draw_curves(panel: Axes, columns: int) -> None:
    for curve in CURVES:
        kernel = parse(curve.kernel)
        u, density = evaluate_profile(kernel)
        support = np.convolve(density > 0, [1, 1, 1], "same") > 0  # one zero on each side closes the curve
        colour = INK[kernel.r]
        panel.plot(u[support], density[support], linestyle=curve.dashes, color=colour, linewidth=1.2, label=curve.name)
    panel.set(xlim=(-2.6, 2.6), ylim=(0, 1.15), xticks=range(-2, 3), xlabel="$u$", ylabel="$K(u)$")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(
        frameon=False, ncols=columns, loc="lower left", bbox_to_anchor=(-0.02, 1.0),
        handlelength=2, columnspacing=1.2, borderaxespad=0, borderpad=0.2,
    )  # fmt: skip


def draw_transformations() -> Figure:
    """The whole family on the scores [0, u₁, u₂]: profiles across, support rules down.

    Colour is the weight of the key with score u₁, white where it is exactly zero; a line marks
    where one of the three weights becomes zero, a digit how many are not. The kernels of fixed
    bandwidth are drawn at h = 1, so that only scores above ½ are in reach.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(PAGE, 6.8))
        grid = figure.add_gridspec(4, 5, left=0.115, right=0.985, top=0.915, bottom=0.145, wspace=0.14, hspace=0.27)
        axes = _draw_panels(figure, grid, TABLE)
        for (name, formula), colour, top in zip(COLUMNS, INK.values(), axes[0], strict=True):
            _write(top, 0.5, 1.42, name, color=colour, weight="bold", size=8)
            _write(top, 0.5, 1.26, formula, color=colour)
        for (name, formula), left in zip(ROWS, axes[:, 0], strict=True):
            _write(left, -0.56, 0.5, name, rotation=90, weight="bold", size=8)
            _write(left, -0.42, 0.5, formula, rotation=90)
        _draw_colour_bar(figure, (0.115, 0.07, 0.42, 0.014))
        _write_key(figure, 0.585, 0.091, *KEY, "italic: not in the paper's Figure 1")
    return figure


def draw_overview() -> Figure:
    """The paper's Figure 1 redone: the kernels on the left, the transformations they give on the right."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 4.35))
        left = figure.add_gridspec(1, 1, left=0.05, right=0.29, top=0.76, bottom=0.1)
        _draw_curves(figure.add_subplot(left[0]), columns=1)
        right = figure.add_gridspec(2, 5, left=0.34, right=0.99, top=0.92, bottom=0.24, wspace=0.12, hspace=0.4)
        axes = _draw_panels(figure, right, FIGURE_1)
        for cell, panel in zip((*FIGURE_1[0], *FIGURE_1[1]), axes.flat, strict=True):
            panel.set_title(cell.name, pad=12)
            _write(panel, 0.5, 1.07, cell.estimator, color=INK[parse(cell.kernel).r], size=6.5)
        _draw_colour_bar(figure, (0.34, 0.1, 0.32, 0.02))
        _write_key(figure, 0.705, 0.122, *KEY)
    return figure


def _draw_panels(figure: Figure, grid: GridSpec, cells: Sequence[Sequence[Cell | str]]) -> np.ndarray:
    """Axes (rows, columns) of a grid of cells; a cell that is text is written, not drawn."""
    axes = np.empty((grid.nrows, grid.ncols), dtype=object)
    for row, column in np.ndindex(axes.shape):
        axes[row, column] = panel = figure.add_subplot(grid[row, column])
        cell = cells[row][column]
        if isinstance(cell, str):
            panel.set_axis_off()
            _write(panel, 0.5, 0.5, cell, linespacing=1.3, size=7)
            continue
        _draw_plane(panel, cell)
        panel.set_title(cell.name, style="normal" if cell.estimator else "italic", pad=3)
        lowest, first = row == grid.nrows - 1, column == 0 or isinstance(cells[row][column - 1], str)
        panel.tick_params(labelbottom=lowest, labelleft=first)
        panel.set_xlabel("$u_1$" if lowest else "", labelpad=1)
        panel.set_ylabel("$u_2$" if column == 0 else "", labelpad=-2)
    return axes


def _draw_plane(panel: Axes, cell: Cell) -> None:
    """The weight of the key with score u₁, and the regions of constant support."""
    kernel = parse(cell.kernel)
    u1, u2, w = evaluate_plane(kernel)
    box = (-LIMIT, LIMIT, -LIMIT, LIMIT)
    shown = np.ma.masked_equal(w[..., 1], 0)
    panel.imshow(shown, cmap=COLOURS, norm=BANDS, extent=box, origin="lower", interpolation="none")
    for key in range(3):
        inside = w[..., key] > 0
        if not inside.all():
            panel.contour(u1, u2, inside, levels=[0.5], colors="black", linewidths=0.5)
    for row, column, count in label_regions(w):
        out_of_reach = isinstance(kernel.rule, Fixed) and count == 3
        panel.text(u1[column], u2[row], f"{count}*" if out_of_reach else str(count), ha="center", va="center", size=6.5)
    panel.set(xticks=(-3, 0, 3), yticks=(-3, 0, 3), xlim=box[:2], ylim=box[2:])


def _draw_colour_bar(figure: Figure, box: tuple[float, float, float, float]) -> None:
    shades = matplotlib.cm.ScalarMappable(norm=BANDS, cmap=COLOURS)
    bar = figure.colorbar(shades, cax=figure.add_axes(box), orientation="horizontal", ticks=np.linspace(0, 1, 6))
    bar.set_label("weight of $u_1$ among the scores $[0, u_1, u_2]$  (white: exactly zero)")


def _write_key(figure: Figure, x: float, y: float, *lines: str) -> None:
    figure.text(x, y, "\n".join(lines), va="top", size=7, linespacing=1.35)


def _write(panel: Axes, x: float, y: float, text: str, **style: Any) -> None:
    """Text centred on a point given in fractions of the panel."""
    panel.text(x, y, text, transform=panel.transAxes, ha="center", va="center", **style)


def write_gallery(directory: Path | str) -> list[Path]:
    """Writes each figure as .svg and .png into the directory, which is made if need be; returns the paths."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    figures = {"kernels": draw_profiles(), "transformations": draw_transformations(), "overview": draw_overview()}
    return [path for name, figure in figures.items() for path in save_figure(figure, directory / name)]


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Writes stem.svg and stem.png, the same bytes every time; returns the paths."""
    svg, png = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("svg", "png"))
    with matplotlib.rc_context(STYLE):
        figure.savefig(svg, metadata={"Date": None})
        figure.savefig(png, dpi=300)
    return [svg, png]
