"""Exact match: how many samples of a frozen test set a model answers without one wrong token.

*Teacher-forced*, as published: the arg-max at every judged position, given the true tokens before it.
*Free-running*: the model reads the prompt up to <sep> and then continues from its own tokens, as in use.
Where every token of the answer is judged the two agree on what is exact, by induction: up to the first
wrong token the model's own tokens are the true ones. They differ in token accuracy, since only in free
running does one mistake lead to the next, and by rounding where two logits all but tie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from compactattn.data.batches import Batch
from compactattn.evaluation.pieces import apply_head, device_of, evaluating, in_pieces, samples_per_batch

Mode = Literal["teacher-forced", "free-running"]
MODES: tuple[Mode, ...] = get_args(Mode)


class Named(Protocol):
    @property
    def name(self) -> str: ...


class FrozenSet(Protocol):
    """What is evaluated on: `compactattn.data.sequences.TestSet`, or anything that offers the same."""

    @property
    def task(self) -> Named: ...
    @property
    def length(self) -> int: ...
    @property
    def samples(self) -> int: ...
    def batches(self, size: int) -> Iterator[Batch]: ...
    def checksum(self) -> str: ...


@dataclass(frozen=True)
class Match:
    """What a model got right on a test set, as counts, so that nothing is rounded."""

    task: str
    length: int  # of the source
    mode: Mode
    samples: int
    exact: int  # samples with every judged token right
    tokens: int  # judged, over all samples
    tokens_right: int
    checksum: str  # of the test set

    @property
    def exact_match(self) -> float:
        return self.exact / self.samples

    @property
    def token_accuracy(self) -> float:
        return self.tokens_right / self.tokens

    def to_row(self, **extra: Any) -> dict[str, Any]:
        """A line of evaluation.jsonl; `extra` tells which model it was, as in seed=0, step=2000."""
        return asdict(self) | extra


def evaluate(
    model: nn.Module,
    test_set: FrozenSet,
    mode: Mode = "teacher-forced",
    tokens_per_batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Match:
    """Exact match and token accuracy of a model on a test set.

    A batch holds at most `tokens_per_batch` tokens, or one sample, and is halved when the GPU runs
    out of memory. Logits exist at the judged positions only. `progress` is called with the samples
    done and the samples in all. The model is put into evaluation mode, and back afterwards.
    """
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is unknown; choose one of {', '.join(map(repr, MODES))}")
    device, predict = device_of(model), _PREDICT[mode]
    batches = test_set.batches(samples_per_batch(test_set, device, tokens_per_batch))
    samples = exact = tokens = tokens_right = 0
    with evaluating(model), torch.inference_mode():
        for batch, right in in_pieces(lambda batch: _is_right(predict(model, batch), batch), batches, device):
            samples += len(right)
            exact += int(right.all(1).sum())
            tokens += int(batch.judged.sum())
            tokens_right += int((right & batch.judged).sum())
            if progress is not None:
                progress(samples, test_set.samples)
    return Match(test_set.task.name, test_set.length, mode, samples, exact, tokens, tokens_right, test_set.checksum())


Predict = Callable[[Any, Batch], Tensor]


def _is_right(predicted: Tensor, batch: Batch) -> Tensor:
    """Where a prediction is right (B, T), true where nothing is judged."""
    return (predicted == batch.targets) | ~batch.judged


def _predict_teacher_forced(model: Any, batch: Batch) -> Tensor:
    """The arg-max (B, T) at the judged positions, given the true tokens up to there; −1 elsewhere."""
    hidden = model.hidden(batch.inputs)[batch.judged]  # (judged, C)
    predicted = torch.full_like(batch.targets, -1)
    predicted[batch.judged] = apply_head(model, hidden, lambda logits: logits.argmax(-1))
    return predicted


def _predict_free_running(model: Any, batch: Batch) -> Tensor:
    """The tokens (B, T) that the model gives after the prompt, one after another; −1 elsewhere.

    The prompt ends where the first position counts: what follows it is the answer's first token.
    """
    first = int(batch.counted.any(0).nonzero()[0])
    last = int(batch.judged.any(0).nonzero()[-1])
    predicted = torch.full_like(batch.targets, -1)
    logits, cache = model.prefill(batch.inputs[:, : first + 1])
    for column in range(first, last + 1):
        token = logits.argmax(-1)
        predicted[:, column] = token
        if column < last:
            logits, cache = model.step(token, cache)
    return predicted


_PREDICT: dict[Mode, Predict] = {"teacher-forced": _predict_teacher_forced, "free-running": _predict_free_running}
