"""The records beside the tokens of a corpus, checked as they are read: what is used of them is there, and of its type."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VERSION = 1  # of the folder: raise it when a change makes other bytes of the same text
META, JOURNAL, RANKS = "meta.json", "journal.jsonl", "ranks.tiktoken"
SPLITS = ("train", "validation")

# a shape is a dictionary of shapes, a list with the shape of each item, or the name of a type
NUMBER, TEXT, TEXT_OR_NULL, SWITCH = "a whole number of at least 0", "text", "text or null", "true or false"
TALLY = {"documents": NUMBER, "tokens": NUMBER, "bytes": NUMBER}
MARK = {"source": NUMBER, "place": NUMBER, "opens": SWITCH, "begun": NUMBER, **dict.fromkeys(SPLITS, TALLY)}
CORPUS = {
    "tokenizer": {"name": TEXT, "sha256": TEXT, "vocab": NUMBER, "end": NUMBER},
    "sources": [{"split": TEXT_OR_NULL}],
    "splits": dict.fromkeys(SPLITS, TALLY | {"file": TEXT, "sha256": TEXT}),
}


def read_meta(folder: Path) -> dict[str, Any]:
    """What meta.json holds; of another version of the format only that it is a dictionary is known."""
    path = folder / META
    meta = parse_record(path, path.read_bytes())
    if meta.get("version") == VERSION and (why := find_defect(meta, CORPUS)):
        raise damaged(path, why)
    return meta


def parse_record(path: Path, content: bytes) -> dict[str, Any]:
    """The dictionary that stands in a file of that path; raises a ValueError if it is none."""
    try:
        record = json.loads(content)
    except ValueError as error:
        raise damaged(path, f"it is no JSON: {error}") from None
    if why := find_defect(record, {}):
        raise damaged(path, why)
    return record


def damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{str(path)!r} is damaged ({why}); delete the folder and prepare the corpus again")


def find_defect(value: Any, shape: Any, path: str = "") -> str:
    """What is first missing from a JSON value or of a wrong type, as "splits.train is missing"; empty where nothing is."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{path or 'it'} is no dictionary"
        for name, inner in shape.items():
            inside = f"{path}.{name}" if path else name
            if why := find_defect(value[name], inner, inside) if name in value else f"{inside} is missing":
                return why
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{path} is no list"
        return next(filter(None, (find_defect(item, shape[0], f"{path}[{i}]") for i, item in enumerate(value))), "")
    return "" if _fits(value, shape) else f"{path} is {json.dumps(value)}, not {shape}"


def _fits(value: Any, name: str) -> bool:
    if name == NUMBER:
        return type(value) is int and value >= 0  # isinstance would take True for the number 1
    return isinstance(value, bool) if name == SWITCH else isinstance(value, str) or (name == TEXT_OR_NULL and value is None)
