"""The sections of docs/experiments.md that hold results, written from the files under results/ in the words of the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compactattn.bench.results import format_markdown as table
from compactattn.data.regbench import load_regbench
from compactattn.experiments import in_context
from compactattn.report import (
    lm_comparison,
    lm_finding,
    lm_stories,
    lm_tables,
    regbench_comparison,
    regbench_finding,
    regbench_tables,
    tables,
)
from compactattn.report.comparison import compare
from compactattn.report.finding import find, hold_against_paper, list_departures
from compactattn.report.runs import Run, load

ROOT = Path(__file__).parent.parent
NONE = "No results yet."


def load_all(folder: str) -> list[Run]:
    """The runs of a folder of results; none where it holds no file."""
    path = ROOT / "results" / folder
    return load([path]) if any(path.glob("*.jsonl")) else []


def comparisons_section(folder: str, headings: bool = True) -> str:
    """Every comparison that the files of a folder allow, in the words of the report."""
    parts = []
    for comparison in compare(load([ROOT / "results" / folder])):
        found = find(comparison)
        parts += [f"### {comparison.title}, {comparison.mode}"] if headings else []
        parts += [f"**{found.headline}** {' '.join(found.details)}"]
        parts += [tables.describe(comparison), tables.format_markdown(comparison), " ".join(hold_against_paper(comparison))]
        missing = comparison.not_run()
        parts += [f"Rows of the paper that were not run: {', '.join(missing)}."] if missing else []
        if comparison.published:
            parts += ["Departures from the paper:\n\n" + "\n".join(f"- {note}" for note in list_departures(comparison))]
    return "\n\n".join(part for part in parts if part)


def lm_section() -> str:
    """Every depth of language modelling from the files of results/lm, in the words of the report; with the best one's story."""
    parts = []
    for comparison in lm_comparison.compare(load_all("lm")):
        found, departures = lm_finding.find(comparison), lm_finding.list_departures(comparison)
        parts += [f"#### {comparison.title}, {comparison.steps:,} steps", f"**{found.headline}** {' '.join(found.details)}"]
        parts += [lm_tables.describe(comparison), lm_tables.format_markdown(comparison)]
        parts += [f"From the lowest loss up:\n\n{_list(lm_finding.rank(comparison))}"]
        kernels, claims = lm_finding.list_kernels(comparison), lm_finding.hold_against_paper(comparison)
        parts += [f"Compact kernels against Gaussian attention:\n\n{_list(kernels)}"] if kernels else []
        parts += [" ".join(lm_finding.state_published(comparison)), _list(claims)]
        missing = comparison.not_run()
        parts += [f"Of the paper, not run: {', '.join(missing)}."] if missing else []
        parts += [f"Departures from the paper:\n\n{_list(departures)}"] if departures else []
        stories = lm_stories.choose_stories(comparison)
        parts += [f"What the best of them writes. {lm_stories.format_markdown(comparison, *stories[0])}"] if stories else []
    return "\n\n".join(part.rstrip() for part in parts if part) or NONE


def regbench_section() -> str:
    """Table 1 from the files of results/regbench, in the words of the report."""
    parts = []
    for comparison in regbench_comparison.compare(load_all("regbench")):
        found, gaps = regbench_finding.find(comparison), regbench_finding.list_gaps(comparison)
        changed = "".join(f", {name} {value}" for name, value in comparison.changes.items())
        parts += [f"#### {comparison.title}{changed}, {comparison.split} split"]
        parts += [f"**{found.headline}** {' '.join(found.details)}", _list(regbench_finding.list_kernels(comparison))]
        parts += [regbench_tables.describe(comparison), regbench_tables.format_markdown(comparison)]
        parts += [" ".join(regbench_finding.hold_against_paper(comparison))]
        missing = comparison.not_run()
        parts += [f"Of the paper, not run: {', '.join(missing)}."] if missing else []
        parts += [f"More than two points from the paper:\n\n{_list(gaps)}"] if gaps else []
        departures = regbench_finding.list_departures(comparison)
        parts += [f"Departures from the paper:\n\n{_list(departures)}"] if departures else []
    return "\n\n".join(part for part in parts if part) or NONE


def references_section() -> str:
    """What needs no training, on the published test set."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_context.score_references(load_regbench(folder=Path(folder)).test)
    rows = [[name, f"{100 * score['accuracy']:.1f}", f"{100 * score['tvd']:.1f}"] for name, score in found.items()]
    return table(["without training", "accuracy, %", "TVD, %"], rows)


def _list(items: list[str]) -> str:
    return "\n".join(f"- {item}" for item in items)
