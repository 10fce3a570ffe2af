"""A model over a whole test set, in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from compactattn.data.batches import Batch

TOKENS_PER_BATCH = {"cuda": 2**18, "cpu": 2**14}  # activations of the paper's sizes then take a few GB, and a few hundred MB
HEAD_ROWS = 2**12  # positions whose logits exist at one time

Found = TypeVar("Found")


@runtime_checkable
class Batches(Protocol):
    """Samples in a fixed order, all of one width."""

    @property
    def samples(self) -> int: ...
    def batches(self, size: int) -> Iterator[Batch]: ...


def device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def tokens_budget(device: torch.device, tokens: int | None = None) -> int:
    """How many tokens a batch may hold: what was asked for, or what suits the device."""
    budget = TOKENS_PER_BATCH.get(device.type, TOKENS_PER_BATCH["cpu"]) if tokens is None else tokens
    if budget < 1:
        raise ValueError(f"tokens_per_batch = {budget} must be at least 1")
    return budget


def samples_per_batch(test_set: Batches, device: torch.device, tokens: int | None = None) -> int:
    """How many samples fit into a budget of tokens, or into what suits the device; at least one."""
    budget = tokens_budget(device, tokens)
    width = next(iter(test_set.batches(1))).inputs.shape[1]
    return max(1, min(test_set.samples, budget // width))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, with each module's own flag restored in the end."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def in_pieces(work: Callable[[Batch], Found], batches: Iterator[Batch], device: torch.device) -> Iterator[tuple[Batch, Found]]:
    """Each piece of each batch in order, on the device, and what `work` made of it.

    After a lack of memory a piece is half as large, and so are those that follow.
    """
    largest: int | None = None
    for batch in batches:
        waiting = [batch.to(device)]
        while waiting:
            piece = waiting.pop()
            size = len(piece.inputs)
            if largest is not None and size > largest:
                waiting += [_take(piece, largest, size), _take(piece, 0, largest)]
                continue
            found: list[Found] = []
            try:
                found.append(work(piece))
            except torch.cuda.OutOfMemoryError:
                if size == 1:
                    raise
            if found:
                yield piece, found[0]
                continue
            largest = size // 2  # outside the handler: its traceback keeps the tensors that must go
            torch.cuda.empty_cache()
            waiting.append(piece)


def _take(batch: Batch, first: int, end: int) -> Batch:
    return Batch(*(field[first:end] for field in batch))


def apply_head(model: Any, hidden: Tensor, use: Callable[..., Tensor], *along: Tensor, rows: int = HEAD_ROWS) -> Tensor:
    """What `use` makes of the logits of hidden states (N, C), with those of at most `rows` at a time.

    `use` also gets the same rows of each tensor of `along`.
    """
    parts = zip(*(x.split(rows) for x in (hidden, *along)), strict=True)
    return torch.cat([use(model.head(part), *others) for part, *others in parts])
