"""What a run tells besides its results: how large its model is, and how long it took."""

from __future__ import annotations

from functools import cache

import torch

from compactattn.models import language_model
from compactattn.models.config import ModelConfig

ALIKE = 0.1  # of the smaller of two models, up to which they count as equally large


@cache
def count_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return language_model.count_parameters(language_model.build(model))


def state_sizes(one: ModelConfig, other: ModelConfig) -> str:
    """The parameters of two models, where they are further apart than `ALIKE`: "230,200 parameters against 446,080"."""
    ours, theirs = count_parameters(one), count_parameters(other)
    return f"{ours:,} parameters against {theirs:,}" if abs(ours - theirs) > ALIKE * min(ours, theirs) else ""


def format_duration(seconds: float) -> str:
    if not seconds:
        return "–"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
