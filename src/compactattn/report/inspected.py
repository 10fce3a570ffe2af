"""Texts that a run was inspected on, read from what `compactattn inspect --save` kept of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compactattn.memory.inspection import HeadSummary, Summary, Used
from compactattn.report.inspection import Inspection


@dataclass(frozen=True, eq=False)
class Inspected:
    """What every head of every layer attended to in a text."""

    text: str  # as it was typed; empty for the first of the test set
    step: int
    summary: Summary  # at the position that was asked for
    weights: list[np.ndarray]  # of each layer, (H, Q, K)

    @property
    def words(self) -> tuple[str, ...]:
        return self.summary.words

    def look(self, kernel: str, layer: int, head: int) -> Inspection:
        """The weights of a head, and keys used and bandwidth of its whole layer, ready to be drawn."""
        bandwidth = np.stack([one.bandwidth.numpy() for one in self.summary.of(layer)])
        support = (self.weights[layer] > 0).sum(-1)
        return Inspection(kernel, layer, head, self.weights[layer][head], support, bandwidth, self.words)


def read_inspected(row: Mapping[str, Any], where: str) -> Inspected:
    """A line of inspections.jsonl; a ValueError says which file and line is malformed."""
    try:
        words = tuple(str(word) for word in row["words"])
        position, text, step = int(row["position"]), str(row["text"]), int(row["step"])
        layers = [[_read_head(head, len(words)) for head in layer] for layer in row["layers"]]
        heads = tuple(
            _summarise(words, position, layer, number, given, weights[position])
            for layer, found in enumerate(layers)
            for number, (given, weights) in enumerate(found)
        )
        stacked = [np.stack([weights for _, weights in found]) for found in layers]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"{where}: no inspection can be read ({error!r}); remove the line and inspect again") from None
    return Inspected(text, step, Summary(words, position, heads), stacked)


def _read_head(given: Mapping[str, Any], length: int) -> tuple[Mapping[str, Any], np.ndarray]:
    """What is kept of a head, and its weights (Q, K)."""
    weights = np.zeros((length, length))
    for row, used in zip(weights, given["used"], strict=True):
        for key, weight in used:
            if not 0 <= key < length:
                raise ValueError(f"key {key} of {length} words")
            row[key] = weight
    return given, weights


def _summarise(
    words: tuple[str, ...], position: int, layer: int, head: int, given: Mapping[str, Any], w: np.ndarray
) -> HeadSummary:
    h = [math.nan if x is None else float(x) for x in given.get("bandwidth", [None] * len(words))]
    if len(h) != len(words):
        raise ValueError(f"{len(h)} bandwidths for {len(words)} words")
    order = np.argsort(-w, kind="stable")[: int((w > 0).sum())].tolist()
    used = tuple(Used(key, words[key], float(w[key])) for key in order)
    return HeadSummary(layer, head, float(given["zeros"]), float(given["support"]), torch.tensor(h), used)
