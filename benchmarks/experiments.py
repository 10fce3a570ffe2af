"""The sections of docs/experiments.md that hold results, written from the files under results/ in the words of the report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compactattn.bench.results import format_markdown as table
from compactattn.data.regbench import load_regbench
from compactattn.experiments import in_context
from compactattn.report.page import mark_down
from compactattn.report.runs import Run, load
from compactattn.report.sections import Grid, make_sections

ROOT = Path(__file__).parent.parent
NONE = "No results yet."


def load_all(folder: str) -> list[Run]:
    """The runs of a folder of results; none where it holds no file."""
    path = ROOT / "results" / folder
    return load([path]) if any(path.glob("*.jsonl")) else []


def results_section(folder: str, level: int, titled: bool = True) -> str:
    """Every comparison that the files of a folder allow, in the words of the report but without what it folds away."""
    parts = []
    for section in make_sections(load_all(folder), draw=False):
        parts += [f"{'#' * level} {section.title}, {section.note}"] if titled else []
        parts += [f"**{section.finding.headline}** {' '.join(section.finding.details)}"]
        parts += [mark_down(part, level + 1) for part in section.parts if not (isinstance(part, Grid) and part.folded)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) or NONE


def references_section() -> str:
    """What needs no training, on the published test set."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_context.score_references(load_regbench(folder=Path(folder)).test)
    rows = [[name, f"{100 * score['accuracy']:.1f}", f"{100 * score['tvd']:.1f}"] for name, score in found.items()]
    return table(["without training", "accuracy, %", "TVD, %"], rows)
