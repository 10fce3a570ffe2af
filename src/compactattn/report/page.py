"""The report: one HTML page that needs nothing from outside, and beside it the same as Markdown and the figures as files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from compactattn.report import attended, maps, palette, svg
from compactattn.report.facts import count_parameters, format_duration
from compactattn.report.inspection import Inspection
from compactattn.report.lines import Line, is_interrupted, span
from compactattn.report.paper import name_kernel
from compactattn.report.runs import Run
from compactattn.report.sections import (
    Fold,
    Grid,
    Heading,
    Items,
    Part,
    Picture,
    Section,
    Sentences,
    list_pictures,
    make_sections,
    name_task,
)
from compactattn.report.tables import fold
from compactattn.report.texts import HOW, show_texts

NOTHING_INSIDE = (
    "Attention from inside is not shown: it takes the weights of a Memory Mosaic, which run folders hold and files of "
    "results do not."
)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # the browser itself refuses any outside request
FOLDED = 12  # runs from which on their list is folded away
TIMES = "Times are of training alone, without validation and tests."
CPUS = ("x86_64", "AMD64", "aarch64", "arm64")  # what stands for the device of a run without a GPU


def write_report(
    runs: Sequence[Run], out: Path | str, inspections: Sequence[Inspection] = (), missing: Sequence[str] = ()
) -> Path:
    """Writes index.html, report.md and figures/ into the folder `out`, which is made if need be; returns the page's path.

    `missing` are sentences on the runs that are not looked into, and why.
    """
    check_evaluated(runs)
    sections = make_sections(runs)
    texts, example = show_texts(runs), _draw_inside(inspections)
    heading = [Heading("The first test example")] if texts and example else []
    inside = [*texts, *heading, *example, *([Sentences(missing)] if missing else [])]
    out = Path(out)
    (out / "figures").mkdir(parents=True, exist_ok=True)
    for picture in [*(picture for section in sections for picture in section.pictures), *list_pictures(inside)]:
        svg.save(picture.figure, out / "figures" / picture.name)
    (out / "report.md").write_text(_write_markdown(sections, inside, runs), encoding="utf-8")
    page = out / "index.html"
    page.write_text(_write_page(sections, inside, runs), encoding="utf-8")
    return page


def check_evaluated(runs: Sequence[Run]) -> None:
    """A ValueError where there is nothing to report."""
    if not any(run.evaluation for run in runs):
        names = ", ".join(run.source for run in runs) or "none"
        first = "run `compactattn evaluate` on it first"
        if any(is_interrupted(run) for run in runs):
            first = "first go on with what was stopped, by the command that began it or by `compactattn resume`"
        raise ValueError(f"no run has been evaluated (given: {names}); {first}")


# -- contents ------------------------------------------------------------------------------------


def _draw_inside(inspections: Sequence[Inspection]) -> list[Part]:
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
    named = [f"{name_kernel(one.kernel)}, {one.run}, trained on {one.subject}" for one in inspections if one.run]
    return [
        *([Sentences([f"The last layer, on the first test example of the run: {'; '.join(named)}.", HOW])] if named else []),
        Picture("attention", maps.draw_attention(inspections), weights),
        Picture("support", maps.draw_support(inspections), support),
        Picture("heads", maps.draw_heads(inspections), "Keys used and bandwidth, for every head at every position."),
        *_list_words(inspections),
    ]


def _list_words(inspections: Sequence[Inspection]) -> list[Part]:
    """Which tokens each head used, a table for each kernel, folded away on the page."""
    grids = [
        Grid(
            fold(escape(f"{name_kernel(one.kernel)}, layer {one.layer + 1}"), attended.format_html(one.summary, one.layer)),
            attended.format_markdown(one.summary, one.layer),
            f"{name_kernel(one.kernel)}. {attended.describe(one.summary, one.layer)}",
        )
        for one in inspections
        if one.summary is not None
    ]
    return [Heading("The tokens that each head used"), *grids] if grids else []


# -- HTML ----------------------------------------------------------------------------------------


def _write_page(sections: list[Section], inside: list[Part], runs: Sequence[Run]) -> str:
    first = sections[0]
    style = palette.css_variables() + (files("compactattn.report") / "page.css").read_text(encoding="utf-8")
    titles = [f"{name}: {', '.join(subjects)}" for name, subjects in _list_experiments(sections).items()]
    links = "".join(f'<a href="#{s.name}">{escape(s.link)}</a>' for s in sections)
    links += '<a href="#inside">Attention from inside</a>' if inside else ""
    body = "\n".join(
        [
            f'<p class="kicker">{escape(" · ".join(_list_experiments(sections)))}</p><h1>{escape(first.finding.headline)}</h1>',
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
        f"<title>{escape('; '.join(titles))}</title>"
        f"<style>\n{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def _list_experiments(sections: list[Section]) -> dict[str, dict[str, None]]:
    """The experiments on the page, each with what its sections are about."""
    found: dict[str, dict[str, None]] = {}
    for section in sections:
        found.setdefault(section.experiment, {})[section.subject] = None
    return found


def _write_section(section: Section, first: bool) -> str:
    parts = [f'<section id="{section.name}"><h2>{escape(section.title)}<small>{escape(section.note)}</small></h2>']
    if not first:
        parts += [f'<p class="finding">{escape(section.finding.headline)}</p>', _paragraph(section.finding.details)]
    return "\n".join([*parts, *map(_write_part, section.parts), "</section>"])


def _write_part(part: Part) -> str:
    match part:
        case Picture():
            return _show(part)
        case Grid():
            return part.html
        case Heading():
            return f"<h3>{escape(part.text)}</h3>"
        case Sentences():
            return _paragraph(part.sentences)
        case Items():
            return _list(part.items)
        case Fold():
            return fold(escape(part.title), "".join(map(_write_part, part.parts)))


def _write_inside(inside: list[Part]) -> str:
    if not inside:
        return _paragraph([NOTHING_INSIDE])
    return '<section id="inside"><h2>Attention from inside</h2>' + "".join(map(_write_part, inside)) + "</section>"


def _write_making(sections: list[Section], runs: Sequence[Run]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in MAKING)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in _list_runs(sections))
    total = sum(run.cost.wall_seconds for run in runs)
    commands = _list_commands(runs)
    listed = f"<pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
    configs = "".join(
        fold(
            f"Config of {escape(line.label)}, {escape(name_task(section, line.runs[0]))}, seed {line.runs[0].config.seed}",
            f"<pre>{escape(line.runs[0].config.to_json())}</pre>",
        )
        for section, line in _unique_lines(sections)
    )
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    summary = f"{count}, {format_duration(total)} of training in all. {TIMES} Every number is from the files they wrote."
    shown = {id(run) for section in sections for line in section.lines for run in line.runs}
    left_out = [run for run in runs if not run.evaluation and id(run) not in shown]
    names = ", ".join(f"{run.source} ({run.failed})" if run.failed else run.source for run in left_out)
    summary += f" Not evaluated, so not shown: {names}." if names else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    table = f'<div class="table runs"><div class="scroll">{table}</div></div>'
    configs = fold("Configs", configs) if len(runs) > FOLDED else configs
    table = fold("Every run", table) if len(runs) > FOLDED else table
    return f'<section id="made"><h2>How it was made</h2><p>{escape(summary)}</p>{listed}{table}{configs}</section>'


def _show(picture: Picture) -> str:
    drawn = svg.embed(picture.figure, picture.name, picture.caption)
    return f"<figure>{drawn}<figcaption>{escape(picture.caption)}</figcaption></figure>"


def _paragraph(sentences: Sequence[str], style: str = "") -> str:
    return f"<p{f' class={style}' if style else ''}>{escape(' '.join(sentences))}</p>" if sentences else ""


def _list(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


# -- how it was made -----------------------------------------------------------------------------

MAKING = (
    "Task",
    "Variant",
    "Parameters",
    "Seed",
    "Steps",
    "Batch",
    "Rate",
    "Tokenizer",
    "Precision",
    "Training time",
    "Hardware",
    "Torch",
    "Commit",
    "Started",
)


def _unique_lines(sections: list[Section]) -> list[tuple[Section, Line[Any, Any, Any]]]:
    """Each line once, although it may be compared in two modes."""
    found: list[tuple[Section, Line[Any, Any, Any]]] = []
    seen: set[str] = set()
    for section in sections:
        for line in section.lines:
            new = tuple(run for run in line.runs if run.config.to_json() not in seen)
            seen.update(run.config.to_json() for run in new)
            found += [(section, replace(line, runs=new))] if new else []
    return found


def _list_runs(sections: list[Section]) -> list[list[str]]:
    return [
        [
            name_task(section, run),
            line.label,
            f"{count_parameters(run.config.model):,}",
            str(run.config.seed),
            _steps(run),
            f"{run.config.training.batch:,}",
            f"{run.config.training.rate:g}",
            str(run.config.data.get("tokenizer") or "–"),
            _precision(run),
            format_duration(run.cost.wall_seconds),
            _hardware(run),
            str(run.environment.get("torch") or "–"),
            _commit(run),
            str(run.environment.get("started") or "–"),
        ]
        for section, line in _unique_lines(sections)
        for run in line.runs
    ]


def _list_commands(runs: Sequence[Run]) -> list[str]:
    """The commands that made the runs, each once."""
    return list(dict.fromkeys(str(run.environment["command"]) for run in runs if run.environment.get("command")))


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


# -- Markdown ------------------------------------------------------------------------------------


def _write_markdown(sections: list[Section], inside: list[Part], runs: Sequence[Run]) -> str:
    parts = [f"# {' · '.join(_list_experiments(sections))}"]
    for section in sections:
        parts += [f"## {_plain(section.title)} ({_plain(section.note)})", f"**{_plain(section.finding.headline)}**"]
        parts += [_plain(" ".join(section.finding.details)), *map(mark_down, section.parts)]
    parts += ["## Attention from inside", *map(mark_down, inside)] if inside else [NOTHING_INSIDE]
    rows = [MAKING, tuple("---" for _ in MAKING), *_list_runs(sections)]
    parts += ["## How it was made", "\n".join(f"| {' | '.join(map(_plain, row))} |" for row in rows)]
    parts += [f"{TIMES} Commands:", mark_down(Items(commands))] if (commands := _list_commands(runs)) else [TIMES]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def mark_down(part: Part, level: int = 3, folder: str = "figures") -> str:
    """A part as Markdown, its heading at some level, its picture in some folder."""
    match part:
        case Picture():
            return _link(part, folder)
        case Grid():
            return f"{_plain(part.caption)}\n\n{part.markdown}"
        case Heading():
            return f"{'#' * level} {_plain(part.text)}"
        case Sentences():
            return _plain(" ".join(part.sentences))
        case Items():
            return "\n".join(f"- {_plain(item)}" for item in part.items)
        case Fold():
            return "\n\n".join(mark_down(one, level, folder).strip() for one in part.parts)


def _link(picture: Picture, folder: str) -> str:
    """The picture, and below it its caption, of which what stands in its place where it cannot be seen is the beginning."""
    caption = _plain(picture.caption)
    return f"![{re.split('[:;.]( |$)', caption)[0]}]({folder}/{picture.name}.png)\n\n{caption}"


def _plain(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "\\|")
