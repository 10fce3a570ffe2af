"""A look at the weights themselves, which the op never stores, and what it tells about each head.

Shapes: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from compactattn.attention import Readout, attend
from compactattn.kernels import Kernel
from compactattn.masks import MaskLike, View, resolve

COLUMNS = 128  # keys looked at in one call


class Look(NamedTuple):
    """What each query of one layer attends to."""

    weights: Tensor  # (B, H, Q, K)
    readout: Readout
    legal: Tensor  # (B, H, Q): keys that a query may see


def look(q: Tensor, k: Tensor, kernel: Kernel, scale: Tensor | None, mask: MaskLike) -> Look:
    """Weights and readout of every query: with one-hot values the estimate is the weights, exact zeros included."""
    one_hot = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    found = [attend(q, k, v, kernel, scale=scale, mask=mask, return_readout=True) for v in one_hot.split(COLUMNS, dim=-1)]
    batch, heads, queries, _ = q.shape
    legal = _count_legal(resolve(mask, (batch, heads, queries, k.shape[2]), q.device))
    return Look(torch.cat([weights for weights, _ in found], -1), found[0][1], legal)


def _count_legal(view: View) -> Tensor:
    keys = torch.arange(view.shape[3], device=view.at.device)
    legal = ((keys >= view.lo[..., None]) & (keys < view.hi[..., None]))[:, None]  # (1 | B, 1, Q, K)
    if view.allowed is not None:
        legal = legal & view.allowed
    if view.bias is not None:
        legal = legal & (view.bias != -torch.inf)
    return legal.sum(-1).expand(view.shape[:3])


# -- what a look tells ---------------------------------------------------------------------------


class Used(NamedTuple):
    """A past word with a weight that is not zero."""

    position: int  # from 0
    word: str
    weight: float


class HeadSummary(NamedTuple):
    """What one head does with a text, and what it used at one position."""

    layer: int  # from 0
    head: int  # from 0
    zeros: float  # share of exact zeros among the weights of legal keys, 0 … 1
    support: float  # mean number of keys with weight, over the queries that may see any
    bandwidth: Tensor  # (Q,) h at each position; NaN where a query may see no key
    used: tuple[Used, ...]  # at the position of the summary, the heaviest first


class LayerSummary(NamedTuple):
    """The means over the heads of one layer; h is the median over heads and positions."""

    layer: int  # from 0
    zeros: float
    support: float
    bandwidth: float


@dataclass(frozen=True, eq=False)
class Summary:
    """Which words each head really used at one position of a text, and how sparse each layer is over all of it."""

    words: tuple[str, ...]
    position: int  # from 0
    heads: tuple[HeadSummary, ...]

    @property
    def layers(self) -> list[LayerSummary]:
        return [
            LayerSummary(
                layer,
                sum(head.zeros for head in heads) / len(heads),
                sum(head.support for head in heads) / len(heads),
                float(torch.stack([head.bandwidth for head in heads]).nanmedian()),
            )
            for layer in dict.fromkeys(head.layer for head in self.heads)
            for heads in [self.of(layer)]
        ]

    def of(self, layer: int) -> list[HeadSummary]:
        """The heads of a layer."""
        return [head for head in self.heads if head.layer == layer]


def summarise(looks: Iterable[Look], words: Sequence[str], position: int = -1) -> Summary:
    """What looks at the layers of a model tell about a text, given a word for each of its tokens.

    Only the weights at one position are read, by default the last; the looks are taken one after another and let go.
    """
    if not -len(words) <= position < len(words):
        raise ValueError(f"position {position} is not in a text of {len(words)} words; choose 0 to {len(words) - 1}")
    position %= len(words)
    found: list[HeadSummary] = []
    for layer, seen in enumerate(looks):
        if len(seen.weights) != 1 or seen.weights.shape[2] != len(words):
            rows, _, queries, _ = seen.weights.shape
            raise ValueError(
                f"looks at {rows} texts of {queries} tokens do not fit {len(words)} words; "
                "give one text, and a word for each of its tokens"
            )
        found += [_summarise_head(seen, layer, head, words, position) for head in range(seen.weights.shape[1])]
    return Summary(tuple(words), position, tuple(found))


def _summarise_head(seen: Look, layer: int, head: int, words: Sequence[str], position: int) -> HeadSummary:
    legal, support = seen.legal[0, head].double().cpu(), seen.readout.support[0, head].double().cpu()
    sees = legal > 0
    w = seen.weights[0, head, position].detach().cpu()
    order = w.argsort(descending=True, stable=True)[: int((w != 0).sum())]
    return HeadSummary(
        layer,
        head,
        zeros=float(1 - support.sum() / legal.sum()) if bool(sees.any()) else 0.0,
        support=float(support[sees].mean()) if bool(sees.any()) else 0.0,
        bandwidth=seen.readout.bandwidth[0, head].cpu().masked_fill(~sees, torch.nan),
        used=tuple(Used(int(key), words[int(key)], float(w[key])) for key in order),
    )
