"""RegBench, in-context language learning: each example is a handful of strings from a random automaton of its own.

    tokens    c a f c a | c a f | c h
    states    1 2 0 1 2 0 1 2 0 0 1 3     after the token; 0 is the start
    legal     a f c a f c a f c c a       what may follow, each letter with the same probability
              h     h     h       h
    counted   a f c a   c a f   c h       the next token, but for separators

Ids: the letters, then the separator `|`, then padding `.`; 18 letters make a vocabulary of 20.
There is no token before the first letter, so that one is read and never predicted, and the last letter is predicted and
never read: an example of n tokens has n − 1 positions, and at each the automaton gives the exact distribution of the next
letter. The strings are cut at their length, not by the automaton: nothing tells when a separator comes, and the position
before it counts in the accuracy (any legal letter is right there) but not in the loss. All this is as in the published
benchmark (Akyürek et al. 2024).

Departs from the published code: automata are compared by language, the held-out ones are drawn first, so that they do not
depend on the number of training examples, and random numbers are hashes (see draws.py).

Shapes: B batch, N examples, L tokens of the longest, T = L − 1 positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch

from compactattn.data.automata import Automata, RegularLanguages, distinct_automata
from compactattn.data.batches import Batch
from compactattn.data.cache import Arrays, cached, damaged
from compactattn.data.draws import Array, Draws

Split = Literal["train", "validation", "test"]

VERSION = 1  # of the arrays below: raise it with every change of what is drawn or kept
EXAMPLES_AT_ONCE = 2048


@dataclass(frozen=True, eq=False)
class Examples:
    """The examples of one split in order, each with its automaton, padded to the longest."""

    languages: RegularLanguages
    split: Split
    tokens: Array  # (N, L) uint8
    states: Array  # (N, L) uint8, where the automaton is after each token; void at padding
    lengths: Array  # (N,) int64, tokens without padding
    automata: Automata

    @property
    def samples(self) -> int:
        return len(self.tokens)

    @property
    def vocab(self) -> int:
        return self.languages.vocab

    @property
    def width(self) -> int:
        """Positions T of every batch."""
        return self.tokens.shape[1] - 1

    def legal(self, first: int, count: int) -> Array:
        """The letters that may follow at each position as the bits of a number, (B, T) uint32; 0 where nothing is predicted."""
        rows = self._rows(first, count)
        legal = np.take_along_axis(self.automata.legal[rows], self.states[rows, :-1].astype(np.int64), 1)
        legal[np.arange(self.width) >= self.lengths[rows, None] - 1] = 0
        return legal

    def batch(self, first: int, count: int) -> Batch:
        """Examples first … first + count − 1."""
        return self.gather(np.arange(*self._rows(first, count).indices(self.samples)), self.width)

    def batches(self, size: int) -> Iterator[Batch]:
        """The whole split in order, `size` examples at a time; the last batch may be smaller."""
        if size < 1:
            raise ValueError(f"a batch of {size} examples is empty; choose a size of at least 1")
        for first in range(0, self.samples, size):
            yield self.batch(first, min(size, self.samples - first))

    def gather(self, rows: Array, width: int) -> Batch:
        """The examples `rows` (B,) with `width` ≥ T positions."""
        tokens = np.full((len(rows), width + 1), self.languages.padding, np.int64)
        tokens[:, : self.width + 1] = self.tokens[rows]
        whole = torch.from_numpy(tokens)
        inputs, targets = whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
        counted = targets < self.languages.separator  # its target is a letter
        return Batch(inputs, targets, counted, counted.clone())

    def checksum(self) -> str:
        """SHA-256 of the shape as text, all tokens, and the legal letters as little-endian 32-bit numbers."""
        return self._checksum

    @cached_property
    def _checksum(self) -> str:
        digest = hashlib.sha256(f"{self.samples} {self.width}\n".encode())
        digest.update(np.ascontiguousarray(self.tokens).tobytes())
        for first in range(0, self.samples, EXAMPLES_AT_ONCE):
            digest.update(self.legal(first, min(EXAMPLES_AT_ONCE, self.samples - first)).astype("<u4").tobytes())
        return digest.hexdigest()

    def _rows(self, first: int, count: int) -> slice:
        if first < 0 or count < 0 or first + count > self.samples:
            raise ValueError(f"the {self.split} split has {self.samples} examples, got {count} from number {first}")
        return slice(first, first + count)


@dataclass(frozen=True, eq=False)
class Epochs:
    """An endless stream over a split, in a new random order each time round.

    Sample i is example order[i mod N] of epoch ⌊i / N⌋, where the order is a hash of seed and epoch: a pure function of i.
    """

    examples: Examples
    seed: int
    width: int | None = None  # positions T of every batch; those of the split unless given

    def __post_init__(self) -> None:
        if self.width is not None and self.width < self.examples.width:
            raise ValueError(f"width = {self.width} is too small for examples of {self.examples.width} positions")

    @property
    def vocab(self) -> int:
        return self.examples.vocab

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first + count − 1."""
        if first < 0 or count < 0:
            raise ValueError(f"samples are numbered from 0, got {count} samples from number {first}")
        size = self.examples.samples
        epochs, places = np.divmod(np.arange(first, first + count), size)
        rows = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            rows[epochs == epoch] = epoch_order(self.seed, int(epoch), size)[places[epochs == epoch]]
        return self.examples.gather(rows, self.width or self.examples.width)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> Array:
    """The integers below `size` in the order of an epoch, (N,) int64."""
    order = Draws(f"regbench|order|{seed}").ranking(np.array([[size]]), size, "epoch", np.array([epoch], np.uint64))[0]
    order.flags.writeable = False
    return order


class RegBench(NamedTuple):
    """The three splits; no language occurs twice in all of them."""

    train: Examples
    validation: Examples
    test: Examples


def load_regbench(
    train: int = 1000,
    languages: RegularLanguages | None = None,
    validation: int = 500,
    test: int = 500,
    folder: Path | None = None,
) -> RegBench:
    """RegBench with that many examples in each split, drawn or read from the cache (`cache_folder()` unless a folder is given).

    The first automata make the test set, the next the validation set, the rest the training set. So the held-out sets are
    the same for every number of training examples, and fewer training examples are a prefix of more.
    """
    languages = languages or RegularLanguages()
    counts = {"test": test, "validation": validation, "train": train}
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} = {count} must be at least 1 example")
    settings = {"languages": asdict(languages), "examples": test + validation + train}
    arrays, path = cached("regbench", VERSION, settings, lambda: _draw(languages, test + validation + train), folder)
    if set(arrays) != {"tokens", "states", "lengths", "letters", "targets"}:
        raise damaged(path)
    splits, first = {}, 0
    for name, count in counts.items():
        splits[name] = _take(languages, name, arrays, slice(first, first + count))  # type: ignore[arg-type]
        first += count
    return RegBench(**splits)


def _draw(languages: RegularLanguages, count: int) -> Arrays:
    """What is kept: tokens and states of all examples one after another, their lengths, and the automata."""
    automata, numbers = distinct_automata(languages, count)
    parts = [
        draw_examples(languages, automata[first : first + EXAMPLES_AT_ONCE], numbers[first : first + EXAMPLES_AT_ONCE])
        for first in range(0, count, EXAMPLES_AT_ONCE)
    ]
    tokens, states, lengths = (np.concatenate(part) for part in zip(*parts, strict=True))
    return {"tokens": tokens, "states": states, "lengths": lengths, "letters": automata.letters, "targets": automata.targets}


def _take(languages: RegularLanguages, split: Split, arrays: Arrays, rows: slice) -> Examples:
    """Some of the examples, padded to the longest of them."""
    lengths = arrays["lengths"][rows]
    before = int(arrays["lengths"][: rows.start].sum())
    there = np.arange(lengths.max()) < lengths[:, None]
    tokens, states = np.full(there.shape, languages.padding, np.uint8), np.zeros(there.shape, np.uint8)
    tokens[there], states[there] = (arrays[name][before : before + lengths.sum()] for name in ("tokens", "states"))
    tokens.flags.writeable = states.flags.writeable = False
    return Examples(languages, split, tokens, states, lengths, Automata(arrays["letters"], arrays["targets"])[rows])


def draw_examples(languages: RegularLanguages, automata: Automata, numbers: Array) -> tuple[Array, Array, Array]:
    """Tokens and states (both uint8, all examples one after another) and lengths (N,) of the examples of these automata.

    `numbers` (N,) uint64 are those under which the automata were drawn: an example depends on its automaton and number alone.
    """
    draws, (shortest, longest), most = languages.draws, languages.string_length, languages.strings[1]
    low, high = languages.strings
    strings = low + draws.below(high - low + 1, "strings", numbers, 1)  # (N, 1)
    lengths = shortest + draws.below(longest - shortest + 1, "string lengths", numbers, most)  # (N, strings)
    lengths[np.arange(most) >= strings] = 0
    own = (numbers[:, None] * np.uint64(most) + np.arange(most, dtype=np.uint64)).ravel()  # one number per string
    choices = draws.bits("letters of strings", own, longest) >> np.uint64(32)

    # a cell per letter and one for the separator after it, (strings of all examples, longest + 1)
    tokens = np.full((len(own), longest + 1), languages.separator, np.uint8)
    states = np.zeros((len(own), longest + 1), np.uint8)
    automaton, state = np.repeat(np.arange(len(automata)), most), np.zeros(len(own), np.int64)
    for step in range(longest):
        degrees = automata.degrees[automaton, state].astype(np.uint64)
        edge = ((choices[:, step] * degrees) >> np.uint64(32)).astype(np.int64)
        tokens[:, step] = automata.letters[automaton, state, edge]
        state = automata.targets[automaton, state, edge].astype(np.int64)
        states[:, step] = state

    ends = lengths.reshape(-1, 1)
    tokens[np.arange(longest + 1) >= ends] = languages.separator
    states[np.arange(longest + 1) >= ends] = 0
    last = (np.arange(most) == strings - 1).reshape(-1, 1)
    there = (np.arange(longest + 1) < ends) | ((np.arange(longest + 1) == ends) & (ends > 0) & ~last)
    return tokens[there], states[there], there.reshape(len(automata), -1).sum(1, dtype=np.int64)
