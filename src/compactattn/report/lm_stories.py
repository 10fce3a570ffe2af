"""What the models write: a story of each variant, the best first, each after whose it is and how it was sampled."""

from __future__ import annotations

import re
from collections import Counter
from html import escape
from itertools import groupby

from compactattn.report.evaluations import Story
from compactattn.report.lines import name_line
from compactattn.report.lm_comparison import Comparison, Line, choose_story
from compactattn.report.tables import fold

IN_A_ROW, SHARE = 20, 0.2  # a word that stands more often than this in a row, or makes up more of a story, is a loop
DRAWN_OUT = 40  # characters: "Nooo!" and the like are no longer
PIECES = re.compile(rf"(\S{{1,8}}?)\1{{{IN_A_ROW},}}")  # a piece of a word, more often in a row than a word may stand
ONE_WORD, PIECE = "one word", "a piece of a word"


def choose_stories(comparison: Comparison) -> tuple[list[tuple[Line, Story]], list[tuple[Line, Story]]]:
    """The stories to be seen first, and the others: the first of each variant, by validation loss, those without one last.

    To be seen first are that of the best model, where it is no Memory Mosaic also that of the best mosaic, and where it was cut
    off also that of the best model whose story came to its end.
    """
    told = _rank_stories(comparison)
    mosaic = next((pair for pair in told if pair[0].variant.architecture == "mosaic"), None)
    firsts = [*told[:1], *([mosaic] if mosaic else []), *([ended] if (ended := _find_ended(told)) else [])]
    seen = [pair for pair in told if any(pair is one for one in firsts)]
    return seen, [pair for pair in told if not any(pair is one for one in seen)]


def _rank_stories(comparison: Comparison) -> list[tuple[Line, Story]]:
    """The first story of each variant that wrote any, the lowest loss first."""
    ranked = comparison.on(comparison.home)
    ranked += [line for line in comparison.lines if line not in ranked]
    return [(line, story) for line in ranked if (story := choose_story(line)) is not None]


def _find_ended(told: list[tuple[Line, Story]]) -> tuple[Line, Story] | None:
    """The first story that came to its end, if the very first was cut off and another one was not."""
    return next((pair for pair in told if pair[1].ended), None) if told and told[0][1].ended is False else None


def find_loop(story: Story) -> str:
    """How often the word stands there that a story repeats over and over, of how many; nothing where there is none.

    A common word of a short text is none: a share counts only of a word that stands there more than 20 times.
    """
    words = story.text.split()
    if not words:
        return ""
    longest, repeated = max((len(list(group)), word) for word, group in groupby(words))
    (often, times), *_ = Counter(words).most_common(1)
    word = repeated if longest > IN_A_ROW else often if times > max(IN_A_ROW, SHARE * len(words)) else None
    return "" if word is None else f"{words.count(word):,} of {len(words):,} words"


def find_stutter(story: Story) -> str:
    """How often a piece of up to 8 characters stands in a row inside one word; nothing where none does over and over.

    Drawn-out words and lines of dashes are none: it takes more than 20 times and 40 characters, and a piece without letters
    and digits must make up more than a fifth of the story.
    """
    runs = [(len(run[0]), run[1]) for run in PIECES.finditer(story.text) if len(run[0]) > DRAWN_OUT]
    share = SHARE * len(story.text)
    size, piece = max(((size, piece) for size, piece in runs if size > share or any(map(str.isalnum, piece))), default=(0, ""))
    if not piece:
        return ""
    return f"{len(piece)} character{'s' if len(piece) > 1 else ''} {size // len(piece):,} times in a row"


def find_repetition(story: Story) -> tuple[str, str] | None:
    """What a story repeats over and over, `ONE_WORD` or `PIECE`, and how often; nothing where it does not."""
    found = ((ONE_WORD, find_loop(story)), (PIECE, find_stutter(story)))
    return next(((what, often) for what, often in found if often), None)


def state_loops(comparison: Comparison) -> list[str]:
    """Whose stories repeat something over and over, of the models that wrote any: a sentence for mosaics, one for others."""
    sentences = []
    for mosaic in (True, False):
        lines = [line for line in comparison.lines if (line.variant.architecture == "mosaic") is mosaic]
        told = [(line, [story for run in line.runs for story in run.stories]) for line in lines]
        told = [(line, stories) for line, stories in told if stories]
        found = [(line.label, next(filter(None, map(find_repetition, stories)), None)) for line, stories in told]
        loops = [(label, *repetition) for label, repetition in found if repetition is not None]
        kind = ("Memory Mosaic" if mosaic else "other model") + ("s" if len(told) > 1 else "")
        what = " or ".join(one for one in (ONE_WORD, PIECE) if any(one == repeated for _, repeated, _ in loops))
        names = ", ".join(f"{label} ({often})" for label, _, often in loops)
        start = f"Stories of {len(loops)} of {len(told)} {kind} with {comparison.depth}"
        sentences += [f"{start} repeat {what} over and over: {names}."] if loops else []
    return sentences


def describe_story(comparison: Comparison, line: Line, story: Story) -> str:
    """Who wrote it, and how it was sampled."""
    loss = f", loss {line.cells[comparison.home].loss.mean:.3f}" if comparison.home in line.cells else ""
    drawn = "the likeliest token each time" if story.temperature == 0 else f"temperature {story.temperature:g}"
    if story.temperature:
        drawn += f", top-k {story.top_k}" if story.top_k else ""
        drawn += f", top-p {story.top_p:g}" if story.top_p < 1 else ""
        drawn += f", min-p {story.min_p:g}" if story.min_p else ""
        drawn += f", drawn with seed {story.seed}" + (f" in row {story.row}" if story.row else "")
    step = f", after {story.step:,} steps" if story.step else ""
    kept = sum(len(run.stories) for run in line.runs)
    end = f"; one of {kept} stories that were saved" if kept > 1 else ""
    end += f"; one word, over and over, makes up {loop}" if (loop := find_loop(story)) else ""
    end += f"; inside one word it repeats {stutter}" if (stutter := find_stutter(story)) else ""
    end += "; cut off before its end" if story.ended is False else ""
    ended = _find_ended(_rank_stories(comparison))
    end += "; of the best model whose story came to its end" if ended and ended[1] is story else ""
    return f"{name_line(line)}{loss}{step}. Sampled with {drawn}{end}{'; the prompt is in bold' if story.prompt else ''}."


def format_html(comparison: Comparison, line: Line, story: Story, folded: bool = False) -> str:
    """The story as a quiet block of HTML, folded away where it is not the one to be seen first."""
    caption = escape(describe_story(comparison, line, story))
    text = f"<blockquote>{f'<b>{escape(story.prompt)}</b>' if story.prompt else ''}{escape(story.text.rstrip())}</blockquote>"
    block = f'<div class="story"><p class="caption">{caption}</p>{text}</div>'
    return fold(escape(line.label), block) if folded else block


def format_markdown(comparison: Comparison, line: Line, story: Story, folded: bool = False) -> str:
    """The story as a quotation, folded away as on the page, which Markdown leaves to HTML."""
    prompt, rest = _escape_markdown(story.prompt), _escape_markdown(story.text.rstrip())
    bold = re.sub(r"\S(.*\S)?", r"**\g<0>**", prompt)  # each line without the space around it, which Markdown would not take
    told = (bold + rest).strip().splitlines()
    quoted = "\n".join(f"> {text}".rstrip() for text in told)
    block = f"{describe_story(comparison, line, story)}\n\n{quoted}\n"
    return fold(escape(line.label), f"\n\n{block}\n") if folded else block


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text.replace("&", "&amp;").replace("<", "&lt;"))
