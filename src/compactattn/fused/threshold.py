"""From scores to the threshold, as the rules in rows.py: the reach ρ = max s − θ of each row, in one look (top-k: a few).

Keys j and j' are of one class where j ≡ j' modulo N. A program keeps the two best scores of each class, elementwise,
as the tiles pass. They hold nearly all of a support, which is small: their root is a lower bound of θ, 0.1 to 1 % of ρ
away on random scores, and `forward` makes the last step of Newton on the sums that it takes anyway.

The kernel also flags the tiles that may hold a weight: those with a score above a lower bound of θ.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.profiles import (
    ALL,
    INF,
    any_powers,
    any_root,
    is_whole,
    rising_powers,
    root,
    saturate,
    whole_powers,
)
from compactattn.fused.tiles import bend, grounded, hides, load_rows, open_block, plan, scores, shift

NORMALISING, ANCHORED, FIXED, NEAREST = (tl.constexpr(code) for code in range(4))
# numbers kept of each row between the kernels; the fifth of Anchored and Nearest only, the last of Nearest only
PEAK, REACH, MASS, SLOPES, THETA, CUT = (tl.constexpr(place) for place in range(6))
LENGTHS = [  # a new value compiles nothing
    "B", "H", "Q", "K", "rows", "tiles", "nearest", "limit", "at_b", "lo_b", "hi_b", "scale_h",
    "bias_b", "bias_h", "bias_m", "allowed_b", "allowed_h", "allowed_m", "dbias_b", "dbias_h", "dbias_m",
]  # fmt: skip
EPS = tl.constexpr(2.0**-23)
MOST_TURNS = tl.constexpr(64)  # of Newton
WORD = tl.constexpr(32)  # tiles whose flags are gathered in one number before they are written
LONGEST = tl.constexpr(1e37)  # a reach whose inverse is a normal number
FIRST_BITS = tl.constexpr(18)  # of the k-th of the class bests: sign, exponent and half of the digits
CLIMB = tl.constexpr(8)  # steps from score to score before a bisection
LEAST, ANY = tl.constexpr(0x7FFFFF - 2**31), tl.constexpr(2**31 - 1)  # −∞ as to_ordered; a key beyond all keys


@triton.constexpr_function
def is_plain(rule, r, bends, exact):
    """Whether one multiply-add leads from q·k to y: no bias, no order of keys, and bits to spare."""
    straight = rule != NEAREST.value and r in (1.0, 2.0, 3.0)
    return (straight or (rule == NORMALISING.value and r == float("inf"))) and not bends and not exact


@triton.constexpr_function
def few_turns(r):
    """Turns of Newton for a first bound: on random scores it is within a tenth of ρ of θ, for r = 1 within a third."""
    return 3 if r == 1.0 else 2


@triton.constexpr_function
def is_ordered(rule, bends):
    """Whether the scores are in the order of q·k, so that only the best need be scaled (a scale is positive)."""
    return rule != NEAREST.value and not bends


@triton.jit(do_not_specialize=LENGTHS)
def threshold(
    p_q, p_k, d_k, p_kept, p_flags, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    q_b, q_h, q_m, k_b, k_h, k_n, scale_h, at_b, lo_b, hi_b,
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin, nearest,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, TRACK: tl.constexpr,
    TOLERANCE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Writes max s and ρ of a block of queries of one head, and with TRACK the tiles that may hold a weight."""
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    place, view, b_q, own = open_block(
        p_q, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, q_b, q_h, q_m, scale_h, at_b, lo_b, hi_b, steps,
        H, Q, K, R, BENDS, D, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    head, b, h, begin = place
    b_at, b_lo, b_hi, live, bounds = view
    scale, order, bends = own
    size = scale if is_ordered(RULE, BENDS) else 1.0
    row = (b_q, p_k + b * k_b + h // GROUP * k_h, k_n, b_at, b_lo, b_hi, scale, size, bends)
    copies = (d_k, b.to(tl.int32), (h // GROUP).to(tl.int32))
    block = tl.cast(head, tl.int64) * tl.cdiv(Q, BLOCK_M) + begin // BLOCK_M
    p_flags += block * tiles
    whole = plan(bounds, BLOCK_N)

    TWO: tl.constexpr = RULE == NORMALISING or RULE == NEAREST
    PLAIN: tl.constexpr = is_plain(RULE, R, BENDS, b_q.dtype == tl.float32)
    N: tl.constexpr = BLOCK_N if TWO else 1
    best = tl.full((BLOCK_M, N), -INF, tl.float32)
    second = tl.full((BLOCK_M, N), -INF, tl.float32)
    bound = tl.where(live, -INF, INF)
    best, second, bound = look(
        best, second, bound, row, copies, bounds, whole, p_flags, order, RULE, margin, BENDS, TRACK, False,
        D, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIBED,
    )  # fmt: skip
    if not hides(BENDS):
        if TRACK and TWO:
            peak = largest(best) * size
            rough = normalising_reach(best, second, size, peak, bound, live, order, TOLERANCE, few_turns(R), R, PLAIN)
            bound = tl.where(live & (peak > -INF), peak - rough, bound)
        elif TRACK:
            bound = tl.maximum(bound, largest(best) * size - margin)
        best, second, bound = look(
            best, second, bound, row, copies, bounds, whole, p_flags, order, RULE, margin, BENDS, TRACK, True,
            D, BLOCK_M, BLOCK_N, BLOCK_D, DESCRIBED,
        )  # fmt: skip
    top = tl.where(live, largest(best), -INF)  # in a whole tile a row that sees nothing has scores all the same
    peak = top * size
    if hides(BENDS):
        live = live & (peak != -INF)

    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    if RULE == ANCHORED:
        reach = tl.zeros((BLOCK_M,), tl.float32) + margin
        if PLAIN:
            tl.store(p_kept + THETA * far + o_rows, tl.where(live, top, LONGEST), mask=m_rows)  # so far that no key is in reach
        else:
            tl.store(p_kept + THETA * far + o_rows, peak, mask=m_rows)
    elif RULE == FIXED:
        reach = tl.minimum(peak - (scale - margin), LONGEST, propagate_nan=ALL)
    elif RULE == NEAREST:
        theta, cut = kth_largest(best, second, peak, row, bounds, whole, nearest, R, BENDS, D, BLOCK_M, BLOCK_N, BLOCK_D)
        reach = tl.where(peak == theta, 0.0, tl.minimum(peak - theta, LONGEST, propagate_nan=ALL))
        tl.store(p_kept + THETA * far + o_rows, tl.where(live, theta, 0.0), mask=m_rows)
        tl.store(p_kept + CUT * far + o_rows, cut.to(tl.float32, bitcast=True), mask=m_rows)
    else:
        reach = normalising_reach(best, second, size, peak, bound, live, order, TOLERANCE, MOST_TURNS, R, PLAIN)
    tl.store(p_kept + PEAK * far + o_rows, peak, mask=m_rows)
    tl.store(p_kept + REACH * far + o_rows, tl.where(live, reach, 1.0), mask=m_rows)


@triton.jit
def look(
    best, second, bound, row, copies, bounds, whole, p_flags, order, RULE: tl.constexpr, margin, BENDS: tl.constexpr,
    TRACK: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """The two best of each class (of each row, where one is enough) after the masked or after the whole tiles.

    They are scores in units of `size`.
    """
    b_q, p_k, k_n, b_at, b_lo, b_hi, scale, size, bends = row
    d_k, b, h = copies
    begin, head, masked, whole_first, whole_last = whole
    end = whole_last - whole_first if WHOLE else masked
    for group in range(0, end, WORD):
        bits = tl.zeros((BLOCK_M,), tl.int32)  # which tiles of the group may hold a weight of each row
        for i in range(group, tl.minimum(group + WORD, end)):
            tile = whole_last - 1 - i if WHOLE else tl.where(i < head, begin + i, whole_last + i - head)  # from the diagonal on
            o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            if WHOLE and DESCRIBED:  # no pointer of a row takes a register
                b_k = d_k.load([b, h, tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
            else:
                b_k = load_rows(p_k, tile * BLOCK_N, (o_n >= bounds[0]) & (o_n < bounds[1]), k_n, D, BLOCK_N, BLOCK_D, WHOLE)
            s = scores(b_q, tl.trans(b_k), o_n[None, :], b_lo[:, None], b_hi[:, None], WHOLE)
            if not is_ordered(RULE, BENDS):
                s = bend(s * scale, o_n[None, :], b_at[:, None], bends, BENDS)
            if RULE == NORMALISING or RULE == NEAREST:
                second = tl.maximum(second, tl.minimum(best, s, propagate_nan=ALL), propagate_nan=ALL)
                best = tl.maximum(best, s, propagate_nan=ALL)
            if (TRACK and WHOLE) or RULE == ANCHORED or RULE == FIXED:
                top = tl.reduce(s, 1, larger)
                if RULE == ANCHORED or RULE == FIXED:
                    best = tl.maximum(best, top[:, None], propagate_nan=ALL)
                if TRACK and WHOLE:
                    bits = bits | (((top * size < bound) == 0).to(tl.int32) << (i - group))  # a tie may be the best
                    bound = tl.maximum(bound, top * size - (margin if RULE == ANCHORED else order))
        if TRACK:
            o = group + tl.arange(0, WORD)
            tiles = whole_last - 1 - o if WHOLE else tl.where(o < head, begin + o, whole_last + o - head)
            flag = (tl.reduce(bits, 0, either) >> tl.arange(0, WORD)) & 1 if WHOLE else tl.full((WORD,), 1, tl.int32)
            tl.store(p_flags + tiles, flag.to(tl.int8), mask=o < end)
    return best, second, bound


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=ALL)


@triton.jit
def largest(best):
    """(M,) of (M, N); NaN where there is any."""
    return tl.reduce(best, 1, larger)


@triton.jit
def normalising_reach(
    best, second, size, peak, bound, live, order, TOLERANCE: tl.constexpr, TURNS: tl.constexpr, R: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """(M,) ρ with Σ [(ρ + x)/r]₊^r = 1 over the two best of each class: Newton on the r-norm of (ρ + x)₊, from above.

    The bests are in units of `size`, and stay so: their differences from the peak would take as many registers again. It starts
    from a lower bound of θ; every turn leaves a better one. A row stops at the turn whose step is small, whatever its
    neighbours still do.
    """
    ground = grounded(peak)
    known = tl.minimum(peak - bound, order)
    reach = tl.where(known > 0.0, known, order)
    moving = live & (peak > -INF)
    turn = 0
    going = tl.max(moving.to(tl.int32), 0)
    while (going > 0) & (turn < TURNS):
        mass, steep = newton_sums(best, size, ground, reach, order, R, PLAIN)
        more, steeper = newton_sums(second, size, ground, reach, order, R, PLAIN)
        moving = moving & (steep + steeper > 0.0)  # a ρ that the rounding of such scores swallows is left as it is
        step = newton_step(tl.where(moving, mass + more, 1.0), tl.where(moving, steep + steeper, 1.0), reach, order, R)
        still = moving & (tl.abs(step) > tolerate(order, TOLERANCE, R) * reach)
        reach = tl.where(moving, shorten(reach, step), reach)
        moving = still
        going = tl.max(moving.to(tl.int32), 0)
        turn += 1
    return reach


@triton.jit
def tolerate(order, TOLERANCE: tl.constexpr, R: tl.constexpr):
    """The step at which Newton stops, relative to ρ.

    It is smaller for r near 1, where the slopes all but jump at θ, and for a large r, where ρ is many times the width of
    the scores that weigh anything.
    """
    if is_whole(R):
        return TOLERANCE
    else:
        steep = tl.minimum(tl.maximum(2.0 * (order - 1.0), 2.0**-8), 1.0)
        return tl.maximum(TOLERANCE * steep / tl.minimum(tl.maximum(order / 3.0, 1.0), 10.0), 4 * EPS)


@triton.jit
def shorten(reach, step):
    """ρ − step, kept positive where the root is smaller than the rounding of ρ."""
    return tl.maximum(reach - step, reach * EPS, propagate_nan=ALL)


@triton.jit
def newton_sums(best, size, peak, reach, order, R: tl.constexpr, PLAIN: tl.constexpr):
    """(M,) Σ K and Σ of its slope, of y = (ρ + x)/ρ, or (ρ + x)/r for a whole r."""
    if PLAIN:
        k, steep = rising_powers(saturate(best, size * (1.0 / R), ((reach - peak) * (1.0 / R))[:, None]), R)
    else:
        x = shift(best * size, peak[:, None])
        if is_whole(R):
            k, steep = whole_powers((x + reach[:, None]) * (1.0 / R), R)
        else:
            k, steep = any_powers(x, reach[:, None], order)
    return tl.sum(k, 1), tl.sum(steep, 1)


@triton.jit
def newton_step(mass, steep, reach, order, R: tl.constexpr):
    """(M,) what to take off ρ."""
    if R == 1.0:
        return (mass - 1.0) / steep
    elif is_whole(R):
        return R * mass * (1.0 - root(mass, R)) / steep
    else:
        return mass * (reach - order * any_root(mass, order)) / steep


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
    best, second, peak, row, bounds, whole, nearest, R: tl.constexpr, BENDS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(M,) the k-th largest score, and the last key inside among those equal to it: the earlier key wins a tie. Where no row
    of the block has one and none receives a gradient, that key is ANY.

    The k-th of the class bests is no larger, and on random scores few lie between: a row climbs from its first bits on, from
    score to score. Where that takes long it bisects the bits of what is left.
    """
    seen = tl.maximum(row[5] - row[4], 0)
    if hides(BENDS):
        seen, _ = survey(tl.full((BLOCK_M,), -INF, tl.float32), row, bounds, whole, BENDS, D, BLOCK_M, BLOCK_N, BLOCK_D)
    wanted = tl.minimum(seen, nearest)
    low = tl.full((BLOCK_M,), -(2**31), tl.int32)
    x, y = to_ordered(best), to_ordered(second)
    for bit in range(FIRST_BITS):
        middle = low ^ (tl.full((BLOCK_M,), 1, tl.int32) << (31 - bit))  # the first turn clears the sign, the others set a bit
        count = tl.sum((x >= middle[:, None]).to(tl.int32), 1) + tl.sum((y >= middle[:, None]).to(tl.int32), 1)
        low = tl.where(count >= wanted, middle, low)

    low, high = tl.maximum(low, LEAST), to_ordered(peak)  # the k-th is one of low … high
    above = tl.zeros((BLOCK_M,), tl.int32)  # scores that are > high, fewer than `wanted`
    exact = wanted == 0  # just `wanted` scores are ≥ low, which is then the k-th
    going = tl.max((exact == 0).to(tl.int32), 0)
    turn = 0
    while (going > 0) & (turn < CLIMB + 33):
        middle = (low & high) + ((low ^ high) >> 1)
        probe = tl.where(turn < CLIMB, tl.where(turn == 0, tl.maximum(low - 1, LEAST), low), middle)
        count, least = survey(from_ordered(probe), row, bounds, whole, BENDS, D, BLOCK_M, BLOCK_N, BLOCK_D)
        more = count >= wanted
        exact = exact | (count == wanted)
        low = tl.where(more, to_ordered(least), low)
        high = tl.where(more, high, probe)
        above = tl.where(more, above, count)
        going = tl.max(((exact == 0) & (low < high)).to(tl.int32), 0)
        turn += 1

    kth = from_ordered(low)
    cut = tl.full((BLOCK_M,), ANY, tl.int32)
    if (R != INF and R != 0.0) or tl.max((exact == 0).to(tl.int32), 0) > 0:  # that key receives a gradient, or wins a tie
        cut = tl.full((BLOCK_M,), -1, tl.int32)
        left = tl.where(exact, wanted, wanted - above)
        for tile in range(bounds[0] // BLOCK_N, tl.cdiv(bounds[1], BLOCK_N)):
            s = load_scores(row, bounds, tile, BENDS, False, D, BLOCK_N, BLOCK_D)
            cut = tl.maximum(cut, last_inside(s, kth, left, tile * BLOCK_N, BLOCK_N))
            left -= tl.sum((s == kth[:, None]).to(tl.int32), 1)
    return kth, cut


@triton.jit
def survey(
    probe, row, bounds, whole, BENDS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """(M,) how many scores are above the probe of a row, and the least of them."""
    count, least = tl.zeros((BLOCK_M,), tl.int32), tl.full((BLOCK_M,), INF, tl.float32)
    begin, head, masked, whole_first, whole_last = whole
    for i in range(0, masked):
        tile = tl.where(i < head, begin + i, whole_last + i - head)
        count, least = tally(count, least, probe, load_scores(row, bounds, tile, BENDS, False, D, BLOCK_N, BLOCK_D))
    for tile in range(whole_first, whole_last):
        count, least = tally(count, least, probe, load_scores(row, bounds, tile, BENDS, True, D, BLOCK_N, BLOCK_D))
    return count, least


@triton.jit
def tally(count, least, probe, s):
    higher = s > probe[:, None]
    count += tl.sum(higher.to(tl.int32), 1)
    return count, tl.minimum(least, tl.min(tl.where(higher, s, INF), 1))


@triton.jit
def load_scores(
    row, bounds, tile, BENDS: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """(M, N) scores of a tile, −inf where a key is not seen."""
    b_q, p_k, k_n, b_at, b_lo, b_hi, scale, _, bends = row
    o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    b_k = load_rows(p_k, tile * BLOCK_N, (o_n >= bounds[0]) & (o_n < bounds[1]), k_n, D, BLOCK_N, BLOCK_D, WHOLE)
    s = scores(b_q, tl.trans(b_k), o_n[None, :], b_lo[:, None], b_hi[:, None], WHOLE)
    return bend(s * scale, o_n[None, :], b_at[:, None], bends, BENDS)


@triton.jit
def last_inside(s, kth, left, start, BLOCK_N: tl.constexpr):
    """(M,) the last of the first `left` keys of a tile whose score is the k-th; −1 if there is none."""
    tie = (s == kth[:, None]).to(tl.int32)
    inside = (tie > 0) & (tl.cumsum(tie, 1) <= left[:, None])
    return tl.max(tl.where(inside, (start + tl.arange(0, BLOCK_N))[None, :], -1), 1)
