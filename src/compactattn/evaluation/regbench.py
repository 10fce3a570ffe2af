"""Greedy accuracy and total variation distance on RegBench.

At a position with next-letter distribution q (uniform over the legal letters) a model with probabilities p over the whole
vocabulary is *right* if its arg-max is legal, and off by TVD = ½ Σ |p − q|. Both are reported three ways:
*every* position, as tabulated: from the first letter on, also where a separator follows (any legal letter is right there);
*inside*: without the positions before a separator, as the benchmark logs it during training; these are also those of the loss;
*last*: only the last position of each example, whose target is the last letter, with all other strings as context.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compactattn.data.batches import Batch
from compactattn.data.draws import Array
from compactattn.data.regbench import Examples
from compactattn.evaluation.pieces import apply_head, device_of, evaluating, in_pieces, samples_per_batch

BIN = 32  # positions per entry of `by_position`
ROWS = 64  # examples whose probabilities a predictor gives at one time

Predictor = Callable[[Examples, int, int], Array]  # probabilities (B, T, V) of examples first … first + count − 1


@dataclass(frozen=True)
class Tally:
    """Positions, how many of them are right, and the sum of their TVD."""

    positions: int = 0
    right: int = 0
    tvd_sum: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.positions + other.positions, self.right + other.right, self.tvd_sum + other.tvd_sum)

    @property
    def accuracy(self) -> float:
        return self.right / self.positions

    @property
    def tvd(self) -> float:
        return self.tvd_sum / self.positions

    def to_row(self) -> dict[str, Any]:
        return {"positions": self.positions, "right": self.right, "tvd": self.tvd}


@dataclass(frozen=True)
class Score:
    """What a predictor got right on some examples of RegBench; scores of different examples can be added up."""

    samples: int
    inside: Tally
    last: Tally
    by_position: tuple[Tally, ...]  # of positions 0 … 31, 32 … 63, and so on
    loss_sum: float  # cross-entropy over the positions inside
    split: str = ""
    checksum: str = ""  # of the split

    @property
    def every(self) -> Tally:
        return sum(self.by_position, Tally())

    @property
    def loss(self) -> float:
        """Mean cross-entropy of the next letter, in nats."""
        return self.loss_sum / self.inside.positions

    def __add__(self, other: Score) -> Score:
        bins = max(len(self.by_position), len(other.by_position))
        here, there = (score.by_position + (Tally(),) * (bins - len(score.by_position)) for score in (self, other))
        return replace(
            self,
            samples=self.samples + other.samples,
            inside=self.inside + other.inside,
            last=self.last + other.last,
            by_position=tuple(a + b for a, b in zip(here, there, strict=True)),
            loss_sum=self.loss_sum + other.loss_sum,
        )

    def to_row(self, **extra: Any) -> dict[str, Any]:
        """A line of evaluation.jsonl; `extra` tells which model it was, as in examples=1000. A TVD is a mean, 0 to 1."""
        bins = self.by_position
        return {
            "task": "regbench", "split": self.split, "samples": self.samples, **self.every.to_row(),
            "inside": self.inside.to_row(), "last": self.last.to_row(),
            "by_position": {
                "edges": [BIN * place for place in range(len(bins) + 1)],
                "positions": [tally.positions for tally in bins],
                "right": [tally.right for tally in bins],
                "tvd": [tally.tvd for tally in bins],
            },
            "loss": self.loss, "checksum": self.checksum, **extra,
        }  # fmt: skip


def score(probabilities: Tensor, legal: Tensor, batch: Batch) -> Score:
    """The score of probabilities (B, T, V), given the legal letters (B, T) as bits, 0 where nothing is predicted.

    Every example must have a position. Sums are in float64, and a probability of 0 for the true letter makes the loss infinite.
    """
    there = legal != 0  # (B, T)
    p, bits, targets = probabilities[there].double(), legal[there], batch.targets[there]  # (N, V), (N,), (N,)
    may = (bits[:, None] >> torch.arange(p.shape[1], device=p.device)) & 1
    right = may.gather(1, p.argmax(1, keepdim=True))[:, 0]
    q = may.double() / may.sum(1, keepdim=True)  # integers would be divided in float32
    tvd = (p - q).abs().sum(1) / 2
    time = torch.arange(there.shape[1], device=p.device).expand_as(there)
    bins = time[there] // BIN
    inside = batch.counted[there]
    ends = there.sum(1, keepdim=True) - 1  # positions come first, padding after them
    last = (time == ends)[there]
    size = int(bins.max()) + 1
    columns = [torch.bincount(bins, weights, size).tolist() for weights in (torch.ones_like(tvd), right.double(), tvd)]
    return Score(
        samples=len(there),
        inside=_tally(right[inside], tvd[inside]),
        last=_tally(right[last], tvd[last]),
        by_position=tuple(Tally(int(n), int(r), t) for n, r, t in zip(*columns, strict=True)),
        loss_sum=-float(p[inside].gather(1, targets[inside, None]).log().sum()),
    )


def _tally(right: Tensor, tvd: Tensor) -> Tally:
    return Tally(len(right), int(right.sum()), float(tvd.sum()))


def evaluate(
    model: nn.Module,
    examples: Examples,
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """The score of a model, from the softmax of its logits over the whole vocabulary, given the true tokens so far.

    Batches as in `exact_match.evaluate`. `progress` is called with the examples done and the examples in all.
    """
    device = device_of(model)
    batches = examples.batches(samples_per_batch(examples, device, tokens_per_batch))
    total: Score | None = None
    with evaluating(model), torch.inference_mode():
        for batch, probabilities in in_pieces(lambda batch: _probabilities(model, batch), batches, device):
            first = total.samples if total else 0
            found = score(probabilities, _legal(examples, first, len(probabilities)).to(device), batch)
            total = total + found if total else found
            if progress is not None:
                progress(total.samples, examples.samples)
    assert total is not None  # a split has examples
    return replace(total, split=examples.split, checksum=examples.checksum())


def evaluate_predictor(predict: Predictor, examples: Examples) -> Score:
    """The score of a predictor without parameters (see predictors.py)."""
    total: Score | None = None
    for first in range(0, examples.samples, ROWS):
        count = min(ROWS, examples.samples - first)
        probabilities = torch.from_numpy(predict(examples, first, count))
        found = score(probabilities, _legal(examples, first, count), examples.batch(first, count))
        total = total + found if total else found
    assert total is not None  # a split has examples
    return replace(total, split=examples.split, checksum=examples.checksum())


def _probabilities(model: Any, batch: Batch) -> Tensor:
    """(B, T, V) in float64."""
    hidden = model.hidden(batch.inputs)
    logits = apply_head(model, hidden.flatten(0, 1), lambda logits: logits)
    return logits.double().softmax(-1).unflatten(0, hidden.shape[:2])


def _legal(examples: Examples, first: int, count: int) -> Tensor:
    return torch.from_numpy(examples.legal(first, count).astype("int64"))
