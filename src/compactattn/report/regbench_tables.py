"""The paper's Table 1: variants down, numbers of training examples across, accuracy and TVD in per cent.

The paper's number stands below ours, and a mark beside ours where the two are further apart than `regbench_paper.GAP`, or
where a run was stopped before its end.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from compactattn.report import regbench_paper as paper
from compactattn.report.evaluations import Scored
from compactattn.report.lines import lost_patience, span
from compactattn.report.regbench_comparison import MEASURES, Comparison, Line, count_epochs
from compactattn.report.regbench_status import KINDS
from compactattn.report.tables import NONE, join_html, join_markdown, name_row

CUT = KINDS["steps"].mark
HEADS = {"accuracy": "Acc ↑", "tvd": "TVD ↓"}


def describe(comparison: Comparison) -> str:
    """What the table shows and from how many seeds, epochs and samples."""
    runs = [run for line in comparison.lines for run in line.runs]
    seeds = span(cell.accuracy.seeds for line in comparison.lines for cell in line.cells.values())
    epochs = span(round(count_epochs(run, run.config.training.steps)) for run in runs)
    samples = span(n for line in comparison.lines for n in line.samples)
    best = "" if seeds == "1" else ": mean over seeds, the best seed as superscript where there are several"
    text = (
        f"Accuracy (positions whose likeliest next token is legal; higher is better) and TVD (total variation distance to the "
        f"automaton's next-letter distribution; lower is better) on the {comparison.split} split, in per cent, by number of "
        f"training examples{best}. Ours: {seeds} {'seed' if seeds == '1' else 'seeds'}, at most {epochs} epochs, "
        f"{samples} samples.{_state_patience(comparison)}"
    )
    if comparison.published:
        text += f" The paper: at most {paper.EPOCHS} epochs, {paper.SAMPLES:,} samples, seeds not told."
    occurring = {gap.status.kind for gap in comparison.gaps}
    marks = ", ".join(f"{mark} {name}" for kind, (mark, name) in KINDS.items() if kind in occurring)
    text += f" More than {100 * paper.GAP:g} points from the paper: {marks}." if marks else ""
    cut = any(comparison.is_interrupted(line, size) for line in comparison.lines for size in line.cells)
    return text + (f" {CUT} of a run that was stopped before its end, as told below." if cut else "")


def _state_patience(comparison: Comparison) -> str:
    """How many runs patience ended, and which epochs they are judged at; nothing where it ended none."""
    runs = [run for line in comparison.lines for run in line.runs]
    ended = [run for run in runs if lost_patience(run)]
    rows = [row for run in ended for row in run.latest if isinstance(row, Scored) and row.split == comparison.split]
    if not rows:
        return ""
    return f" Patience ended {len(ended)} of {len(runs)} runs, which are judged at epoch {span(row.epoch for row in rows)}."


def format_markdown(comparison: Comparison) -> str:
    """The table as Markdown, with a row of the paper's numbers below each row of ours."""
    columns = [(size, measure) for size in comparison.sizes for measure in MEASURES]
    rows = [["Model", *(f"{size:,} {HEADS[measure]}" for size, measure in columns)], ["---", *("---:" for _ in columns)]]
    for line in comparison.lines:
        rows.append([f"**{line.label}**", *(_ours(comparison, line, *column, "**{}**", "{}") for column in columns)])
        if any(comparison.papers_cell(line, size) for size in comparison.sizes):
            rows.append(["*paper*", *(_papers(comparison, line, *column) for column in columns)])
    return join_markdown(rows)


def format_html(comparison: Comparison, colour: Callable[[Line], str] = lambda line: "inherit") -> str:
    """The table as HTML: each cell is tinted by how good our mean is, with the paper's number below it."""
    sizes = "".join(f'<th scope="colgroup" colspan="2">{size:,}</th>' for size in comparison.sizes)
    measures = "".join(f'<th scope="col">{HEADS[measure]}</th>' for _ in comparison.sizes for measure in MEASURES)
    head = f'<tr><th scope="col" rowspan="2">Model</th>{sizes}</tr><tr class="second">{measures}</tr>'
    body = "".join(_format_row(comparison, line, colour(line)) for line in comparison.lines)
    below = " Below each of our numbers, smaller: the paper's." if comparison.published else ""
    return join_html(describe(comparison) + below, head, body)


def _format_row(comparison: Comparison, line: Line, colour: str) -> str:
    row = comparison.papers_row(line)
    cells = []
    for size in comparison.sizes:
        for measure in MEASURES:
            ours = _ours(comparison, line, size, measure, "<b>{}</b>", '<span class="gap">{}</span>')
            theirs = f"<small>{_papers(comparison, line, size, measure)}</small>" if comparison.published else ""
            cells.append(f"<td{_tint(line, size, measure)}>{ours}{theirs}</td>")
    return f"<tr>{name_row(line.label, row.name if row else '', colour)}{''.join(cells)}</tr>"


def _tint(line: Line, size: int, measure: str) -> str:
    """How far a mean has come from about the worst of the paper's table to the best that can be."""
    if size not in line.cells:
        return ""
    mean = line.cells[size].of(measure).mean
    share = (mean - 0.5) / 0.5 if measure == "accuracy" else 1 - mean / 0.7
    return f' style="--share:{min(max(share, 0), 1):.3f}"'


def _ours(comparison: Comparison, line: Line, size: int, measure: str, best: str, mark: str) -> str:
    """Our cell; what shows the best mean of its column is set in `best`, the marks of a gap and of a stop in `mark`."""
    if size not in line.cells:
        return NONE
    spread = line.cells[size].of(measure)
    mean = f"{100 * spread.mean:.1f}"
    top = f"{100 * comparison.best(size, measure).cells[size].of(measure).mean:.1f}"
    mean = best.format(mean) if mean == top and len(comparison.lines) > 1 else mean
    gap = comparison.find_gap(line, size, measure)
    marks = "" if gap is None else KINDS[gap.status.kind].mark
    marks += CUT if comparison.is_interrupted(line, size) and marks != CUT else ""
    seeds = f"<sup>{100 * spread.best:.1f}</sup>" if spread.seeds > 1 else ""
    return mean + seeds + (mark.format(escape(marks)) if marks else "")


def _papers(comparison: Comparison, line: Line, size: int, measure: str) -> str:
    cell = comparison.papers_cell(line, size)
    return NONE if cell is None else f"{100 * getattr(cell, measure):.1f}"
