"""The report: one HTML page that needs nothing from outside, and beside it the same as Markdown and the figures as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from compactattn.report import figures, maps, palette, svg, tables
from compactattn.report.comparison import MODES, Comparison, Line, compare
from compactattn.report.finding import Finding, find, hold_against_paper, list_departures
from compactattn.report.inspection import Inspection
from compactattn.report.lines import span
from compactattn.report.runs import Run

KICKER = "Length generalisation"
LOOKS = (
    "Colour is the kernel's profile; a solid line normalises itself, a dashed one is anchored at the best key, "
    "a dotted one has a fixed bandwidth, a dash-dotted one keeps the k nearest keys."
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser itself refuses any outside request
FOLDED = 12  # runs from which on their list is folded away
CPUS = ("x86_64", "AMD64", "aarch64", "arm64")  # what stands for the device of a run without a GPU


class Picture(NamedTuple):
    """A figure with the name of its file and what it shows."""

    name: str
    figure: Figure
    caption: str


class Section(NamedTuple):
    """One comparison with everything that is said and shown about it."""

    name: str
    comparison: Comparison
    finding: Finding
    pictures: dict[str, Picture]
    against_paper: list[str]
    departures: list[str]


def write_report(runs: Sequence[Run], out: Path | str, inspections: Sequence[Inspection] | None = None) -> Path:
    """Writes index.html, report.md and figures/ into the folder `out`, which is made if need be; returns the page's path."""
    sections = [_make_section(comparison) for comparison in compare(runs)]
    if not sections:
        names = ", ".join(run.source for run in runs) or "none"
        raise ValueError(f"no run has been evaluated (given: {names}); run `compactattn evaluate` on it first")
    inside = _draw_inside(inspections or [])
    out = Path(out)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for picture in [*(p for section in sections for p in section.pictures.values()), *inside]:
        svg.save(picture.figure, out / "figures" / picture.name)
    (out / "report.md").write_text(_write_markdown(sections, inside, runs), encoding="utf-8")
    page = out / "index.html"
    page.write_text(_write_page(sections, inside, runs), encoding="utf-8")
    return page


# -- contents ------------------------------------------------------------------------------------


def _make_section(comparison: Comparison) -> Section:
    name = _slug(f"{comparison.task}-{comparison.longest}" if not comparison.published else comparison.task)
    name += "" if comparison.mode == MODES[0] else f"-{_slug(comparison.mode)}"
    return Section(
        name, comparison, find(comparison), _draw(comparison, name), hold_against_paper(comparison), list_departures(comparison)
    )


def _draw(comparison: Comparison, name: str) -> dict[str, Picture]:
    caption = f"Exact match on {comparison.title} against the length of the source, {comparison.mode}. {LOOKS}"
    if figures.shows_bands(comparison):
        single = any(cell.seeds == 1 for line in comparison.lines for cell in line.cells.values())
        caption += f" Bands: 95 % interval of the mean over seeds{', or of one seed over test samples' if single else ''}."
    pictures = {"extrapolation": Picture(f"{name}-extrapolation", figures.draw_extrapolation(comparison), caption)}
    if hold_against_paper(comparison):
        caption = "Each kernel alone: our means and the paper's. The runs differ in their training, as listed below."
        pictures["paper"] = Picture(f"{name}-paper", figures.draw_against_paper(comparison), caption)
    training = figures.draw_training(comparison) if comparison.mode == MODES[0] else None
    if training is not None:
        caption = (
            f"Training loss on {comparison.title}, each point the mean of a stretch of logged steps; one line for each run."
        )
        pictures["training"] = Picture(f"{name}-training", training, caption)
    return pictures


def _draw_inside(inspections: Sequence[Inspection]) -> list[Picture]:
    if not inspections:
        return []
    weights = (
        "Weights of one head on one test sequence: the head that looks at the fewest keys. "
        "Blank cells are zero to the last bit."
    )
    support = (
        "Keys with non-zero weight against the position of the query: the median head, and the range of all heads. "
        "The grey line is every key so far."
    )
    return [
        Picture("attention", maps.draw_attention(inspections), weights),
        Picture("support", maps.draw_support(inspections), support),
        Picture("heads", maps.draw_heads(inspections), "Keys used and bandwidth, for every head at every position."),
    ]


def _slug(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-") or "task"


def _title(section: Section) -> str:
    comparison = section.comparison
    return comparison.title if comparison.published else f"{comparison.title}, trained up to {comparison.longest}"


# -- HTML ----------------------------------------------------------------------------------------


def _write_page(sections: list[Section], inside: list[Picture], runs: Sequence[Run]) -> str:
    first = sections[0]
    style = palette.css_variables() + (files("compactattn.report") / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<a href="#{s.name}">{escape(_title(s))}{_mode_note(s)}</a>' for s in sections)
    links += '<a href="#inside">Attention from inside</a>' if inside else ""
    body = "\n".join(
        [
            f'<p class="kicker">{KICKER}</p><h1>{escape(first.finding.headline)}</h1>',
            _paragraph(first.finding.details, "lede"),
            f'<nav>{links}<a href="#made">How it was made</a></nav>',
            *(_write_section(section, section is first) for section in sections),
            _write_inside(inside),
            _write_making(sections, runs),
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{KICKER}: {escape(', '.join(dict.fromkeys(s.comparison.title for s in sections)))}</title>"
        f"<style>\n{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _mode_note(section: Section) -> str:
    return "" if section.comparison.mode == MODES[0] else f", {escape(section.comparison.mode)}"


def _write_section(section: Section, first: bool) -> str:
    comparison, pictures = section.comparison, section.pictures
    parts = [f'<section id="{section.name}"><h2>{escape(_title(section))}<small>{escape(comparison.mode)}</small></h2>']
    if not first:
        parts += [f'<p class="finding">{escape(section.finding.headline)}</p>', _paragraph(section.finding.details)]
    parts += [_show(pictures["extrapolation"]), tables.format_html(comparison, _colour)]
    if section.against_paper:
        parts += ["<h3>Beside the paper</h3>", _paragraph(section.against_paper)]
    parts += [_show(pictures["paper"])] if "paper" in pictures else []
    missing = comparison.not_run()
    parts += [_paragraph([f"Rows of the paper that were not run here: {', '.join(missing)}."])] if missing else []
    if comparison.mode == MODES[0]:
        parts += ["<h3>Where this departs from the paper</h3>", _list(section.departures)]
    if "training" in pictures:
        parts += ["<h3>Training</h3>", _show(pictures["training"])]
    return "\n".join([*parts, "</section>"])


def _write_inside(inside: list[Picture]) -> str:
    if not inside:
        return ""
    return '<section id="inside"><h2>Attention from inside</h2>' + "".join(map(_show, inside)) + "</section>"


def _write_making(sections: list[Section], runs: Sequence[Run]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in MAKING)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _list_runs(sections))
    total = sum(run.wall_seconds for run in runs)
    commands = list(dict.fromkeys(str(run.environment["command"]) for run in runs if run.environment.get("command")))
    listed = f"<pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
    configs = "".join(
        _fold(
            f"Config of {escape(line.label)}, {escape(section.comparison.title)}, seed {line.seeds[0]}",
            f"<pre>{escape(line.runs[0].config.to_json())}</pre>",
        )
        for section, line in _unique_lines(sections)
    )
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    summary = f"{count}, {_duration(total)} of training in all. Every number is from the files they wrote."
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    table = f'<div class="table runs"><div class="scroll">{table}</div></div>'
    configs = _fold("Configs", configs) if len(runs) > FOLDED else configs
    table = _fold("Every run", table) if len(runs) > FOLDED else table
    return f'<section id="made"><h2>How it was made</h2><p>{escape(summary)}</p>{listed}{table}{configs}</section>'


def _fold(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _show(picture: Picture) -> str:
    drawn = svg.embed(picture.figure, picture.name, picture.caption)
    return f"<figure>{drawn}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _paragraph(sentences: Sequence[str], style: str = "") -> str:
    return f"<p{f' class={style}' if style else ''}>{escape(' '.join(sentences))}</p>" if sentences else ""


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _colour(line: Line) -> str:
    return palette.css_colour(palette.look_of(line.variant).colour)


# -- how it was made -----------------------------------------------------------------------------

MAKING = ("Task", "Variant", "Seed", "Steps", "Batch", "Precision", "Wall time", "Hardware", "Torch", "Commit", "Started")


def _unique_lines(sections: list[Section]) -> list[tuple[Section, Line]]:
    """Each line once, although it may be compared in two modes."""
    found: list[tuple[Section, Line]] = []
    seen: set[str] = set()
    for section in sections:
        for line in section.comparison.lines:
            new = tuple(run for run in line.runs if run.config.to_json() not in seen)
            seen.update(run.config.to_json() for run in new)
            found += [(section, replace(line, runs=new))] if new else []
    return found


def _list_runs(sections: list[Section]) -> list[list[str]]:
    return [
        [
            section.comparison.title,
            line.label,
            str(run.config.seed),
            _steps(run),
            f"{run.config.training.batch:,}",
            _precision(run),
            _duration(run.wall_seconds),
            _hardware(run),
            str(run.environment.get("torch") or "–"),
            _commit(run),
            str(run.environment.get("started") or "–"),
        ]
        for section, line in _unique_lines(sections)
        for run in line.runs
    ]


def _steps(run: Run) -> str:
    """The steps done, and those evaluated where they are others."""
    evaluated = {row.step for row in run.latest} - {run.steps}
    return f"{run.steps:,}" + (f", evaluated at {span(evaluated)}" if evaluated else "")


def _precision(run: Run) -> str:
    """The precision of training, and that of the evaluation where it is another."""
    trained = run.config.training.precision
    others = sorted({row.precision for row in run.latest} - {"", trained})
    return trained + (f", evaluated in {' and '.join(others)}" if others else "")


def _hardware(run: Run) -> str:
    device, processes, threads = (run.environment.get(name) for name in ("device", "processes", "threads"))
    text = str(device or "–") + (f" × {processes}" if processes and processes != 1 else "")
    return f"{text}, {threads} {'thread' if threads == 1 else 'threads'}" if device in CPUS and threads else text


def _commit(run: Run) -> str:
    commit = str(run.environment.get("commit") or "–")
    return commit[:10] + ("+" if commit.endswith("+") else "")


def _duration(seconds: float) -> str:
    if not seconds:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# -- Markdown ------------------------------------------------------------------------------------


def _write_markdown(sections: list[Section], inside: list[Picture], runs: Sequence[Run]) -> str:
    parts = [f"# {KICKER}"]
    for section in sections:
        comparison = section.comparison
        parts += [f"## {_plain(_title(section))} ({comparison.mode})", f"**{_plain(section.finding.headline)}**"]
        parts += [_plain(" ".join(section.finding.details)), _link(section.pictures["extrapolation"])]
        parts += [_plain(tables.describe(comparison)), tables.format_markdown(comparison), " ".join(section.against_paper)]
        parts += [_link(picture) for name, picture in section.pictures.items() if name != "extrapolation"]
        parts += ["Departures from the paper:\n\n" + "\n".join(f"- {_plain(note)}" for note in section.departures)]
    parts += ["## Attention from inside", *map(_link, inside)] if inside else []
    rows = [MAKING, tuple("---" for _ in MAKING), *_list_runs(sections)]
    parts += ["## How it was made", "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in rows)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _link(picture: Picture) -> str:
    return f"![{_plain(picture.caption)}](figures/{picture.name}.png)"


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")
