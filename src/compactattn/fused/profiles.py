"""Triton twins of the profiles in rows.py: K(y) = y₊^r with y = 1 + x/ρ, and its slope y^(r−1).

r is a compile-time number: 0 is the step, ∞ the Gaussian. Everything is fp32. NaN stays NaN.
Shapes: (M, N) a tile of x = s − max s for M queries and N keys; (M, 1) what belongs to a row.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
TINY = tl.constexpr(1.2e-38)  # its inverse is finite


@triton.constexpr_function
def is_whole(r):
    """Whether the power needs no logarithm."""
    return r in (1.0, 2.0, 3.0)


@triton.jit
def powers(x, reach, unit, R: tl.constexpr):
    """y^r and y^(r−1) with y = (ρ + x)₊ · unit; the slope is 0 off the support also for r = 1. 0 < r < ∞.

    For an r that is not whole, unit must be 1/ρ.
    """
    if is_whole(R):
        t = x + reach
        outside = t <= 0.0
        y = tl.where(outside, 0.0, t) * unit
        if R == 1.0:
            return y, tl.where(outside, 0.0, 1.0)
        elif R == 2.0:
            return y * y, y
        else:
            return y * y * y, y * y
    else:
        z = x * unit
        z = tl.where((x + reach <= 0.0) | (z <= -1.0), -1.0, z)  # a key at the edge is outside to the last bit
        slope = tl.exp2(log2_1p(z) * (R - 1.0))
        return slope + z * slope, slope


@triton.jit
def log2_1p(z):
    """log2(1 + z), which keeps its digits for a small z."""
    u = 1.0 + z
    rounded = u - 1.0
    return tl.where(rounded == 0.0, z * LOG2E, tl.log2(u) * (z / tl.where(rounded == 0.0, 1.0, rounded)))


@triton.jit
def exp(x):
    """e^x, from exp2 as in the reference."""
    return tl.exp2(x * LOG2E)


@triton.jit
def heights(x, reach, R: tl.constexpr):
    """K and its slope for any r, ρ > 0, as if every key were inside; the best key has K = 1 to the last bit or so.

    The slope of the step is 0 and that of the Gaussian K itself.
    """
    if R == 0.0:
        k = tl.where(x <= -reach, 0.0, 1.0)
        return k, k * 0.0
    elif R == INF:
        k = exp(x)
        return k, k
    else:
        return powers(x, reach, 1.0 / tl.maximum(reach, TINY), R)
