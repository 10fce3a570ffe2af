"""Dropout of attention weights whose mask is never stored: a pure function of a seed and the place of a weight.

    o = Σ_i m_i w_i v_i / (1 − p),    m_i = 1 with probability 1 − p, else 0: independent for every weight.

m is a hash of (seed, sample, head, query, key) in whole numbers modulo 2³². Forward and backward, PyTorch here and Triton in
fused/drops.py, in whatever blocks: all find the same mask. A weight keeps its fate if the batch, the heads or the lengths grow.

Shapes: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # what is kept of a number
FIRST, SECOND = 0xB923E45B, 0x68BCAD69  # found by search: a flipped bit flips every other with probability 0.500 ± 0.007
STRIDE = 0x9E3779B9  # between keys: 2³² over the golden ratio
SALT = 0x5157B373  # sets the second half of a row's state apart from the first
STEPS = 2**31  # p is a whole number of these parts
LARGEST_SEED = 2**62


class Dropout(NamedTuple):
    """What decides the fate of every weight of a call."""

    p: float  # 0 < p < 1
    seed: Tensor  # () int64, on the device of the weights

    @property
    def limit(self) -> int:
        """A weight is dropped if the upper 31 bits of its hash are below this."""
        return min(round(self.p * STEPS), STEPS - 1)

    @property
    def boost(self) -> float:
        """What a weight that is kept is multiplied by."""
        return 1 / (1 - self.p)


def check_rate(name: str, p: float) -> float:
    """p as a float, if it is a probability below 1."""
    if not isinstance(p, float | int):
        raise TypeError(f"{name} must be a number, got {type(p).__name__}")
    if not 0 <= p < 1:
        raise ValueError(f"{name} = {p!r} must be at least 0 and below 1: the probability of dropping, 0 for none")
    return float(p)


def draw_seed(p: float, device: torch.device) -> Tensor | None:
    """A seed from PyTorch's generator of the device, which is never read on the host; None if nothing is dropped."""
    return torch.randint(LARGEST_SEED, (), device=device) if p > 0 else None


def factors(drop: Dropout, b: slice, h: slice, q: slice, k: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, q, k) of a block of the weights: 0 where one is dropped, else 1/(1 − p)."""
    device = drop.seed.device
    places = [torch.arange(span.start, span.stop, device=device) for span in (b, h, q, k)]
    of_b, of_h, of_q, of_k = (place.view([-1 if axis == own else 1 for axis in range(4)]) for own, place in enumerate(places))
    return survives(drop, of_b, of_h, of_q, of_k).to(dtype).mul_(drop.boost)


def survives(drop: Dropout, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Whether a weight is kept, for places that broadcast.

    A row has a state of 64 bits, so that no two are likely to share it. Of the hash, one half enters before the first
    product and the other before the second.
    """
    low, high = drop.seed & WORD, (drop.seed >> 32) & WORD
    before, between = _stir(_stir(low) ^ high), _stir(_stir(high ^ SALT) ^ low)
    for place in (b, h, q):
        before, between = _stir(before ^ place), _stir(between ^ place)
    return _is_at_least(_stir_words(_to_word(before) + _to_word(k * STRIDE), _to_word(between)), 2 * drop.limit)


def _stir(x: Tensor) -> Tensor:
    """A permutation of the numbers below 2³² that spreads each bit over all; of int64, for the few numbers of a row."""
    x = (x ^ (x >> 16)).mul_(FIRST).bitwise_and_(WORD)
    x = x.bitwise_xor_(x >> 15).mul_(SECOND).bitwise_and_(WORD)
    return x.bitwise_xor_(x >> 16)


def _stir_words(x: Tensor, between: Tensor) -> Tensor:
    """The same in place for int32, which wraps around at 2³² by itself, with another number between the two products."""
    x = x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(FIRST)).bitwise_xor_(between)
    x = x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(SECOND))
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _to_word(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 as an int32."""
    return x.bitwise_and(WORD).to(torch.int32)


def _signed(word: int) -> int:
    """The int32 with the bits of a number below 2³²."""
    return word - 2**32 if word >= 2**31 else word


def _is_at_least(x: Tensor, limit: int) -> Tensor:
    """x ≥ limit where int32 stands for the numbers below 2³²: with the upper bit flipped, the signed order is theirs."""
    return x.bitwise_xor_(-(2**31)) >= limit - 2**31
