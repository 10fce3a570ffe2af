"""The lines of language modelling: validation loss by step, and loss by position in a window, also against the Gaussian's.

In the style of `figures`: a line is named at its end rather than in a legend. Curves lie close together, so that each view
of all has a closer one beside it; a curve that would squeeze the others leaves that view, and its name has an arrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from compactattn.report.figures import LINE_HEIGHT, STYLE, WIDTH, Curve, count_lines, draw_curve, name_ends, scale_losses
from compactattn.report.lm_comparison import Comparison, Line, mean_validations, smooth_positions
from compactattn.report.lm_tables import name_split
from compactattn.report.palette import FAINT, MUTED, look_of

SPACING = 0.12  # of a panel from one marker to the next
CLOSE = 3  # points of a curve from which on a closer view shows more
ALL, LATE, GAPS = "validation loss, log scale", "its last half, closer", "the same − Gaussian's"
UP, DOWN = "↑", "↓"  # after the name of a line that is above or below its panel
FAR = 8  # times the median distance from the median end, from which on a curve may leave a closer view
SQUEEZE, ONLY = 1.5, 2.0  # times its height, up to which a view grows for such a curve; where there is no wider one, ONLY
Curves = Mapping[str, tuple[Line, Curve]]  # by label


def draw_validation(comparison: Comparison) -> Figure | None:
    """Validation loss against step, the mean over seeds: all of it, its last half, and that less Gaussian attention's.

    None where no run kept it. A closer view that would show no more is left out. A line is named in the closest view of
    it, so one that failed where all is shown.
    """
    curves = {line.name: (line, curve) for line in comparison.lines if (curve := mean_validations(line))}
    failed = {name: (line, curve) for name, (line, curve) in curves.items() if line.failure and not line.cells}
    if len(curves) == len(failed):
        return None
    last = max(curve[-1][0] for _, curve in curves.values())
    whole = {name: found for name, found in curves.items() if name not in failed}
    late = _pick({name: (line, [point for point in curve if point[0] >= last / 2]) for name, (line, curve) in whole.items()})
    late = late if max((len(curve) for _, curve in late.values()), default=0) >= CLOSE else {}
    gaps = _differences(comparison, comparison.home, late)
    late = late if late != whole else {}  # which would show the same once more
    found: list[tuple[str, float, Curves]] = [(LATE, last / 2, late), (GAPS, last / 2, gaps)]
    with matplotlib.rc_context(STYLE):
        views = [(ALL, 0.0, failed if late else curves), *(view for view in found if view[2])]
        figure, axes = _stack([_room(named, 1.7 if late and title == ALL else 2.0) for title, _, named in views])
        for panel, (title, start, named) in zip(axes, views, strict=True):
            if title == ALL:
                for line, curve in curves.values():
                    draw_curve(panel, line, curve)
                scale_losses(panel)
            else:
                (_draw_close if title == LATE else _draw_differences)(panel, named)
            panel.set_title(title, loc="left", pad=4)
            panel.set_xlim(start, last * 1.01)
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
            _name_curves(panel, named)
        axes[-1].set_xlabel(
            f"training step, of {comparison.batch * comparison.length:,} tokens" if comparison.tokens else "step"
        )
    return figure


def describe_views(figure: Figure) -> str:
    """What the closer views of a drawn validation loss show; nothing where it has none."""
    titles = {panel.get_title(loc="left") for panel in figure.axes}
    text = "; the last half closer" if LATE in titles else ""
    return text + ("; and that less the loss of Gaussian attention, where below zero is better" if GAPS in titles else "")


def describe_arrows(figure: Figure) -> str:
    """What an arrow means, where a name has one."""
    names = [text.get_text() for panel in figure.axes for text in panel.texts]
    found = [where for arrow, where in ((UP, "above"), (DOWN, "below")) if any(name.endswith(arrow) for name in names)]
    return f" An arrow marks a line that is {' or '.join(found)} the panel." if found else ""


def draw_positions(comparison: Comparison) -> Figure | None:
    """Loss against the tokens read in a window, smoothed, a panel for each split; None where no run has noted it."""
    found = {split: _by_position(comparison, split) for split in comparison.splits}
    return _draw_by_position(found, "loss", partial(_draw_close, most=ONLY))


def draw_differences(comparison: Comparison) -> Figure | None:
    """Loss less that of Gaussian attention, against the tokens read; None where there is no such line or no other."""
    found = {split: _differences(comparison, split, _by_position(comparison, split)) for split in comparison.splits}
    return _draw_by_position(found, "loss − Gaussian's", _draw_differences)


def _draw_by_position(found: Mapping[str, Curves], what: str, draw: Callable[[Axes, Curves], None]) -> Figure | None:
    panels = {split: curves for split, curves in found.items() if curves}
    if not panels:
        return None
    with matplotlib.rc_context(STYLE):
        figure, axes = _stack([_room(curves) for curves in panels.values()])
        for panel, (split, curves) in zip(axes, panels.items(), strict=True):
            draw(panel, curves)
            panel.set_title(f"{name_split(split)}: {what}", loc="left", pad=4)
            _scale_positions(panel, curves)
            _name_curves(panel, curves, math.log2)
        axes[-1].set_xlabel("tokens read in the window, log scale")
    return figure


def _by_position(comparison: Comparison, split: str) -> Curves:
    return _pick({line.label: (line, list(smooth_positions(line, split).items())) for line in comparison.lines})


def _differences(comparison: Comparison, split: str, curves: Curves) -> Curves:
    """Each of the other curves less that of Gaussian attention, where both have a value; none without that one."""
    base = comparison.base(split)
    if base is None or base.label not in curves:
        return {}
    theirs = dict(curves[base.label][1])
    others = {label: (line, curve) for label, (line, curve) in curves.items() if label != base.label}
    return _pick(
        {label: (line, [(x, y - theirs[x]) for x, y in curve if x in theirs]) for label, (line, curve) in others.items()}
    )


def _pick(curves: Curves) -> Curves:
    """Those that have a point."""
    return {label: (line, curve) for label, (line, curve) in curves.items() if curve}


# -- panels --------------------------------------------------------------------------------------


def _room(curves: Mapping[str, object], least: float = 2.0) -> float:
    """Inches that a panel needs for the names beside it."""
    return max(least, 0.2 + LINE_HEIGHT * sum(count_lines(f"{label} {UP}") for label in curves))


def _stack(heights: Sequence[float]) -> tuple[Figure, list[Axes]]:
    """Panels of these heights below each other, with room for names on their right."""
    gap, bottom = 0.62, 0.48
    total = sum(heights) + gap * (len(heights) - 1) + bottom + 0.3
    figure, axes, top = Figure(figsize=(WIDTH, total)), [], total - 0.3
    for height in heights:
        panel = figure.add_axes((0.13, (top - height) / total, 0.53, height / total))
        panel.grid(axis="y", color=FAINT, linewidth=0.6)
        panel.set_axisbelow(True)
        axes.append(panel)
        top -= height + gap
    return figure, axes


def find_far(ends: Mapping[str, float]) -> set[str]:
    """The names whose ends are so far from the others' that a view of all would show no difference between those."""
    middle = float(np.median(list(ends.values())))
    typical = float(np.median([abs(end - middle) for end in ends.values()]))
    return {name for name, end in ends.items() if typical > 0 and abs(end - middle) > FAR * typical}


def _choose_view(curves: Curves, shown: Sequence[float], most: float) -> tuple[float, float]:
    """The least and the greatest value of a closer view: of the near curves, and of a far one where it takes little room."""
    far = find_far({label: curve[-1][1] for label, (_, curve) in curves.items()})
    near = [y for label, (_, curve) in curves.items() if label not in far for _, y in curve] + list(shown)
    low, high = min(near), max(near)
    room = most * (high - low)
    spans = ([y for _, y in curve] for label, (_, curve) in curves.items() if label in far)
    for ys in sorted(spans, key=lambda ys: max(low - min(ys), max(ys) - high)):
        if max(high, *ys) - min(low, *ys) <= room:
            low, high = min(low, *ys), max(high, *ys)
    return low, high


def _draw_differences(panel: Axes, curves: Curves) -> None:
    """Curves of differences, with a line at zero."""
    panel.axhline(0, color=MUTED, linewidth=0.8, zorder=1)
    _draw_close(panel, curves, 0.0)
    panel.yaxis.set_major_locator(MaxNLocator(6))
    panel.yaxis.set_major_formatter(lambda y, _: f"{y:+.3g}".replace("-", "−") if abs(y) > 1e-9 else "0")


def _draw_close(panel: Axes, curves: Curves, *shown: float, most: float = SQUEEZE) -> None:
    """The curves at a scale that parts the near ones; values in `shown` are in view too."""
    low, high = _choose_view(curves, shown, most)
    for line, curve in curves.values():
        draw_curve(panel, line, curve, SPACING)
    margin = 0.06 * (high - low) or 0.01
    panel.set_ylim(low - margin, high + margin)


def _scale_positions(panel: Axes, curves: Curves) -> None:
    ends = [x for _, curve in curves.values() for x, _ in (curve[0], curve[-1])]
    panel.set_xscale("log", base=2)
    panel.set_xlim(min(ends) / 1.05, max(ends) * 1.05)
    panel.xaxis.set_major_locator(LogLocator(2, numticks=12))
    panel.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    panel.set_xticks([], minor=True)


def _name_curves(panel: Axes, curves: Curves, scale: Any = lambda x: x) -> None:
    low, high = panel.get_ylim()
    ends = [
        (f"{label}{f' {UP}' if y > high else f' {DOWN}' if y < low else ''}", y, x, look_of(line.variant))
        for label, (line, curve) in curves.items()
        for x, y in curve[-1:]
    ]
    name_ends(panel, sorted(ends, key=lambda end: end[1]), scale)
