"""What a run attends to in a text, kept beside the run: every layer, head and position, with exact zeros left out."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compactattn.memory.inspection import HeadSummary, Look, Summary
from compactattn.training.config import RunError
from compactattn.training.files import replace_durably

INSPECTIONS = "inspections.jsonl"
LONGEST = 256  # tokens: a page has no room for the weights of more
MOST = 4096  # tokens that can be looked at: the weights of a layer are (heads, tokens, tokens)
DIGITS = 4  # of a weight or a bandwidth


def check_length(words: Sequence[str], save: bool) -> None:
    """A ValueError where a text has more tokens than can be looked at or, if it is to be kept, than a page can show."""
    most, purpose = (LONGEST, "kept for the report") if save else (MOST, "inspected")
    if len(words) > most:
        raise ValueError(f"a text of {len(words):,} tokens is too long to be {purpose} (at most {most:,}); shorten it")


def describe(text: str, summary: Summary, looks: Sequence[Look], step: int, *, unit: bool) -> dict[str, Any]:
    """A line of inspections.jsonl; where keys are of unit length, with the bandwidth of each head at each position."""
    layers = [
        [_describe_head(head, looks[head.layer], unit) for head in summary.of(layer)]
        for layer in dict.fromkeys(head.layer for head in summary.heads)
    ]
    return {"text": text, "words": list(summary.words), "position": summary.position, "step": step, "layers": layers}


def _describe_head(head: HeadSummary, look: Look, unit: bool) -> dict[str, Any]:
    rows = look.weights[0, head.head].cpu()
    used = [[[int(key), _shorten(float(w[key]))] for key in w.nonzero()[:, 0]] for w in rows]
    h = [_shorten(h) if math.isfinite(h) else None for h in head.bandwidth.tolist()]
    return {"zeros": head.zeros, "support": head.support, **({"bandwidth": h} if unit else {}), "used": used}


def _shorten(number: float) -> float:
    return float(f"{number:.{DIGITS}g}")


def save_inspection(folder: Path, line: dict[str, Any]) -> None:
    """Adds a line to those of a run, in place of an older one of the same text."""
    path = folder / INSPECTIONS
    try:
        lines = [*filter(None, path.read_text(encoding="utf-8").split("\n"))] if path.exists() else []
        kept = [older for older in lines if json.loads(older)["text"] != line["text"]]
        replace_durably(path, "".join(f"{one}\n" for one in [*kept, json.dumps(line)]).encode())
    except OSError as error:
        raise RunError(f"cannot write to {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is malformed ({error!r}); remove it and inspect again") from None
