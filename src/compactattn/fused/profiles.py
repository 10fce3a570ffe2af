"""Triton twins of the profiles in rows.py: K(y) = y₊^r and its slope y^(r−1).

r is a compile-time number: 0 is the step, ∞ the Gaussian, LEARNED one of each head that is read at run time.
Everything is fp32. NaN stays NaN, but for `saturate`.
Shapes: (M, N) a tile of numbers for M queries and N keys; (M, 1) what belongs to a row.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import os

import triton
import triton.language as tl

from compactattn.fused import launch

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
ALL = tl.constexpr(tl.PropagateNan.ALL)
LEARNED = tl.constexpr(launch.LEARNED)
SMALLEST, LARGEST = tl.constexpr(2.0**-126), tl.constexpr(3e38)  # normal numbers
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.constexpr_function
def is_whole(r):
    """Whether the power needs no logarithm, and overflows nothing."""
    return r in (1.0, 2.0, 3.0)


@triton.jit
def saturate(a, b, c):
    """a · b + c between 0 and 1, and 0 where that is not a number: one instruction, where a maximum alone takes two turns."""
    if INTERPRETED:
        t = tl.fma(a, b, c)
        return tl.where(t > 0.0, tl.minimum(t, 1.0), 0.0)
    else:
        return tl.inline_asm_elementwise("fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [a, b, c], tl.float32, True, 1)


@triton.jit
def positive(y):
    """1 where y > 0, else 0, as a number: a tile has more scores than a thread has room for answers of yes and no."""
    if INTERPRETED:
        return tl.where(y > 0.0, 1.0, 0.0)
    else:
        return saturate(y, LARGEST, 0.0)


@triton.jit
def reaches_zero(x):
    """1 where x = 0, else 0, for an x that is nowhere positive."""
    if INTERPRETED:
        return tl.where(x == 0.0, 1.0, 0.0)
    else:
        return saturate(x, LARGEST, 1.0)


@triton.jit
def whole_powers(t, R: tl.constexpr):
    """t₊^r and t₊^(r−1) for r = 1, 2, 3; the slope is 0 off the support also for r = 1."""
    y = tl.maximum(t, 0.0, propagate_nan=ALL)
    if R == 1.0:
        return y, positive(t)
    else:
        return rising_powers(y, R)


@triton.jit
def rising_powers(y, R: tl.constexpr):
    """The same for a y that is nowhere negative."""
    if R == 1.0:
        return y, positive(y)
    elif R == 2.0:
        return y * y, y
    else:
        square = y * y
        return square * y, square


@triton.jit
def any_powers(x, reach, r):
    """y^r and y^(r−1) with y = (1 + x/ρ)₊, for any 1 < r < ∞."""
    z = x / reach
    z = tl.where((x + reach <= 0.0) | (z <= -1.0), -1.0, z)  # a key at the edge is outside to the last bit
    slope = tl.exp2(log2_1p(z) * (r - 1.0))
    return slope + z * slope, slope


@triton.jit
def log2_1p(z):
    """log2(1 + z), which keeps its digits for a small z."""
    u = 1.0 + z
    rounded = u - 1.0
    return tl.where(rounded == 0.0, z * LOG2E, tl.log2(u) * (z / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def root(mass, R: tl.constexpr):
    """mass^(−1/r)."""
    if R == 1.0:
        return 1.0 / mass
    elif R == 2.0:
        return 1.0 / tl.sqrt(mass)
    else:
        return any_root(mass, R)


@triton.jit
def any_root(mass, r):
    return tl.exp2(tl.log2(mass) * (-1.0 / r))


@triton.jit
def load_order(p_orders, h):
    """The learned r of a head."""
    return tl.maximum(tl.load(p_orders + h), 1.0 + 2.0**-23)  # so that (r − 1) · ∞ is ∞


@triton.jit
def order_slope(w, r):
    """∂w/∂r at fixed θ + r: w (L + e^−L − 1) with L = ln(w)/r."""
    log = tl.log(tl.maximum(w, SMALLEST)) / r
    tail = 1.0 - log / 5.0 * (1.0 - log / 6.0 * (1.0 - log / 7.0 * (1.0 - log / 8.0)))
    near = log * log * (0.5 - log / 6.0 * (1.0 - log / 4.0 * tail))  # the sum cancels for large r
    return w * tl.where(log > -0.5, near, log + tl.exp(-log) - 1.0)
