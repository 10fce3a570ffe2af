"""What the kernels know of a row, and the weights of a tile of scores: y₊^r with y = u (s − θ), as rows.weigh.

Values of r and the rule are compile-time numbers; lengths are not, so that a new length compiles nothing.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.profiles import (
    ALL,
    INF,
    LEARNED,
    LOG2E,
    SMALLEST,
    any_powers,
    is_whole,
    reaches_zero,
    rising_powers,
    root,
    saturate,
    whole_powers,
)
from compactattn.fused.threshold import (
    ANCHORED,
    CUT,
    FIXED,
    LONGEST,
    MASS,
    NEAREST,
    NORMALISING,
    PEAK,
    REACH,
    SLOPES,
    THETA,
    is_plain,
)
from compactattn.fused.tiles import bend, grounded, load_scale, shift

TINY = tl.constexpr(2.0**-100)


@triton.constexpr_function
def is_even(rule, r, bends, exact):
    """Whether moreover rise and gain are numbers of the head: a row then has two of its own, its base and its centre."""
    return rule == NORMALISING.value and is_plain(rule, r, bends, exact)


@triton.constexpr_function
def is_saturated(rule, r, bends, exact):
    """Whether y is at most 1, so that one instruction cuts it at both ends, and a score that is not a number has no weight."""
    return is_plain(rule, r, bends, exact) and rule != FIXED.value and r != float("inf")


@triton.constexpr_function
def is_direct(rule, peaked):
    """Whether θ is known before any score."""
    return rule == FIXED.value and not peaked


@triton.jit
def load_kept(p_kept, o_rows, m_rows, far, RULE: tl.constexpr):
    """(M,) each: max s (−inf where no key is seen), ρ, Z, Σ slopes, θ and the last key inside.

    In the place of θ an anchored row has its best score as a tile of `weigh` shows it, q·k or s.
    """
    peak = tl.load(p_kept + PEAK * far + o_rows, mask=m_rows, other=-INF)
    reach = tl.load(p_kept + REACH * far + o_rows, mask=m_rows, other=1.0)
    mass = tl.load(p_kept + MASS * far + o_rows, mask=m_rows, other=1.0)
    slopes = tl.load(p_kept + SLOPES * far + o_rows, mask=m_rows, other=0.0)
    theta, cut = peak - reach, tl.zeros_like(peak).to(tl.int32)
    if RULE == ANCHORED:
        theta = tl.load(p_kept + THETA * far + o_rows, mask=m_rows, other=LONGEST)
    elif RULE == NEAREST:
        theta = tl.load(p_kept + THETA * far + o_rows, mask=m_rows, other=0.0)
        cut = tl.load(p_kept + CUT * far + o_rows, mask=m_rows, other=0.0).to(tl.int32, bitcast=True)
    return peak, reach, mass, slopes, theta, cut


@triton.jit
def make_row(
    kept, at, scale, bends, order, margin, NORMALISED: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, PEAKED: tl.constexpr
):  # fmt: skip
    """What `weigh` needs of each row, and the gain g. K is y^r with y = rise · q·k + base = unit · (s − θ).

    Where θ is anchored it is 1 + rise · (q·k − its best) or unit · (x + ρ).

    NORMALISED: K is w, else w but for the factor 1/Z, which stays apart where θ is anchored. A row in whose reach no key is has
    Z < 0 and uniform weights.
    """
    peak, reach, mass, _, theta, cut = kept
    dead, alone = peak == -INF, mass < 0.0
    mass = tl.abs(mass)
    ground = grounded(peak)
    if RULE == FIXED:
        theta = tl.zeros_like(peak) + (scale - margin)
    nowhere = dead | (reach <= 0.0) if RULE == FIXED and not is_whole(R) else dead
    safe = tl.where(nowhere, -LONGEST, tl.where(reach > 0.0, reach, 1.0))  # so that no score is in reach of such a row
    inverse = tl.where(dead, 0.0, 1.0 / mass) if NORMALISED else tl.where(dead, 0.0, 1.0)
    base = tl.zeros_like(peak)
    unit = base + 1.0 if RULE == NORMALISING or is_direct(RULE, PEAKED) else 1.0 / safe
    gain = base + 1.0
    rise = base + scale
    if R == INF:
        rise = rise * LOG2E
        base = tl.where(dead, -INF, -(tl.log2(mass) if NORMALISED else 0.0))
        if RULE == NORMALISING:
            base -= ground * LOG2E
    elif is_whole(R) and RULE == NORMALISING:
        # y = s/r − τ, at most 1. The last step of Newton leaves a mass closer to 1 than the sums before it can tell
        unit, rise = base + 1.0 / R, rise * (1.0 / R)
        base = tl.where(dead, -INF, -(ground - reach) * (1.0 / R))
    elif is_whole(R):
        factor = root(mass, R) if NORMALISED and RULE != ANCHORED else base + 1.0
        unit = tl.where(dead, 1.0, unit * factor)
        gain = R * unit
        if RULE == ANCHORED:
            gain = gain * inverse
        if RULE == FIXED:
            # so far from θ that a score makes no difference, unless it is −∞ (or 2^100 / n and more)
            unit, gain = tl.where(alone, TINY, unit), tl.where(alone, 0.0, gain)
            theta = tl.where(dead, LONGEST, tl.where(alone, -factor / TINY, theta))
            base = -theta * unit
        rise = tl.maximum(scale * unit, SMALLEST)
        if RULE == NEAREST:
            gain = tl.where(reach > 0.0, gain, 0.0)
    elif R != 0.0:
        gain = tl.where(dead | alone | (reach <= 0.0), 0.0, order / (safe * mass))
        base = tl.where(alone, 1.0, 0.0)
    elif RULE == FIXED:
        theta = tl.where(alone, -INF, theta)
    best = grounded(theta) if RULE == ANCHORED else ground
    return (at, scale, bends, best, safe, theta, cut, unit, inverse, rise, base, order), gain


@triton.jit
def turn_row(row):
    """The row as (M, 1)."""
    at, scale, bends, peak, reach, theta, cut, unit, inverse, rise, base, order = row
    return (
        at[:, None], scale, bends, peak[:, None], reach[:, None], theta[:, None], cut[:, None], unit[:, None],
        inverse[:, None], rise[:, None], base[:, None], order,
    )  # fmt: skip


@triton.jit
def weigh(raw, o_n, row, RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr):
    """The scores of a tile of q·k, K of every key and its slope, both 0 off the support and where a key is not seen."""
    at, scale, bends, peak, reach, theta, cut, unit, inverse, rise, base, order = row
    if is_saturated(RULE, R, BENDS, EXACT):
        # an anchored y is 1 at the best key to the last bit, however large the scores are
        y = saturate(raw - peak, rise, 1.0) if RULE == ANCHORED else saturate(raw, rise, base)
        k, steep = rising_powers(y, R)
        return raw, k, steep
    elif is_plain(RULE, R, BENDS, EXACT):
        t = tl.fma(raw, rise, base)
        if R == INF:
            k = tl.exp2(t)
            return raw, k, k
        else:
            k, steep = whole_powers(t, R)
            return raw, k, steep
    else:
        s = bend(raw * scale, o_n, at, bends, BENDS)
        x = shift(s, peak)
        if is_whole(R):
            k, steep = whole_powers((s - theta if RULE == FIXED else x + reach) * unit, R)
        elif R == 0.0:
            inside = s > theta if RULE == FIXED else x > -reach if RULE == ANCHORED else s == s
            k = tl.where(s == s, tl.where(inside, inverse, 0.0), s)
            steep = k * 0.0
        elif R == INF:
            # from the best score on, which is 0: an exponent of large scores would be a small difference of rounded numbers
            short: tl.constexpr = RULE == NEAREST and not EXACT
            k = tl.exp2(tl.fma(s - peak, LOG2E, base)) if short else tl.exp2(x * LOG2E) * inverse
            if RULE == ANCHORED:
                k = tl.where(x > -reach, k, 0.0)
            steep = k
        else:
            k, steep = any_powers(x, reach, order if R == LEARNED else R)
            uniform = tl.where(s == -INF, 0.0, 1.0)
            k, steep = tl.where(base > 0.0, uniform, k) * inverse, tl.where(base > 0.0, 0.0, steep)
        if RULE == NEAREST:
            inside = (s > theta) | ((s == theta) & (o_n <= cut))
            k, steep = tl.where(inside, k, 0.0), tl.where(inside, steep, 0.0)
        return s, k, steep


@triton.jit
def is_best(s, row, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr):
    """1 at the key(s) that an anchored row hangs on, else 0; s as `weigh` has it."""
    if is_plain(ANCHORED, R, BENDS, EXACT):
        return reaches_zero(s - row[3])
    else:
        return tl.where(s == row[3], 1.0, 0.0)


@triton.jit
def largest_scale(p_scale, key_head, scale_h, GROUP: tl.constexpr):
    """Of the heads that share keys. What dk sums is ds in units of it: ds times a small scale would vanish in fp16."""
    most = load_scale(p_scale + key_head * GROUP * scale_h)
    for member in range(1, GROUP):
        most = tl.maximum(most, load_scale(p_scale + (key_head * GROUP + member) * scale_h), propagate_nan=ALL)
    return most
