"""The Triton twin of dropout.py: the same mask, to the bit."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn import dropout

FIRST, SECOND = tl.constexpr(dropout.FIRST), tl.constexpr(dropout.SECOND)
STRIDE, SALT = tl.constexpr(dropout.STRIDE), tl.constexpr(dropout.SALT)


@triton.jit
def open_drop(p_seed, b, h, limit, boost):
    """What decides the fate of the weights of one head, and what those that are kept are multiplied by."""
    seed = tl.load(p_seed)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    before, between = stir(stir(low, 0) ^ high, 0), stir(stir(high ^ SALT, 0) ^ low, 0)
    for place in tl.static_range(2):
        at = (h if place else b).to(tl.uint32)
        before, between = stir(before ^ at, 0), stir(between ^ at, 0)
    return before, between, limit, boost


@triton.jit
def thin(x, drop, o_m, o_n):
    """A tile with zeros where a weight is dropped; queries lie along one axis, keys along the other."""
    before, between, limit, _ = drop
    query = o_m.to(tl.uint32)
    before, between = stir(before ^ query, 0), stir(between ^ query, 0)
    fate = stir(before + o_n.to(tl.uint32) * STRIDE, between)
    return tl.where((fate >> 1).to(tl.int32) >= limit, x, 0.0)


@triton.jit
def stir(x, between):
    x = (x ^ (x >> 16)) * FIRST ^ between
    x = (x ^ (x >> 15)) * SECOND
    return x ^ (x >> 16)
