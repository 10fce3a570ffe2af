"""Which tokens each head of a layer used at one position, as a table for either page."""

from __future__ import annotations

from html import escape

from compactattn.memory.inspection import HeadSummary, LayerSummary, Summary, Used
from compactattn.report.tables import NONE, join_html, join_markdown

MOST = 8  # tokens listed of a head
COLUMNS = ("Head", "Zero weights", "Keys here", "h here", "Tokens used")
LAYERS = ("Layer", "Zero weights", "Keys a query", "h, median")


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


def format_layers_html(summary: Summary, caption: str) -> str:
    """How sparse each layer is over the whole text, as HTML: the more zeros, the darker."""
    head = "".join(f'<th scope="col">{name}</th>' for name in _name_layer_columns(summary))
    rows = (
        f'<tr><th scope="row">{number}</th><td style="--share:{layer.zeros:.3f}">{zeros}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
        for layer in summary.layers
        for number, zeros, *cells in [_number_layer(summary, layer)]
    )
    return join_html(caption, f"<tr>{head}</tr>", "".join(rows))


def format_layers_markdown(summary: Summary) -> str:
    names = _name_layer_columns(summary)
    return join_markdown([names, ["---:"] * len(names), *(_number_layer(summary, layer) for layer in summary.layers)])


def _name_layer_columns(summary: Summary) -> list[str]:
    return list(LAYERS if has_bandwidth(summary) else LAYERS[:-1])


def _number_layer(summary: Summary, layer: LayerSummary) -> list[str]:
    h = [_write_bandwidth(layer.bandwidth)] if has_bandwidth(summary) else []
    return [str(layer.layer + 1), f"{100 * layer.zeros:.1f} %", f"{layer.support:.1f}", *h]


def has_bandwidth(summary: Summary) -> bool:
    """Whether h is known anywhere: it has a meaning for keys of unit length alone."""
    return any(bool(head.bandwidth.isfinite().any()) for head in summary.heads)


def format_strips(summary: Summary, layer: int) -> str:
    """The text once for each head of a layer, as HTML: a word that was used stands on a ground as dark as its weight."""
    shown = has_bandwidth(summary)
    names = [name for name in COLUMNS[:-1] if shown or name != "h here"]
    head = (
        "".join(f'<th scope="col">{name}</th>' for name in names) + '<th scope="col" class="used">What it looked back at</th>'
    )
    rows = (
        f'<tr><th scope="row">{number}</th>'
        + "".join(f"<td>{cell}</td>" for cell in (zeros, keys, *([h] if shown else [])))
        + f'<td class="used strip">{_shade(summary, one)}</td></tr>'
        for one in summary.of(layer)
        for number, zeros, keys, h in [_numbers(one, summary.position)]
    )
    return join_html(describe_strips(summary, layer), f"<tr>{head}</tr>", "".join(rows))


def describe_strips(summary: Summary, layer: int) -> str:
    return (
        f"Layer {layer + 1}, from token {summary.position + 1} of {len(summary.words)}, "
        f"“{name_word(summary.words[summary.position])}”, which is underlined: the darker the ground of a token, the larger "
        "its weight; grey letters weigh nothing, to the last bit."
    )


def _shade(summary: Summary, one: HeadSummary) -> str:
    """The words of a text, those used by a head marked, with neighbours that were not in one piece."""
    weights = {word.position: word.weight for word in one.used}
    line, run, gap = [], "", _choose_gap(summary.words)
    for position, word in enumerate(summary.words):
        shown = escape(show_word(word))
        here = f"<u>{shown}</u>" if position == summary.position else shown
        if position not in weights:
            run += here + gap
            continue
        line += [f"<i>{run}</i>"] if run else []
        title = f"{name_word(word)}, token {position + 1}: {format_weight(weights[position])}"
        line.append(f'<span style="--share:{weights[position] ** 0.5:.3f}" title="{escape(title)}">{here}</span>')
        run = gap
    return "".join([*line, *([f"<i>{run}</i>"] if run else [])])


def _choose_gap(words: tuple[str, ...]) -> str:
    """What stands between words: nothing where they bring their own spaces or are letters, else a space."""
    return " " if any(len(word) > 1 for word in words) and not any(sign.isspace() for word in words for sign in word) else ""


def _numbers(one: HeadSummary, position: int) -> list[str]:
    h = _write_bandwidth(float(one.bandwidth[position]))
    return [str(one.head + 1), f"{100 * one.zeros:.1f} %", str(len(one.used)), h]


def _write_bandwidth(h: float) -> str:
    return f"{h:.2f}" if h == h else NONE


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
    shown = show_word(word)
    return shown.strip(" ") or "␣" * len(shown)


def show_word(word: str) -> str:
    """A word with signs for what does not print."""
    return "".join({"\n": "↵", "\t": "⇥"}.get(sign, sign if sign.isprintable() else "�") for sign in word)
