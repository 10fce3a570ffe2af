"""The table of language modelling: variants down; size, losses in and out of distribution, and cost across."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from compactattn.report import lm_paper as paper
from compactattn.report.facts import format_duration
from compactattn.report.lines import Spread, span
from compactattn.report.lm_comparison import Comparison, Line, count_size, mean_cost
from compactattn.report.lm_rates import describe_rates
from compactattn.report.tables import NONE, join_html, join_markdown, name_row

CLEAR = 0.05  # nats behind the best, within which a tint does not fade to nothing


class Column(NamedTuple):
    """A column: its heading, a second line of it, its text for a line, where less is better what it is judged by, and what a
    reader should know of it."""

    head: str
    unit: str
    show: Callable[[Line], str]
    spread: Callable[[Line], Spread | None] = lambda line: None
    note: str = ""


def name_split(split: str) -> str:
    return paper.SPLITS.get(split, split)


def describe(comparison: Comparison) -> str:
    """What the table shows, and from how many seeds, steps and tokens."""
    lines = comparison.lines
    seeds = span(cell.loss.seeds for line in lines for cell in line.cells.values())
    intervals = "" if seeds == "1" else ": mean over seeds, ± half of its 95 % interval where there are several"
    windows = {
        split: span(row.samples for line in comparison.on(split) for row in line.rows[split]) for split in comparison.splits
    }
    judged = ", ".join(f"{count} of {name_split(split)}" for split, count in windows.items())
    text = (
        f"Loss in nats for each token, trained on {comparison.corpus}{intervals}. "
        f"Ours: {seeds} {'seed' if seeds == '1' else 'seeds'}, {comparison.steps:,} steps of {comparison.batch:,} windows"
    )
    text += f" of {comparison.length:,} tokens, so {comparison.tokens:,} tokens seen by each" if comparison.tokens else ""
    text += f"; judged on windows: {judged}. {describe_rates(comparison)}"
    early = {row.step for line in lines for rows in line.rows.values() for row in rows} - {comparison.steps}
    text += f" Evaluated at step {span(n for line in lines for n in line.steps)}." if early else ""
    text += "".join(f" {column.note}" for column in _list_columns(comparison) if column.note)
    return text + (f" {_describe_sharing(comparison)}" if _list_costs(comparison) else "")


def _describe_sharing(comparison: Comparison) -> str:
    """How many runs may have shared the GPU, as far as their commands tell."""
    most = max(run.workers for line in comparison.lines for run in line.runs)
    shared = f"Up to {most} runs shared the GPU, so these need not be the times of a run alone. " if most > 1 else ""
    return f"{shared}What else ran on the machine is not noted."


def format_markdown(comparison: Comparison) -> str:
    columns = _list_columns(comparison)
    head = ["Kernel", *(f"{column.head}, {column.unit}" if column.unit else column.head for column in columns)]
    rows = [
        [f"**{line.label}**", *(_mark(comparison, column, line, "**{}**", " {}") for column in columns)]
        for line in comparison.lines
    ]
    return join_markdown([head, ["---", *("---:" for _ in columns)], *rows])


def format_html(comparison: Comparison, colour: Callable[[Line], str] = lambda line: "inherit") -> str:
    """The table as HTML: a loss is tinted by how near it is to the best of its column."""
    columns = _list_columns(comparison)
    head = "".join(
        f'<th scope="col"><span class="wrap">{escape(column.head)}</span><small>{escape(column.unit)}</small></th>'
        for column in columns
    )
    body = ""
    for line in comparison.lines:
        cells = "".join(
            f"<td{_tint(comparison, column, line)}>{_mark(comparison, column, line, '<b>{}</b>', '<small>{}</small>')}</td>"
            for column in columns
        )
        body += f"<tr>{name_row(line.label, _name_in_paper(line), colour(line))}{cells}</tr>"
    return join_html(describe(comparison), f'<tr><th scope="col">Kernel</th>{head}</tr>', body)


def _name_in_paper(line: Line) -> str:
    return (
        paper.ROWS[line.variant]
        if line.variant in paper.DRAWN and paper.ROWS[line.variant].lower() != line.label.lower()
        else ""
    )


def _list_columns(comparison: Comparison) -> list[Column]:
    home, *others = comparison.splits
    columns = [_loss_column(home, lambda line: line.failure)]
    columns.append(Column("Perplexity", "", lambda line: f"{line.cells[home].perplexity:.2f}" if home in line.cells else NONE))
    if any(_bits(line, home) for line in comparison.lines):
        columns.append(Column("Bits", "per byte", lambda line: _spell(_bits(line, home)), lambda line: _bits(line, home)))
    columns += [_loss_column(split) for split in others]
    columns.append(Column("Size", "million", lambda line: f"{count_size(line) / 1e6:.3g}", note="Size in parameters."))
    if len({run.steps for line in comparison.lines for run in line.runs}) > 1:
        columns += [
            Column("Steps", "done", lambda line: span(run.steps for run in line.runs)),
            Column("Tokens", "seen", lambda line: span(run.tokens for run in line.runs)),
        ]
    return columns + _list_costs(comparison)


def _list_costs(comparison: Comparison) -> list[Column]:
    """What training took, as far as any line has noted it."""

    def show_speed(line: Line) -> str:
        return _count(float(f"{mean_cost(line).tokens_per_second:.3g}"), 1e3, ",g")

    def show_memory(line: Line) -> str:
        return _count(mean_cost(line).peak_bytes, 2**30, ".1f")

    speed_note = "Tokens/s are the median over stretches of logged steps, but for the first of each start, which compiles."
    costs = (
        Column(
            "Time", "", lambda line: format_duration(mean_cost(line).wall_seconds),
            note="Time is that of training alone, compilation included.",
        ),
        Column("Tokens/s", "thousand", show_speed, note=speed_note),
        Column("Memory", "GiB", show_memory, note="Memory is the peak on the GPU."),
    )  # fmt: skip
    return [column for column in costs if any(column.show(line) != NONE for line in comparison.lines)]


def _count(number: float, unit: float, form: str) -> str:
    return f"{number / unit:{form}}" if number else NONE


def _loss_column(split: str, otherwise: Callable[[Line], str] = lambda line: "") -> Column:
    """The losses on a split, and in place of a missing one what is said otherwise."""

    def spread(line: Line) -> Spread | None:
        return line.cells[split].loss if split in line.cells else None

    def show(line: Line) -> str:
        return _spell(spread(line)) if split in line.cells else otherwise(line) or NONE

    return Column(name_split(split).replace("validation", "Validation"), "loss", show, spread)


def _bits(line: Line, split: str) -> Spread | None:
    return line.cells[split].bits if split in line.cells else None


def _spell(spread: Spread | None) -> str:
    return NONE if spread is None else f"{spread.mean:.3f}"


def _mark(comparison: Comparison, column: Column, line: Line, best: str, interval: str) -> str:
    """A cell; what shows the lowest of its column is set in `best`, half of the interval over seeds in `interval`."""
    spread, text = column.spread(line), column.show(line)
    if spread is None:
        return text
    lowest = f"{min(_means(comparison, column)):.3f}"
    text = best.format(text) if text == lowest and len(comparison.lines) > 1 else text
    return text + (interval.format(f"±\u00a0{(spread.interval[1] - spread.interval[0]) / 2:.3f}") if spread.interval else "")


def _tint(comparison: Comparison, column: Column, line: Line) -> str:
    """How near a loss is to the best of its column: full at the best, none at twice the median's distance, or `CLEAR`."""
    spread = column.spread(line)
    if spread is None or len(comparison.lines) < 2:
        return ""
    means = sorted(_means(comparison, column))
    share = 1 - (spread.mean - means[0]) / max(2 * (means[len(means) // 2] - means[0]), CLEAR)
    return f' style="--share:{min(max(share, 0), 1):.3f}"'


def _means(comparison: Comparison, column: Column) -> Sequence[float]:
    return [spread.mean for line in comparison.lines if (spread := column.spread(line)) is not None]
