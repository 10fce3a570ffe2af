"""Batches in the order of the run, each prepared while the device works on the one before it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple

import torch

from compactattn.data.batches import Batch, Stream
from compactattn.training.config import TrainingConfig


class Span(NamedTuple):
    """A micro-batch: samples first … first + size − 1."""

    first: int
    size: int


def check_shares(config: TrainingConfig, processes: int) -> None:
    parts = config.accumulation * processes
    if config.batch % parts:
        raise ValueError(
            f"batch = {config.batch} does not divide into {processes} processes of {config.accumulation} micro-batches;"
            f" choose a multiple of {parts}"
        )


def spans(config: TrainingConfig, step: int, rank: int, processes: int) -> list[Span]:
    """This rank's micro-batches of update `step` (the first is 1): a contiguous share of its samples, in order."""
    size = config.batch // (processes * config.accumulation)
    first = (step - 1) * config.batch + rank * size * config.accumulation
    return [Span(first + part * size, size) for part in range(config.accumulation)]


def seed_of(seed: int, span: Span) -> int:
    """Seed of the generators (dropout) for one micro-batch.

    It depends on the run's seed and the samples alone, so a step can be done again, and no rank has a state of its own to keep.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}:{span.first}".encode()).digest()[:7], "little")


class Feed:
    """Iterates over (span, batch on the device); one thread draws at most one batch ahead."""

    def __init__(self, stream: Stream, order: Iterator[Span], device: torch.device) -> None:
        self._stream, self._order, self._device = stream, order, device
        # a thread that pins memory for a GPU must have chosen it, or it wakes up GPU 0
        choose = (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "batches", choose)
        self._next = self._ask()

    def __iter__(self) -> Iterator[tuple[Span, Batch]]:
        return self

    def __next__(self) -> tuple[Span, Batch]:
        if self._next is None:
            raise StopIteration
        span, batch = self._next.result()
        self._next = self._ask()
        return span, batch.to(self._device, non_blocking=True)

    def _ask(self) -> Future[tuple[Span, Batch]] | None:
        span = next(self._order, None)
        return None if span is None else self._thread.submit(self._draw, span)

    def _draw(self, span: Span) -> tuple[Span, Batch]:
        batch = self._stream.batch(*span)
        if self._device.type == "cuda":  # only pinned memory is copied without the host waiting
            batch = Batch(*(part.pin_memory() if part.device.type == "cpu" else part for part in batch))
        return span, batch

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
