"""The loss of each token against its position in a window: what context is worth, in the corpus of training and outside it.

Position t of a window has read t + 1 tokens and is judged on the next one. Its loss is the mean over all windows; sums are
in float64. The paper draws an exponential moving average of these losses, without its constant (§ Out-of-Distribution).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from compactattn.data.batches import Batch
from compactattn.evaluation.pieces import (
    HEAD_ROWS,
    Batches,
    apply_head,
    device_of,
    evaluating,
    in_pieces,
    samples_per_batch,
    tokens_budget,
)
from compactattn.models.head import CHUNK

SMOOTHING = 0.9  # our choice: the average remembers about ten tokens of the paper's 512
POINTS = 128  # of a curve in a row of results


@dataclass(frozen=True, eq=False)
class PositionLoss:
    """Sums and counts of the loss at each position of windows of one width, in nats."""

    windows: int
    sums: NDArray[np.float64]  # (T,)
    counts: NDArray[np.int64]  # (T,) windows in which the position counts

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def total(self) -> float:
        """Nats over all tokens."""
        return float(self.sums.sum())

    @property
    def loss(self) -> float:
        """The mean over all tokens."""
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < math.log(1e300) else math.inf

    @property
    def losses(self) -> NDArray[np.float64]:
        """(T,) the mean at each position; NaN where none counts."""
        return _divide(self.sums, self.counts)

    def smoothed(self, decay: float = SMOOTHING) -> NDArray[np.float64]:
        """(T,) the moving average Σ_{i ≤ t} decay^(t − i) loss_i / Σ_{i ≤ t} decay^(t − i).

        Over tokens: where fewer windows count a position, it weighs less. The division keeps the first positions, whose
        loss is the highest, from weighing more than others do.
        """
        return smooth(self.sums, self.counts, decay)

    def bits_per_byte(self, text_bytes: int) -> float:
        """Nats / ln 2 over the bytes that the counted tokens spell: comparable between tokenizers."""
        if text_bytes < 1:
            raise ValueError(f"text_bytes = {text_bytes} must be at least 1: the bytes of the text of all {self.tokens} tokens")
        return self.total / math.log(2) / text_bytes

    def to_row(self, **extra: Any) -> dict[str, Any]:
        """A line of evaluation.jsonl, with the curve in at most `POINTS` stretches of equal width, but for the last.

        `extra` tells what was evaluated on which model, as in task="lm", split="simplewiki", step=2000. A stretch without
        tokens has no loss.
        """
        size = -(-len(self.sums) // POINTS)
        edges = [*range(0, len(self.sums), size), len(self.sums)]
        sums, counts = (np.add.reduceat(values, edges[:-1]) for values in (self.sums, self.counts))
        losses = [float(loss) if count else None for loss, count in zip(_divide(sums, counts), counts, strict=True)]
        return {
            "samples": self.windows, "tokens": self.tokens, "loss": self.loss, "perplexity": self.perplexity,
            "by_position": {"edges": edges, "tokens": counts.tolist(), "loss": losses}, **extra,
        }  # fmt: skip


def smooth(
    sums: NDArray[Any], counts: NDArray[Any], decay: float = SMOOTHING, widths: NDArray[Any] | None = None
) -> NDArray[np.float64]:
    """(N,) the moving average of losses from their sums and counts at positions, or in stretches of `widths` positions.

    A stretch of w positions makes what came before it fade by decay^w, as w positions do.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay = {decay} must be at least 0 (no smoothing) and below 1")
    sums, counts = sums.astype(float), counts.astype(float)
    fades = decay ** (np.ones(len(sums)) if widths is None else widths)
    for t in range(1, len(sums)):
        sums[t] += fades[t] * sums[t - 1]
        counts[t] += fades[t] * counts[t - 1]
    return _divide(sums, counts)


def _divide(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    return np.divide(sums, counts, out=np.full(len(sums), np.nan), where=counts > 0)


def evaluate_positions(
    model: nn.Module,
    windows: Batches | Iterable[Batch],
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PositionLoss:
    """The loss of a model at each position of windows: fixed ones in order (`Batches`), or batches as they come.

    Batches are made or split to hold at most `tokens_per_batch` tokens, as in `exact_match.evaluate`, and logits exist for a
    bounded number of tokens at a time. `progress` is called with the windows done and those in all, 0 where that is unknown.
    """
    device, total = device_of(model), getattr(windows, "samples", 0)
    batches = _within(windows, device, tokens_per_batch)
    sums = counts = torch.zeros(0)
    done = 0
    with evaluating(model), torch.inference_mode():
        for batch, losses in in_pieces(lambda batch: _losses(model, batch), batches, device):
            if done == 0:
                width = losses.shape[1]
                sums, counts = losses.new_zeros(width), torch.zeros(width, dtype=torch.long, device=device)
            elif losses.shape[1] != len(sums):
                raise ValueError(
                    f"a window of {losses.shape[1]} tokens came after one of {len(sums)}; all must be of one width"
                )
            sums += losses.sum(0)
            counts += batch.counted.sum(0)
            done += len(losses)
            if progress is not None:
                progress(done, total)
    if not bool(counts.any()):
        raise ValueError(f"no token of {done} windows counts; a loss needs at least one")
    return PositionLoss(done, sums.cpu().numpy(), counts.cpu().numpy())


def _within(windows: Batches | Iterable[Batch], device: torch.device, tokens: int | None) -> Iterator[Batch]:
    """Batches of at most so many tokens, or of one window."""
    if isinstance(windows, Batches):
        yield from windows.batches(samples_per_batch(windows, device, tokens))
        return
    budget = tokens_budget(device, tokens)
    for batch in windows:
        size = max(1, budget // batch.inputs.shape[1])
        for start in range(0, len(batch.inputs), size):
            yield Batch(*(field[start : start + size] for field in batch))


def _losses(model: Any, batch: Batch) -> Tensor:
    """(B, T) in float64: −log p of the next token, 0 where it does not count."""
    hidden, targets = model.hidden(batch.inputs)[batch.counted], batch.targets[batch.counted]  # (N, C), (N,)
    losses = torch.zeros(batch.targets.shape, dtype=torch.float64, device=hidden.device)
    rows = min(HEAD_ROWS, max(1, CHUNK.get(hidden.device.type, CHUNK["cpu"]) // model.config.vocab))
    if len(targets):
        losses[batch.counted] = apply_head(
            model, hidden, lambda logits, wanted: cross_entropy(logits, wanted, reduction="none").double(), targets, rows=rows
        )
    return losses
