"""From scores to the threshold, as the rules in rows.py: the reach ρ = max s − θ of each row.

Functions called by the forward kernel of estimate.py. They look at all scores of a block of queries several times:
where one tile holds them all (SINGLE) it stays in registers, else each look takes the product q·k again.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.profiles import INF, is_whole, powers
from compactattn.fused.tiles import grounded, load_score, shift

NORMALISING, ANCHORED, FIXED, NEAREST = (tl.constexpr(code) for code in range(4))
EPS = tl.constexpr(2.0**-23)
MOST_TURNS = tl.constexpr(64)  # of Newton
LARGEST = tl.constexpr(1e37)  # a reach whose inverse is a normal number


@triton.jit
def find_threshold(
    b_s, row, sight, scale, margin, nearest, SINGLE: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(M,) each: max s, the reach, θ as a score and the last key inside among those at θ."""
    first, last = sight[2], sight[3]
    if SINGLE:
        peak = tl.max(b_s, 1)
    else:
        peak = tl.full((BLOCK_M,), -INF, tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            peak = tl.maximum(peak, tl.max(load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D), 1))
    theta = tl.zeros((BLOCK_M,), tl.float32)
    cut = tl.zeros((BLOCK_M,), tl.int32)
    if RULE == ANCHORED:
        reach = theta + margin
    elif RULE == FIXED:
        theta = theta + (scale - margin)
        reach = tl.minimum(peak - theta, LARGEST)
    elif RULE == NEAREST:
        theta, cut = kth_largest(b_s, row, sight, nearest, SINGLE, ALIBI, D, BLOCK_M, BLOCK_N, BLOCK_D)
        reach = tl.where(peak == theta, 0.0, tl.minimum(peak - theta, LARGEST))
    elif R == INF:
        reach = theta + INF
    else:
        reach = normalising_reach(b_s, row, sight, peak, SINGLE, R, ALIBI, D, BLOCK_M, BLOCK_N, BLOCK_D)
    return peak, reach, theta, cut


@triton.jit
def normalising_reach(
    b_s, row, sight, peak, SINGLE: tl.constexpr, R: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(M,) ρ with Σ [(ρ + x)/r]₊^r = 1: Newton on the r-norm of (ρ + x)₊, from above, as rows._normalising.

    A row stops at the turn whose step is a few ulp, whatever its neighbours still do.
    """
    b_lo, b_hi, first, last = sight
    ground = grounded(peak)
    if SINGLE:
        b_s = shift(b_s, ground)
    reach = tl.full((BLOCK_M,), R, tl.float32)
    moving = b_lo < b_hi
    turn = 0
    going = tl.max(moving.to(tl.int32), 0)
    while (going > 0) & (turn < MOST_TURNS):
        if SINGLE:
            mass, steep = newton_sums(b_s, reach, R)
        else:
            mass = tl.zeros((BLOCK_M,), tl.float32)
            steep = tl.zeros((BLOCK_M,), tl.float32)
            for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
                x = shift(load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D), ground)
                more, steeper = newton_sums(x, reach, R)
                mass += more
                steep += steeper
        step = newton_step(tl.where(moving, mass, 1.0), tl.where(moving, steep, 1.0), reach, R)
        shorter = tl.maximum(reach - step, reach * EPS)  # positive where the root is smaller than the rounding of ρ
        still = moving & (tl.abs(step) > 4 * EPS * reach)
        reach = tl.where(moving, shorter, reach)
        moving = still
        going = tl.max(moving.to(tl.int32), 0)
        turn += 1
    return reach


@triton.jit
def newton_sums(x, reach, R: tl.constexpr):
    """(M,) Σ K and Σ of its slope, in units of ρ, or of 1 for a whole r."""
    if is_whole(R):
        k, steep = powers(x, reach[:, None], 1.0, R)
    else:
        k, steep = powers(x, reach[:, None], 1.0 / reach[:, None], R)
    return tl.sum(k, 1), tl.sum(steep, 1)


@triton.jit
def newton_step(mass, steep, reach, R: tl.constexpr):
    """(M,) what to take off ρ."""
    if R == 1.0:
        return (mass - 1.0) / steep
    elif R == 2.0:
        return mass * (1.0 - 2.0 / tl.sqrt(mass)) / steep
    else:
        root = R * tl.exp2(tl.log2(mass) * (-1.0 / R))
        if is_whole(R):
            return mass * (1.0 - root) / steep
        else:
            return mass * (reach - root) / steep


# -- the k-th largest score ----------------------------------------------------------------------


@triton.jit
def to_ordered(s):
    """Whole numbers in the order of the scores; −0 equals 0."""
    i = tl.where(s == 0.0, 0.0, s).to(tl.int32, bitcast=True)
    return i ^ ((i >> 31) & 0x7FFFFFFF)


@triton.jit
def from_ordered(i):
    return (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def kth_largest(
    b_s, row, sight, nearest, SINGLE: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(M,) the k-th largest score, and the last key inside among those equal to it: the earlier key wins a tie.

    Bisection on the bits of the scores: exact after 32 counts. A row is done as soon as just k scores lie at or above.
    """
    b_lo, b_hi, first, last = sight
    wanted = tl.minimum(tl.maximum(b_hi - b_lo, 0), nearest)
    if SINGLE:
        b_s = to_ordered(b_s)
    low = tl.full((BLOCK_M,), -(2**31), tl.int32)  # at least `wanted` scores are ≥ low
    done = b_lo >= b_hi
    bit = 31
    going = tl.max((b_lo < b_hi).to(tl.int32), 0)
    while (going > 0) & (bit >= 0):
        middle = low ^ (tl.full((BLOCK_M,), 1, tl.int32) << bit)  # the first turn clears the sign, the others set a bit
        if SINGLE:
            count = tl.sum((b_s >= middle[:, None]).to(tl.int32), 1)
        else:
            count = tl.zeros((BLOCK_M,), tl.int32)
            for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
                i = to_ordered(load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D))
                count += tl.sum((i >= middle[:, None]).to(tl.int32), 1)
        low = tl.where((count >= wanted) & (done == 0), middle, low)
        done = done | (count == wanted)
        going = tl.max((done == 0).to(tl.int32), 0)
        bit -= 1
    if SINGLE:
        kth = least_above(b_s, low)
        left = wanted - tl.sum((b_s > low[:, None]).to(tl.int32), 1)
        cut = last_inside(b_s, kth, tl.where(done, BLOCK_N, left), 0, BLOCK_N)
    else:
        kth = tl.full((BLOCK_M,), 2**31 - 1, tl.int32)
        left = wanted
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            i = to_ordered(load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D))
            kth = tl.minimum(kth, least_above(i, low))
            left -= tl.sum((i > low[:, None]).to(tl.int32), 1)
        left = tl.where(done, last, left)
        cut = tl.full((BLOCK_M,), -1, tl.int32)
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            i = to_ordered(load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D))
            cut = tl.maximum(cut, last_inside(i, kth, left, start, BLOCK_N))
            left -= tl.sum((i == kth[:, None]).to(tl.int32), 1)
    return from_ordered(kth), cut


@triton.jit
def least_above(i, low):
    """(M,) the least number ≥ low."""
    return tl.min(tl.where(i >= low[:, None], i, 2**31 - 1), 1)


@triton.jit
def last_inside(i, kth, left, start, BLOCK_N: tl.constexpr):
    """(M,) the last of the first `left` keys of a tile that equal kth; −1 if there is none."""
    tie = (i == kth[:, None]).to(tl.int32)
    inside = (tie > 0) & (tl.cumsum(tie, 1) <= left[:, None])
    return tl.max(tl.where(inside, (start + tl.arange(0, BLOCK_N))[None, :], -1), 1)
