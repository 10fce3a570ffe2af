"""Samples of the length-generalisation tasks: an endless stream to train on, and frozen sets to test on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np
import torch

from compactattn.data.batches import Batch
from compactattn.data.draws import Array, Draws
from compactattn.data.frozen import CHECKSUMS
from compactattn.data.recall import Recall
from compactattn.data.tasks import Copy, Reverse, Sort, Task

TASKS: dict[str, Task] = {task.name: task for task in (Recall(), Sort(), Reverse(), Copy())}  # as published
FROZEN: dict[str, Task] = {**TASKS, "mqmtar, shared words": Recall(layout="shared")}  # by the names of data/frozen.py
TEST_SEED = 0
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"), str: ((str,), "text"),
}  # fmt: skip


def choose_task(name: str, **changes: Any) -> Task:
    """The published task of that name with some settings changed, as in choose_task("mqmtar", symbols=16, words=100)."""
    if name not in TASKS:
        raise ValueError(f"task {name!r} is unknown; choose one of {', '.join(TASKS)}")
    known = [field.name for field in fields(TASKS[name])]
    for change, value in changes.items():
        if change not in known:
            raise ValueError(f"{name} has no setting {change!r}; it has {', '.join(known)}")
        kinds, words = KINDS[type(getattr(TASKS[name], change))]
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(f"{change} of {name} must be {words}, got {value!r}")
    return replace(TASKS[name], **changes)


def number(first: int, count: int) -> Array:
    if first < 0 or count < 0:
        raise ValueError(f"samples are numbered from 0, got {count} samples from number {first}")
    return np.arange(first, first + count, dtype=np.uint64)


def make_batch(task: Task, tokens: Array, lengths: Array) -> Batch:
    """Tokens (B, T + 1) with sources of `lengths` (B,) as inputs and targets."""
    counted, judged = task.masks(lengths, tokens.shape[1] - 1)
    whole = torch.from_numpy(tokens).long()
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), torch.from_numpy(counted), torch.from_numpy(judged))


@dataclass(frozen=True)
class Sequences:
    """A stream of training samples whose source lengths are uniform on shortest … longest.

    Every batch is padded to the tokens of the longest source. Sample i is a pure function of these four fields and i.
    Each seed is a file of its own, with its own random numbers.
    """

    task: Task
    seed: int
    shortest: int = 32
    longest: int = 64

    def __post_init__(self) -> None:
        if self.shortest > self.longest:
            raise ValueError(f"shortest = {self.shortest} is above longest = {self.longest}")
        self.task.check(self.shortest)
        self.task.check(self.longest)

    @property
    def vocab(self) -> int:
        return self.task.vocab

    def tokens(self, first: int, count: int) -> tuple[Array, Array]:
        """Tokens (B, T + 1) int32 and source lengths (B,) of samples first … first + count − 1."""
        samples = number(first, count)
        draws = Draws(f"train|{self.task.name}|{self.seed}")
        lengths = self.shortest + draws.below(self.longest - self.shortest + 1, "lengths", samples, 1)[:, 0]
        return self.task.tokens(draws, samples, lengths, self.longest), lengths

    def batch(self, first: int, count: int) -> Batch:
        return make_batch(self.task, *self.tokens(first, count))


@dataclass(frozen=True)
class TestSet:
    """The frozen test set at exactly one source length.

    Each seed and length is a file of its own, with its own random numbers. No training stream shares them.
    """

    __test__: ClassVar[bool] = False  # not a class of tests, whatever pytest makes of its name

    task: Task
    length: int
    samples: int = 1000
    seed: int = TEST_SEED

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"samples = {self.samples} must be at least 1")
        self.task.check(self.length)

    @property
    def vocab(self) -> int:
        return self.task.vocab

    @property
    def prompt_length(self) -> int:
        """Tokens of each prompt, with <bos> and <sep>."""
        return self.task.prompt_length(self.length)

    @property
    def answer_length(self) -> int:
        """Tokens of each answer, with <eos>."""
        return self.task.answer_length(self.length)

    def tokens(self, first: int, count: int) -> Array:
        """Samples first … first + count − 1 of the set, (B, prompt + answer) int32; they are all of one length."""
        if first + count > self.samples:
            raise ValueError(f"the test set has {self.samples} samples, got {count} from number {first}")
        draws = Draws(f"test|{self.task.name}|{self.seed}|{self.length}")
        return self.task.tokens(draws, number(first, count), np.full(count, self.length), self.length)

    def batch(self, first: int, count: int) -> Batch:
        return make_batch(self.task, self.tokens(first, count), np.full(count, self.length))

    def batches(self, size: int) -> Iterator[Batch]:
        """The whole set in order, `size` samples at a time; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"a batch of {size} samples is empty; choose a size of at least 1")
        for first in range(0, self.samples, size):
            yield self.batch(first, min(size, self.samples - first))

    def checksum(self) -> str:
        """SHA-256 of the shape as text and all tokens as little-endian int32."""
        width = self.prompt_length + self.answer_length
        digest = hashlib.sha256(f"{self.samples} {width}\n".encode())
        size = max(1, 2**18 // width)
        for first in range(0, self.samples, size):
            digest.update(self.tokens(first, min(size, self.samples - first)).astype("<i4").tobytes())
        return digest.hexdigest()

    @property
    def published(self) -> str | None:
        """The checksum that this set must have, or None where none is on record."""
        name = next((name for name, task in FROZEN.items() if task == self.task), "")
        return CHECKSUMS.get((name, self.length, self.samples)) if self.seed == TEST_SEED else None

    def verify(self) -> None:
        """Raises a ValueError unless this machine draws the published set byte for byte."""
        what = f"{self.task.name} at length {self.length} with {self.samples} samples"
        if self.published is None:
            raise ValueError(f"no checksum is on record for {what}, these settings and seed {self.seed}; see data/frozen.py")
        if (found := self.checksum()) != self.published:
            raise ValueError(f"{what} is not the published test set: checksum {found[:12]}…, expected {self.published[:12]}…")
