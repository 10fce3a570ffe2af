"""The sections of docs/experiments.md that hold results, written from the files under results/ in the words of the report."""

from __future__ import annotations

import hashlib
import io
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from compactattn.bench.results import format_markdown as table
from compactattn.data.regbench import load_regbench
from compactattn.experiments import in_context
from compactattn.report.gallery import STYLE
from compactattn.report.page import mark_down
from compactattn.report.runs import Run, load
from compactattn.report.sections import STORIES, Grid, Heading, Part, Section, make_sections

ROOT = Path(__file__).parent.parent
NONE = "No results yet."
IMAGES, COLOURS = "images", 64  # where pictures lie, beside the documents, and how many colours they have


def load_all(folder: str) -> list[Run]:
    """The runs of a folder of results; none where it holds no file."""
    path = ROOT / "results" / folder
    return load([path]) if any(path.glob("*.jsonl")) else []


def results_section(folder: str, level: int, titled: bool = True, pictures: Collection[str] = ()) -> str:
    """Every comparison that the files of a folder allow, in the words of the report but without what it folds away.

    Of the pictures those named are linked. Stories take much room: those of the deepest models stand for the others.
    """
    parts, sections = [], make_sections(load_all(folder), pictures)
    deepest = max((_count_layers(section) for section in sections), default=0)
    for section in sections:
        parts += [f"{'#' * level} {section.title}, {section.note}"] if titled else []
        parts += [f"**{section.finding.headline}** {' '.join(section.finding.details)}"]
        shown = section.parts if _count_layers(section) == deepest else _leave_out(STORIES, section.parts)
        parts += [mark_down(part, level + 1, IMAGES) for part in shown if not (isinstance(part, Grid) and part.folded)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) or NONE


def draw_pictures(folder: str, pictures: Collection[str]) -> dict[Path, bytes]:
    """The same pictures as files, the same bytes every time."""
    drawn = [picture for section in make_sections(load_all(folder), pictures) for picture in section.pictures]
    return {ROOT / "docs" / IMAGES / f"{one.name}.png": _paint(one.figure, identify(folder)) for one in drawn}


def identify(folder: str) -> str:
    """The name and the checksum of the files of a folder of results, which a picture carries to tell what it is drawn from."""
    files = sorted((ROOT / "results" / folder).glob("*.jsonl"))
    return f"results/{folder} sha256 {hashlib.sha256(b''.join(path.read_bytes() for path in files)).hexdigest()}"


def _paint(figure: Figure, source: str) -> bytes:
    """A PNG that notes its source; with few colours it is a quarter of the size."""
    drawn, small, note = io.BytesIO(), io.BytesIO(), PngInfo()
    note.add_text("Source", source)
    with matplotlib.rc_context(STYLE):
        figure.savefig(drawn, format="png", dpi=160)
    Image.open(drawn).convert("RGB").quantize(COLOURS).save(small, "PNG", optimize=True, pnginfo=note)
    return small.getvalue()


def _count_layers(section: Section) -> int:
    return max(run.config.model.layers for line in section.lines for run in line.runs)


def _leave_out(heading: str, parts: Iterable[Part]) -> list[Part]:
    """The parts without a heading and what stands below it."""
    kept: list[Part] = []
    below = False
    for part in parts:
        below = part.text == heading if isinstance(part, Heading) else below
        kept += [] if below else [part]
    return kept


def references_section() -> str:
    """What needs no training, on the published test set."""
    with tempfile.TemporaryDirectory() as folder:
        found = in_context.score_references(load_regbench(folder=Path(folder)).test)
    rows = [[name, f"{100 * score['accuracy']:.1f}", f"{100 * score['tvd']:.1f}"] for name, score in found.items()]
    return table(["without training", "accuracy, %", "TVD, %"], rows)
