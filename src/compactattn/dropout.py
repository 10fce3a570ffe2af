"""Dropout of attention weights whose mask is never stored: a pure function of a seed and the place of a weight.

    o = Σ_i m_i w_i v_i / (1 − p),    m_i = 1 with probability 1 − p, else 0: independent for every weight.

m is a hash of (seed, sample, head, query, key) in whole numbers modulo 2³². Forward and backward, PyTorch here and Triton in
fused/drops.py, in whatever blocks: all find the same mask. A weight keeps its fate if the batch, the heads or the lengths grow.

Shapes: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

from numbers import Real
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
    if not isinstance(p, Real):  # NumPy's numbers too
        raise TypeError(f"{name} must be a number, got {type(p).__name__}")
    if not 0 <= p < 1:
        raise ValueError(f"{name} = {p!r} must be at least 0 and below 1: the probability of dropping, 0 for none")
    return float(p)


def draw_seed(p: float, device: torch.device) -> Tensor | None:
    """A seed from PyTorch's generator of the device, which is never read on the host; None if nothing is dropped."""
    return torch.randint(LARGEST_SEED, (), device=device) if p > 0 else None


class Fates(NamedTuple):
    """A Dropout and the state that it gives to each row: 64 bits, so that no two are likely to share it."""

    drop: Dropout
    before: Tensor  # (B, H, Q, 1) int32: enters the hash before its first product
    between: Tensor  # (B, H, Q, 1) int32: and before its second


def foresee(drop: Dropout, batch: int, heads: int, queries: int) -> Fates:
    """The fates of all weights of a call, not yet told apart by key."""
    line = torch.arange(max(batch, heads, queries), device=drop.seed.device)
    return foresee_at(drop, line[:batch, None, None, None], line[:heads, None, None], line[:queries, None])


def foresee_at(drop: Dropout, b: Tensor, h: Tensor, q: Tensor) -> Fates:
    """The same of rows at places that broadcast."""
    low, high = drop.seed & WORD, (drop.seed >> 32) & WORD
    before, between = _stir(_stir(low) ^ high), _stir(_stir(high ^ SALT) ^ low)
    for place in (b, h, q):
        before, between = _stir(before ^ place), _stir(between ^ place)
    return Fates(drop, _to_word(before), _to_word(between))


def factors(fates: Fates, b: slice, h: slice, q: slice, k: slice, dtype: torch.dtype) -> Tensor:
    """(b, h, q, k) of a block of the weights: 0 where one is dropped, else 1/(1 − p)."""
    drop, before, between = fates
    keys = torch.arange(k.start, k.stop, device=before.device)
    return survives(Fates(drop, before[b, h, q], between[b, h, q]), keys).to(dtype).mul_(drop.boost)


def survives(fates: Fates, k: Tensor) -> Tensor:
    """1 where a weight is kept, else 0, in int32: to make and use booleans takes a CPU as long as all the rest."""
    x = fates.before + _to_word(k * STRIDE)
    spare = torch.empty_like(x)
    x = _fold(x, 16, spare).mul_(_signed(FIRST)).bitwise_xor_(fates.between)
    x = _fold(x, 15, spare).mul_(_signed(SECOND))
    return _is_at_least(x, 2 * fates.drop.limit)


def _stir(x: Tensor) -> Tensor:
    """A permutation of the numbers below 2³² that spreads each bit over all; of int64, for the few numbers of a row."""
    x = (x ^ (x >> 16)).mul_(FIRST).bitwise_and_(WORD)
    x = x.bitwise_xor_(x >> 15).mul_(SECOND).bitwise_and_(WORD)
    return x.bitwise_xor_(x >> 16)


def _fold(x: Tensor, bits: int, spare: Tensor) -> Tensor:
    """x ^ (x >> bits) in place, for int32, which stands for the numbers below 2³² and wraps around there by itself."""
    return x.bitwise_xor_(torch.bitwise_right_shift(x, bits, out=spare).bitwise_and_(WORD >> bits))


def _to_word(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 as an int32."""
    return x.bitwise_and(WORD).to(torch.int32)


def _signed(word: int) -> int:
    """The int32 with the bits of a number below 2³²."""
    return word - 2**32 if word >= 2**31 else word


def _is_at_least(x: Tensor, limit: int) -> Tensor:
    """Whether x ^ (x >> 16) ≥ limit, in place, where int32 stands for the numbers below 2³².

    The upper half of x stays and decides, unless it is that of the limit: then it is known, and so is what the lower half is
    folded with. With the upper bit flipped, the signed order is that of the numbers.
    """
    return x.bitwise_xor_((limit >> 16) - 2**31).ge_(limit - 2**31)
