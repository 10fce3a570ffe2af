"""Where files of the user are kept that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$COMPACTATTN_CACHE, else $XDG_CACHE_HOME/compactattn, else ~/.cache/compactattn."""
    if chosen := os.environ.get("COMPACTATTN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compactattn"
