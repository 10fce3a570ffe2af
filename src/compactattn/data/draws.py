"""Random numbers without a state: each is a hash of what it is for.

number = mix(mix(key + g · sample) + g · (position + 1)) in arithmetic modulo 2⁶⁴, where key is a digest of
(name, purpose, attempt), mix the finaliser of SplitMix64 and g its odd constant ⌊2⁶⁴ / golden ratio⌋.
So a number depends on no other draw, and its bytes are the same on every machine and for every version of NumPy.

Shapes: B samples, N numbers per sample.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
LARGEST = np.uint64(0xFFFFFFFFFFFFFFFF)


def mix(x: Array) -> Array:
    """x with its bits scrambled one to one (the finaliser of SplitMix64). Works in place on uint64."""
    x ^= x >> np.uint64(30)
    x *= FIRST
    x ^= x >> np.uint64(27)
    x *= SECOND
    x ^= x >> np.uint64(31)
    return x


@dataclass(frozen=True)
class Draws:
    """The random numbers that belong to one name. Samples are (B,) uint64; each purpose has its own numbers."""

    name: str

    def bits(self, purpose: str, samples: Array, count: int, attempt: int = 0) -> Array:
        """`count` numbers of 64 random bits for each sample, (B, N) uint64."""
        digest = hashlib.sha256(f"{self.name}|{purpose}|{attempt}".encode()).digest()
        key = np.uint64(int.from_bytes(digest[:8], "little"))
        start = mix(samples * GOLDEN + key)
        return mix(start[:, None] + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN)

    def below(self, bound: int | Array, purpose: str, samples: Array, count: int, attempt: int = 0) -> Array:
        """Integers 0 ≤ x < bound ≤ 2³², (B, N) int64; a bound may be given per sample as (B, 1).

        x = ⌊bound · u / 2³²⌋ with u the upper 32 bits, so each probability is within 2⁻³² of 1 / bound.
        """
        upper = self.bits(purpose, samples, count, attempt) >> np.uint64(32)
        upper *= np.asarray(bound, dtype=np.uint64)
        upper >>= np.uint64(32)
        return upper.view(np.int64)

    def distinct(self, bound: int, purpose: str, samples: Array, count: int) -> Array:
        """`count` different integers below `bound` in random order for each sample, (B, N) int64.

        Few of many: a sample with a repetition is drawn again as a whole, which leaves every arrangement equally likely.
        Many of few: the head of a random ranking. Which of the two depends on `bound` and `count` alone.
        """
        if count * (count - 1) > bound:  # a first draw without repetition would be rarer than about 60 %
            return self.ranking(np.full((len(samples), 1), bound), bound, purpose, samples)[:, :count]
        drawn = self.below(bound, purpose, samples, count)
        again, attempt = np.arange(len(samples)), 0
        while again.size:
            ordered = np.sort(drawn[again], axis=1)
            again = again[(ordered[:, 1:] == ordered[:, :-1]).any(axis=1)]
            attempt += 1
            drawn[again] = self.below(bound, purpose, samples[again], count, attempt)
        return drawn

    def ranking(self, sizes: Array, longest: int, purpose: str, samples: Array) -> Array:
        """The integers below `sizes` (B, 1) in random order for each sample, (B, longest) int64; beyond its size a row is void.

        Sorts hashes whose low bits are replaced by the integer itself: ties cannot occur, so every sorting algorithm agrees.
        For N = 10,000 integers 50 bits decide, and two of them share all 50 with probability 2⁻⁵⁰.
        """
        low = np.uint64((1 << int(max(longest - 1, 1)).bit_length()) - 1)
        integers = np.arange(longest, dtype=np.uint64)
        hashes = (self.bits(purpose, samples, longest) & ~low) | integers
        if (sizes < longest).any():
            hashes[np.arange(longest) >= sizes] = LARGEST
        hashes.sort(axis=1)
        return (hashes & low).view(np.int64)
