"""Figures inside a page, as SVG that asks for nothing from outside and follows the page's theme, and beside it, as files."""

from __future__ import annotations

import io
import re
from html import escape
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from compactattn.report.gallery import STYLE
from compactattn.report.palette import DARK, css_colour


def embed(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element for an HTML page. `name` keeps its ids apart from those of other figures."""
    buffer = io.StringIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'(<image\b[^>]*?) id="[^"]*"', r"\1", text)  # two equal images would share one
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="|url\()#', rf"\1#{name}-", text)
    for colour in DARK:
        text = text.replace(colour, css_colour(colour))
    width, height = figure.get_size_inches()
    opening = (
        f'<svg role="img" aria-label="{escape(description)}" viewBox="0 0 {72 * width:g} {72 * height:g}" '
        f'style="max-width:{96 * width * 1.4:.0f}px">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: opening, text, count=1)


def save(figure: Figure, stem: Path) -> None:
    """Writes stem.svg and stem.png, the same bytes every time."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(stem.with_name(f"{stem.name}.svg"), metadata={"Date": None})
        figure.savefig(stem.with_name(f"{stem.name}.png"), dpi=160)
