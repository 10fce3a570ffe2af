"""Which tokens each head of a layer used at one position, as a table for either page."""

from __future__ import annotations

from html import escape

from compactattn.memory.inspection import HeadSummary, Summary, Used
from compactattn.report.tables import NONE, join_html, join_markdown

MOST = 8  # tokens listed of a head
COLUMNS = ("Head", "Zero weights", "Keys here", "h here", "Tokens used")


def describe(summary: Summary, layer: int) -> str:
    """What the table shows, and how sparse the layer is over the whole text."""
    whole = summary.layers[layer]
    return (
        f"What each head of layer {layer + 1} looked back at from token {summary.position + 1} of {len(summary.words)}, "
        f"“{name_word(summary.words[summary.position])}”: token, position and weight, the heaviest first; what is neither "
        f"listed nor counted is zero to the last bit. Over the whole text {100 * whole.zeros:.1f} % of the layer's weights "
        f"are zero, and a query uses {whole.support:.1f} keys."
    )


def format_html(summary: Summary, layer: int) -> str:
    """The table as HTML: each word on a ground as dark as its weight."""
    *names, last = COLUMNS
    head = "".join(f'<th scope="col">{name}</th>' for name in names) + f'<th scope="col" class="used">{last}</th>'
    rows = (
        f'<tr><th scope="row">{number}</th><td>{zeros}</td><td>{keys}</td><td>{h}</td>'
        f'<td class="used">{"".join(map(_mark, one.used[:MOST])) or "none"}{escape(_rest(one.used))}</td></tr>'
        for one in summary.of(layer)
        for number, zeros, keys, h in [_numbers(one, summary.position)]
    )
    return join_html(describe(summary, layer), f"<tr>{head}</tr>", "".join(rows))


def format_markdown(summary: Summary, layer: int) -> str:
    rows: list[list[str]] = [list(COLUMNS), ["---:"] * (len(COLUMNS) - 1) + ["---"]]
    for one in summary.of(layer):
        words = ", ".join(f"{_code(word)} {format_weight(word.weight)}" for word in one.used[:MOST]) or "none"
        rows.append([*_numbers(one, summary.position), words + _rest(one.used)])
    return join_markdown(rows)


def _numbers(one: HeadSummary, position: int) -> list[str]:
    h = float(one.bandwidth[position])
    return [str(one.head + 1), f"{100 * one.zeros:.1f} %", str(len(one.used)), f"{h:.2f}" if h == h else NONE]


def _mark(word: Used) -> str:
    share = word.weight**0.5  # small weights would all look alike
    return (
        f'<span style="--share:{share:.3f}">{escape(name_word(word.word))}<sub>{word.position + 1}</sub></span> '
        f"{escape(format_weight(word.weight))} "
    )


def _code(word: Used) -> str:
    return f"{name_word(word.word).replace('<', '&lt;')}@{word.position + 1}"


def _rest(used: tuple[Used, ...]) -> str:
    others = used[MOST:]
    return f" and {len(others)} more: {format_weight(sum(word.weight for word in others))}" if others else ""


def format_weight(weight: float) -> str:
    """A weight that is not zero, in four characters."""
    return f"{weight:.2f}" if weight >= 0.005 else "<.01"


def name_word(word: str) -> str:
    """A word in a line of its own: without the space before it, and with signs for what does not print."""
    shown = "".join({"\n": "↵", "\t": "⇥"}.get(sign, sign if sign.isprintable() else "�") for sign in word)
    return shown.strip(" ") or "␣" * len(shown)
