"""Tables in the paper's layout: kernels down, test lengths across, the maximum over seeds as superscript.

The paper's number stands below ours, so that the eye needs not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from compactattn.report import paper
from compactattn.report.comparison import Comparison, Line
from compactattn.report.lines import span

NONE = "–"


def describe(comparison: Comparison) -> str:
    """What a table shows and from how many seeds, steps and samples."""
    lines = comparison.lines
    steps = span(n for line in lines for n in line.steps)
    samples = span(n for line in lines for n in line.samples)
    seeds = span(cell.seeds for line in lines for cell in line.cells.values())
    text = (
        f"Share of {comparison.subject} samples answered exactly, {comparison.mode}: mean over seeds, maximum as superscript. "
        f"Ours: {seeds} {'seed' if seeds == '1' else 'seeds'}, {steps} training steps, {samples} samples for each length."
    )
    if comparison.beside_paper:
        recipe = paper.RECIPES[comparison.task]
        text += f" The paper: {paper.SEEDS} seeds, {recipe.steps:,} steps, {paper.SAMPLES:,} samples."
    return text


def count_seeds(comparison: Comparison, line: Line) -> str:
    """How many seeds are behind a row, where the rows differ in that: " (1 seed)"."""
    seeds = {one.label: span(cell.seeds for cell in one.cells.values()) for one in comparison.lines}
    own = seeds[line.label]
    return "" if len(set(seeds.values())) == 1 else f" ({own} {'seed' if own == '1' else 'seeds'})"


def format_markdown(comparison: Comparison) -> str:
    """The table as Markdown, with a row of the paper's numbers below each row of ours."""
    head = ["Kernel", *(f"{comparison.factor(n)} ({n:,})" for n in comparison.lengths)]
    rows = [head, ["---", *("---:" for _ in comparison.lengths)]]
    for line in comparison.lines:
        ours = (_ours(comparison, line, n, "**{}**", "<sup>{}</sup>") for n in comparison.lengths)
        rows.append([f"**{line.label}**{count_seeds(comparison, line)}", *ours])
        if any(comparison.papers_cell(line, n) for n in comparison.lengths):
            rows.append(["*paper*", *(_papers(comparison, line, n, "<sup>{}</sup>") for n in comparison.lengths)])
    return join_markdown(rows)


def format_html(comparison: Comparison, colour: Callable[[Line], str] = lambda line: "inherit") -> str:
    """The table as HTML: each cell is tinted by our mean, with the paper's number below it.

    `colour` gives the CSS colour of a line's mark, the same as in the figures.
    """
    head = "".join(f'<th scope="col">{comparison.factor(n)}<small>{n:,}</small></th>' for n in comparison.lengths)
    below = " Below each of our numbers, smaller: the paper's." if comparison.beside_paper else ""
    body = "".join(_format_row(comparison, line, colour(line)) for line in comparison.lines)
    return join_html(describe(comparison) + below, f'<tr><th scope="col">Kernel</th>{head}</tr>', body)


def join_markdown(rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown from the texts of its cells."""
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows) + "\n"


def join_html(caption: str, head: str, body: str) -> str:
    """A table of HTML from its caption, which is text, and its rows, which are HTML."""
    return (
        f'<div class="table"><p class="caption">{escape(caption)}</p><div class="scroll"><table>'
        f"<thead>{head}</thead><tbody>{body}</tbody></table></div></div>"
    )


def fold(title: str, content: str) -> str:
    """HTML that shows its title until it is opened; both are HTML."""
    return f"<details><summary>{title}</summary>{content}</details>"


def name_row(label: str, papers: str, colour: str) -> str:
    """The first cell of a row of HTML: the line's mark and label, and below it the paper's name, if it has one."""
    below = f"<small>{escape(papers)}</small>" if papers else ""
    mark = f'<span class="mark" style="background:{escape(colour)}"></span>'
    return f'<th scope="row">{mark}<span class="name">{escape(label)}</span>{below}</th>'


def _format_row(comparison: Comparison, line: Line, colour: str) -> str:
    row = paper.ROWS.get(line.variant) if comparison.beside_paper else None
    note = (row.name if row else "") + count_seeds(comparison, line)
    cells = []
    for length in comparison.lengths:
        ours = _ours(comparison, line, length, "<b>{}</b>", "<sup>{}</sup>")
        theirs = _papers(comparison, line, length, "<sup>{}</sup>") if comparison.beside_paper else ""
        theirs = f"<small>{theirs}</small>" if theirs else ""
        tint = f' style="--share:{line.cells[length].mean:.3f}"' if length in line.cells else ""
        cells.append(f"<td{tint}>{ours}{theirs}</td>")
    return f"<tr>{name_row(line.label, note, colour)}{''.join(cells)}</tr>"


def _ours(comparison: Comparison, line: Line, length: int, best: str, superscript: str) -> str:
    """Our cell; what shows the best mean of its column is set in `best`."""
    if length not in line.cells:
        return NONE
    summary = line.cells[length]
    mean = f"{summary.mean:.2f}"
    top = max(other.cells[length].mean for other in comparison.lines if length in other.cells)
    mean = best.format(mean) if mean == f"{top:.2f}" != "0.00" and len(comparison.lines) > 1 else mean
    return mean + superscript.format(f"{summary.maximum:.2f}")


def _papers(comparison: Comparison, line: Line, length: int, superscript: str) -> str:
    cell = comparison.papers_cell(line, length)
    return NONE if cell is None else f"{cell.mean:.2f}" + superscript.format(f"{cell.maximum:.2f}")
