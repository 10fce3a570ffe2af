"""The threshold of one row of a cache, from its scores by page and the best score of each page.

The threshold of a part of the keys is never above that of all of them. So each rule works on the best scores first, lists
the pages that can matter to what it found, and looks at the scores of those alone. As the rules in rows.py.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused import decode_launch
from compactattn.fused.profiles import INF, any_powers, is_whole, root, whole_powers
from compactattn.fused.threshold import ANCHORED, EPS, FIXED, LONGEST, MOST_TURNS, NEAREST, to_ordered
from compactattn.fused.tiles import shift

PAGE = tl.constexpr(decode_launch.PAGE)
PEAK, REACH, THETA, CUT = (tl.constexpr(place) for place in range(4))  # numbers kept of each row
COARSE = tl.constexpr(2.0**-10)  # how far above its root a reach may stay that only chooses pages
LEAST = tl.constexpr(-(2**31))
MOST = tl.constexpr(2**31 - 1)
LENGTHS = ["key_heads", "Q", "K", "pages", "splits", "rows", "nearest", "scale_h", "at_b", "lo_b", "hi_b"]


@triton.jit
def matters(s, peak, reach, theta, RULE: tl.constexpr):
    """Whether a key with this score, or one below, can have a weight. NaN matters, −inf does not."""
    if RULE == FIXED:
        inside = (s <= theta) == 0
        inside = inside | (reach <= 0.0)  # nothing in reach is uniform
    elif RULE == NEAREST:
        inside = (s < theta) == 0
    else:
        inside = (shift(s, peak) <= -reach) == 0
    return inside & (s != -INF)


@triton.jit
def loosen(reach, peak):
    """A reach that no rounding of another sum over the same keys exceeds."""
    return reach * (1.0 + 32 * EPS) + tl.abs(peak) * (4 * EPS)


@triton.jit
def load_kept(p_kept, o_rows, live, rows):
    """(M,) max s (0 where no key is legal), reach, θ and the last key inside among those at θ."""
    far = tl.cast(rows, tl.int64)
    peak = tl.load(p_kept + PEAK * far + o_rows, mask=live, other=-INF)
    reach = tl.load(p_kept + REACH * far + o_rows, mask=live, other=1.0)
    theta = tl.load(p_kept + THETA * far + o_rows, mask=live, other=0.0)
    cut = tl.load(p_kept + CUT * far + o_rows, mask=live, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(peak == -INF, 0.0, peak), reach, theta, cut


@triton.jit
def load_scores(p, p_list, start, size, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """(BLOCK,) numbers start … of a row, or of its listed pages; −inf beyond them."""
    o = start + tl.arange(0, BLOCK)
    if LISTED:
        page = tl.load(p_list + o // PAGE, mask=o < size, other=0)
        return tl.load(p + page * PAGE + o % PAGE, mask=o < size, other=-INF)
    else:
        return tl.load(p + o, mask=o < size, other=-INF)


@triton.jit
def newton(p, p_list, size, peak, reach, tolerance, LISTED: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """ρ with Σ [(ρ + x)/r]₊^r = 1, as rows._normalising: from above, on the r-norm of (ρ + x)₊."""
    moving = peak > -INF
    turn = 0
    while moving & (turn < MOST_TURNS):
        mass, steep = 0.0, 0.0
        for start in range(0, size, BLOCK):
            x = shift(load_scores(p, p_list, start, size, LISTED, BLOCK), peak)
            k, slope = whole_powers(x + reach, R) if is_whole(R) else any_powers(x, reach, R)
            mass += tl.sum(k, 0)
            steep += tl.sum(slope, 0)
        step = mass * ((1.0 if is_whole(R) else reach) - R * root(mass, R)) / steep
        moving = tl.abs(step) > tolerance * reach
        reach = tl.maximum(reach - step, reach * EPS)  # positive where the root is smaller than the rounding of ρ
        turn += 1
    return reach


@triton.jit
def from_ordered(i):
    """The score; −inf for what is below all scores."""
    s = (i ^ ((i >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(s == s, s, -INF)


@triton.jit
def bisect(p, p_list, size, wanted, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest number, as to_ordered, with `wanted` scores at or above it; or one with just that many. 32 counts at most.

    Where there are fewer than that it is the least number of all.
    """
    low = tl.cast(LEAST, tl.int32)
    bit = 31
    while bit >= 0:
        middle = low ^ (tl.cast(1, tl.int32) << bit)  # the first turn clears the sign, the others set a bit
        count = 0
        for start in range(0, size, BLOCK):
            i = to_ordered(load_scores(p, p_list, start, size, LISTED, BLOCK))
            count += tl.sum((i >= middle).to(tl.int32), 0)
        low = tl.where(count >= wanted, middle, low)
        bit = tl.where(count == wanted, -1, bit - 1)
    return low


@triton.jit
def kth_largest(p_s, p_list, size, wanted, BLOCK: tl.constexpr):
    """The k-th largest score of the listed pages, and the last key inside among those equal to it."""
    low = bisect(p_s, p_list, size, wanted, True, BLOCK)
    kth, left = tl.cast(MOST, tl.int32), wanted
    for start in range(0, size, BLOCK):
        i = to_ordered(load_scores(p_s, p_list, start, size, True, BLOCK))
        kth = tl.minimum(kth, tl.min(tl.where(i >= low, i, MOST), 0))
    for start in range(0, size, BLOCK):
        i = to_ordered(load_scores(p_s, p_list, start, size, True, BLOCK))
        left -= tl.sum((i > kth).to(tl.int32), 0)
    cut = tl.cast(-1, tl.int32)
    for start in range(0, size, BLOCK):
        o = start + tl.arange(0, BLOCK)
        i = to_ordered(load_scores(p_s, p_list, start, size, True, BLOCK))
        tie = (i == kth).to(tl.int32)
        inside = (tie > 0) & (tl.cumsum(tie, 0) <= left)
        key = tl.load(p_list + o // PAGE, mask=o < size, other=0) * PAGE + o % PAGE
        cut = tl.maximum(cut, tl.max(tl.where(inside, key, -1), 0))
        left -= tl.sum(tie, 0)
    few = from_ordered(low) == -INF  # of the pages read so far: no key is certain to be outside
    return tl.where(few, -INF, from_ordered(kth)), cut


@triton.jit(do_not_specialize=LENGTHS)
def find_threshold(
    p_s, p_best, p_list, p_kept, p_lo, p_hi, p_scale, lo_b, hi_b, scale_h, key_heads, Q, K, pages, rows, margin, nearest,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """max s, reach, θ and the last key inside among those at θ of one row, from the pages that were read."""
    row = tl.program_id(0)
    b, h = row // Q // (key_heads * GROUP), row // Q % (key_heads * GROUP)
    lo = tl.maximum(tl.load(p_lo + b * lo_b + row % Q), 0).to(tl.int32)
    hi = tl.minimum(tl.load(p_hi + b * hi_b + row % Q), K).to(tl.int32)
    begin = lo // PAGE
    count = tl.where(lo < hi, tl.cdiv(hi, PAGE) - begin, 0)
    o_row = tl.cast(row, tl.int64) * pages + begin
    p_s += o_row * PAGE
    p_best += o_row
    p_list += o_row
    peak = tl.cast(-INF, tl.float32)
    for start in range(0, count, BLOCK):
        peak = tl.maximum(peak, tl.max(load_scores(p_best, p_list, start, count, False, BLOCK), 0))
    theta = peak * 0.0
    reach = theta + 1.0
    cut = tl.cast(-1, tl.int32)
    if RULE == ANCHORED:
        reach = tl.cast(margin, tl.float32)
    elif RULE == FIXED:
        theta = tl.load(p_scale + h * scale_h) - margin
        reach = tl.minimum(peak - theta, LONGEST)
    else:
        # the best keys of the pages have a threshold of their own, not above that of all keys
        if RULE == NEAREST:
            wanted = tl.minimum(tl.maximum(hi - lo, 0), nearest)
            theta = from_ordered(bisect(p_best, p_list, count, wanted, False, BLOCK))
        else:
            reach = newton(p_best, p_list, count, peak, tl.cast(R, tl.float32), COARSE, False, R, BLOCK)
            reach = loosen(reach, peak)
        listed = 0
        for start in range(0, count, BLOCK):
            best = load_scores(p_best, p_list, start, count, False, BLOCK)
            inside = matters(best, peak, reach, theta, RULE)
            place = listed + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(p_list + place, start + tl.arange(0, BLOCK), mask=inside)
            listed += tl.sum(inside.to(tl.int32), 0)
        tl.debug_barrier()  # the list is read by other threads than wrote it
        if RULE == NEAREST:
            theta, cut = kth_largest(p_s, p_list, listed * PAGE, wanted, BLOCK)
            cut = tl.where(cut >= 0, cut + begin * PAGE, cut)
            reach = tl.where(peak == theta, 0.0, tl.minimum(peak - theta, LONGEST))
        else:
            reach = newton(p_s, p_list, listed * PAGE, peak, reach, 4 * EPS, True, R, BLOCK)
    if RULE != FIXED and RULE != NEAREST:
        reach = tl.where(peak == -INF, INF, reach)  # no key seen, none certain to be outside
    far = tl.cast(rows, tl.int64)
    tl.store(p_kept + PEAK * far + row, peak)
    tl.store(p_kept + REACH * far + row, reach)
    tl.store(p_kept + THETA * far + row, theta)
    tl.store(p_kept + CUT * far + row, cut.to(tl.float32, bitcast=True))
