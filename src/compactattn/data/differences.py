"""What differs between two records, in words."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

ABSENT = "absent"
CHECKSUM = re.compile(r'"([0-9a-f]{8})[0-9a-f]{56}"')  # of which the first digits will do


def list_differences(before: Mapping[str, Any], after: Mapping[str, Any], ignore: Collection[str] = ()) -> list[str]:
    """Values that differ, as "training.rate: 0.001 → 0.002"; those whose path is in `ignore` may."""
    old, new = dict(_flatten(before, "")), dict(_flatten(after, ""))
    paths = [*old, *(path for path in new if path not in old)]
    return [
        CHECKSUM.sub(r'"\1…"', f"{path}: {old.get(path, ABSENT)} → {new.get(path, ABSENT)}")
        for path in paths
        if path not in ignore and old.get(path, ABSENT) != new.get(path, ABSENT)
    ]


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Path and JSON text of every value that is neither a dictionary nor a list of them, or is an empty one."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flatten(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value and all(isinstance(inner, Mapping) for inner in value):
        for number, inner in enumerate(value):
            yield from _flatten(inner, f"{path}[{number}]")
    else:
        yield path, json.dumps(value)
