"""A few queries against a long cache: K is read once or less, V only where a weight is not zero.

Keys lie in pages of 64. `score_pages` writes the scores of every page and, per row, the best of each; the rules then work
on those best scores first. The threshold of a part of the keys is never above that of all of them, so it certifies which
pages can matter at all: `find_threshold` looks at the scores of those alone, and `estimate` reads V on the support.
With bounds on the keys of a page (`bound_pages`) the same argument tells which pages of K need not be read.
Softmax and fixed bandwidths need no threshold: `estimate_directly` reads K and V side by side, once.

A program of a page kernel has one key head and every `splits`-th page: the queries of its group are the M of a tile, and
a short cache, or a support in one place, is spread over all of them. No atomics and no sum whose order hangs on the batch.
Shapes: M queries of a group of heads, N the 64 keys of a page, P pages; D head dim of q and k, DV of v.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.decode_threshold import (
    ANCHORED,
    FIXED,
    LENGTHS,
    MOST,
    NEAREST,
    PAGE,
    load_kept,
    loosen,
    matters,
)
from compactattn.fused.profiles import INF, LOG2E, any_powers, is_whole, whole_powers
from compactattn.fused.threshold import LONGEST
from compactattn.fused.tiles import grounded, shift

EPS = tl.constexpr(2.0**-23)


# -- what the page kernels share -----------------------------------------------------------------


@triton.jit
def load_group(
    p_at, p_lo, p_hi, p_scale, p_slopes, at_b, lo_b, hi_b, scale_h, head, key_heads, Q, K,
    GROUP: tl.constexpr, ALIBI: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """(M,) where each query of a group stands, the keys lo ≤ j < hi it sees, its scale and slope; the union of the keys."""
    o_m = tl.arange(0, BLOCK_M)
    live = o_m < GROUP * Q
    b = head // key_heads
    h = head % key_heads * GROUP + o_m // Q
    at = tl.load(p_at + b * at_b + o_m % Q, mask=live, other=0).to(tl.int32)
    lo = tl.maximum(tl.load(p_lo + b * lo_b + o_m % Q, mask=live, other=0), 0).to(tl.int32)
    hi = tl.minimum(tl.load(p_hi + b * hi_b + o_m % Q, mask=live, other=0), K).to(tl.int32)
    scale = tl.load(p_scale + h * scale_h, mask=live, other=0.0)
    slope = tl.load(p_slopes + h, mask=live, other=0.0).to(tl.float32) if ALIBI else scale
    first = tl.min(tl.where(lo < hi, lo, K), 0)
    last = tl.max(tl.where(lo < hi, hi, 0), 0)
    return at, lo, hi, scale, slope, first, last


@triton.jit
def load_queries(p_q, o_rows, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    o_d = tl.arange(0, BLOCK_D)
    return tl.load(p_q + o_rows[:, None] * D + o_d[None, :], mask=live[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def load_page(p, page, m_n, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(N, D) keys or values of a page, zeros where the mask is off."""
    o_d = tl.arange(0, BLOCK_D)
    p += tl.cast(page, tl.int64) * PAGE * stride
    o = tl.arange(0, PAGE)[:, None] * stride + o_d[None, :]
    if D == BLOCK_D:
        return tl.load(p + o, mask=m_n[:, None], other=0.0)
    else:
        return tl.load(p + o, mask=m_n[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def find_scores(b_q, p_k, group, page, stride, ALIBI: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(M, N) s = scale · q·k − slope · |distance| of a page, −inf at illegal keys."""
    at, lo, hi, scale, slope, first, last = group
    o_n = page * PAGE + tl.arange(0, PAGE)
    b_k = load_page(p_k, page, (o_n >= first) & (o_n < last), stride, D, BLOCK_D)
    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale[:, None]
    if ALIBI:
        s = s - slope[:, None] * tl.abs(at[:, None] - o_n[None, :]).to(tl.float32)
    return tl.where((o_n[None, :] >= lo[:, None]) & (o_n[None, :] < hi[:, None]), s, -INF)


@triton.jit
def score_page(
    b_q, p_k, p_s, p_best, group, page, pages, stride, o_rows, live,
    ALIBI: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Writes the scores of a page, and the best of each row."""
    s = find_scores(b_q, p_k, group, page, stride, ALIBI, D, BLOCK_D)
    o_pages = o_rows * pages + page
    tl.store(p_s + o_pages[:, None] * PAGE + tl.arange(0, PAGE)[None, :], s, mask=live[:, None])
    tl.store(p_best + o_pages, tl.max(s, 1), mask=live)


@triton.jit
def list_pages(
    p_bound, p_best, p_list, p_kept, o_rows, live, first, last, split, splits, pages, rows,
    AGAIN: tl.constexpr, RULE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Lists the pages of a program whose bound matters to the threshold of the pages read so far; how many, and how many not.

    Those read already are listed only if AGAIN. A list, and not a turn for each, lets the loads of a page start early.
    """
    peak, reach, theta, _ = load_kept(p_kept, o_rows, live, rows)
    reach = tl.where(reach > 0.0, loosen(reach, peak), reach)
    listed, skipped = 0, 0
    for begin in range(first // PAGE + split, tl.cdiv(last, PAGE), splits * BLOCK_P):
        o_p = begin + tl.arange(0, BLOCK_P) * splits
        m_p = o_p * PAGE < last
        o = o_rows[:, None] * pages + o_p[None, :]
        m = live[:, None] & m_p[None, :]
        b_bound, b_best = tl.load(p_bound + o, mask=m, other=-INF), tl.load(p_best + o, mask=m, other=-INF)
        inside = matters(b_bound, peak[:, None], reach[:, None], theta[:, None], RULE)
        inside = (tl.max(inside.to(tl.int32), 0) > 0) & m_p
        unread = (tl.max((b_best != -INF).to(tl.int32), 0) == 0) & m_p
        wanted = inside if AGAIN else inside & unread
        tl.store(p_list + listed + tl.cumsum(wanted.to(tl.int32), 0) - 1, o_p, mask=wanted)
        listed += tl.sum(wanted.to(tl.int32), 0)
        skipped += tl.sum((unread & (inside == 0)).to(tl.int32), 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    return listed, skipped


# -- bounds and scores ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def bound_pages(
    p_q, p_k, p_low, p_high, p_filled, p_s, p_best, p_bound, p_at, p_lo, p_hi, p_scale, p_slopes,
    at_b, lo_b, hi_b, scale_h, k_b, k_h, k_n, key_heads, Q, K, pages, splits,
    GROUP: tl.constexpr, ALIBI: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Writes a bound on the scores of each page, and scores the most promising page of each row.

    q·k ≤ Σ max(q low, q high) = q₊·high + q₋·low, plus what the rounding of either side can amount to.
    Pages that are not scored here get −inf for their best.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    o_m, o_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    live = o_m < GROUP * Q
    o_rows = tl.cast(head, tl.int64) * GROUP * Q + o_m
    group = load_group(
        p_at, p_lo, p_hi, p_scale, p_slopes, at_b, lo_b, hi_b, scale_h, head, key_heads, Q, K, GROUP, ALIBI, BLOCK_M
    )  # fmt: skip
    at, lo, hi, scale, slope, first, last = group
    filled = tl.load(p_filled + head // key_heads).to(tl.int32)
    b_q = load_queries(p_q, o_rows, live, D, BLOCK_D)
    above, below = tl.where(b_q > 0, b_q, 0.0).to(b_q.dtype), tl.where(b_q > 0, 0.0, b_q).to(b_q.dtype)
    best, best_page = tl.full((BLOCK_M,), -INF, tl.float32), tl.full((BLOCK_M,), 0, tl.int32)
    for begin in range(first // PAGE + split, tl.cdiv(last, PAGE), splits * BLOCK_P):
        o_p = begin + tl.arange(0, BLOCK_P) * splits
        m_p = o_p * PAGE < last
        o = (tl.cast(head, tl.int64) * pages + o_p)[:, None] * D + o_d[None, :]
        m = m_p[:, None] & (o_d < D)[None, :]
        b_low, b_high = tl.load(p_low + o, mask=m, other=0.0), tl.load(p_high + o, mask=m, other=0.0)
        bound = tl.dot(above, tl.trans(b_high), input_precision="ieee")
        bound = tl.dot(below, tl.trans(b_low), bound, input_precision="ieee")
        largest = tl.where(tl.abs(b_low) > tl.abs(b_high), tl.abs(b_low), tl.abs(b_high)).to(b_q.dtype)
        size = tl.dot(tl.abs(b_q), tl.trans(largest), input_precision="ieee")
        bound = (bound + size * (4 * (D + 8) * EPS)) * scale[:, None]
        if ALIBI:
            # the nearest and the farthest key of the page
            left, right = at[:, None] - o_p[None, :] * PAGE, at[:, None] - (o_p[None, :] * PAGE + (PAGE - 1))
            far = tl.maximum(tl.abs(left), tl.abs(right))
            near = tl.where((left >= 0) & (right <= 0), 0, tl.minimum(tl.abs(left), tl.abs(right)))
            bound = bound - slope[:, None] * tl.where(slope[:, None] > 0.0, near, far).to(tl.float32)
        ends = tl.minimum((o_p[None, :] + 1) * PAGE, hi[:, None])
        bound = tl.where((ends <= filled) & (bound == bound), bound, INF)  # keys that were not added have no bound
        seen = (o_p[None, :] * PAGE < hi[:, None]) & ((o_p[None, :] + 1) * PAGE > lo[:, None]) & m_p[None, :]
        bound = tl.where(seen & live[:, None], bound, -INF)
        o = o_rows[:, None] * pages + o_p[None, :]
        tl.store(p_bound + o, bound, mask=live[:, None] & m_p[None, :])
        tl.store(p_best + o, tl.full((BLOCK_M, BLOCK_P), -INF, tl.float32), mask=live[:, None] & m_p[None, :])
        most = tl.max(bound, 1)
        page = tl.min(tl.where(bound == most[:, None], o_p[None, :], MOST), 1)
        best_page = tl.where(most > best, page, best_page)
        best = tl.maximum(best, most)
    tl.debug_barrier()  # −inf first
    for m in range(GROUP * Q):
        if tl.max(tl.where(o_m == m, best, -INF), 0) > -INF:
            page = tl.max(tl.where(o_m == m, best_page, 0), 0)
            score_page(
                b_q, p_k + (head // key_heads).to(tl.int64) * k_b + (head % key_heads).to(tl.int64) * k_h, p_s, p_best,
                group, page, pages, k_n, o_rows, live, ALIBI, D, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=LENGTHS)
def score_pages(
    p_q, p_k, p_s, p_best, p_bound, p_list, p_kept, p_skipped, p_at, p_lo, p_hi, p_scale, p_slopes,
    at_b, lo_b, hi_b, scale_h, k_b, k_h, k_n, key_heads, Q, K, pages, splits, rows,
    SELECT: tl.constexpr, RULE: tl.constexpr, GROUP: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Scores all pages; with SELECT only those whose bound matters to the threshold of the pages read so far."""
    head, split = tl.program_id(0), tl.program_id(1)
    live = tl.arange(0, BLOCK_M) < GROUP * Q
    o_rows = tl.cast(head, tl.int64) * GROUP * Q + tl.arange(0, BLOCK_M)
    group = load_group(
        p_at, p_lo, p_hi, p_scale, p_slopes, at_b, lo_b, hi_b, scale_h, head, key_heads, Q, K, GROUP, ALIBI, BLOCK_M
    )  # fmt: skip
    first, last = group[5], group[6]
    b_q = load_queries(p_q, o_rows, live, D, BLOCK_D)
    p_k += (head // key_heads).to(tl.int64) * k_b + (head % key_heads).to(tl.int64) * k_h
    count = tl.cdiv(tl.maximum(tl.cdiv(last, PAGE) - first // PAGE - split, 0), splits)
    if SELECT:
        p_list += (tl.cast(head, tl.int64) * splits + split) * tl.cdiv(pages, splits)
        count, skipped = list_pages(
            p_bound, p_best, p_list, p_kept, o_rows, live, first, last, split, splits, pages, rows, False, RULE, BLOCK_P
        )  # fmt: skip
        tl.store(p_skipped + head * splits + split, skipped)
    for i in range(count):
        page = tl.load(p_list + i) if SELECT else first // PAGE + split + i * splits
        score_page(b_q, p_k, p_s, p_best, group, page, pages, k_n, o_rows, live, ALIBI, D, BLOCK_D)


# -- the estimate --------------------------------------------------------------------------------


@triton.jit
def weigh(s, o_n, peak, reach, theta, cut, RULE: tl.constexpr, R: tl.constexpr):
    """(M, N) K of every key, 0 off the support; the weights are K / Σ K. As weights.weigh, without slopes."""
    x = shift(s, peak[:, None])
    safe = tl.where(reach > 0.0, reach, 1.0)[:, None]
    if R == 0.0:
        k = tl.where(x <= -safe, 0.0, 1.0)
    elif R == INF:
        k = tl.exp2(x * LOG2E)
    elif is_whole(R):
        k, _ = whole_powers((x + safe) / safe, R)
    else:
        k, _ = any_powers(x, safe, R)
    if RULE == ANCHORED and R == INF:
        k = tl.where(x <= -safe, 0.0, k)
    elif RULE == FIXED:
        if R == 0.0:
            k = tl.where(s <= theta[:, None], 0.0, tl.where(s == s, 1.0, s))
        k = tl.where((reach > 0.0)[:, None], k, tl.where(s == -INF, 0.0, s - s + 1.0))  # NaN stays NaN
    elif RULE == NEAREST:
        if R == 0.0:
            k = k * 0.0 + 1.0
        k = tl.where((s > theta[:, None]) | ((s == theta[:, None]) & (o_n[None, :] <= cut[:, None])), k, 0.0)
    return tl.where(s == -INF, 0.0, k)


@triton.jit
def add_values(acc, k, b_v):
    """acc + K v of a page, with the weights in two parts where the values are of half precision."""
    rough = k.to(b_v.dtype)
    acc = tl.dot(rough, b_v, acc, input_precision="ieee")
    if b_v.dtype != tl.float32:  # what the rounding of the weights took away
        acc = tl.dot((k - rough.to(tl.float32)).to(b_v.dtype), b_v, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def estimate(
    p_s, p_best, p_v, p_kept, p_part, p_mass, p_at, p_lo, p_hi, p_scale, p_slopes,
    at_b, lo_b, hi_b, scale_h, v_b, v_h, v_n, key_heads, Q, K, pages, splits, rows,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Σ K v and Σ K over the pages of a program whose best key has a weight; only values with a weight are read."""
    head, split = tl.program_id(0), tl.program_id(1)
    live = tl.arange(0, BLOCK_M) < GROUP * Q
    o_rows = tl.cast(head, tl.int64) * GROUP * Q + tl.arange(0, BLOCK_M)
    group = load_group(
        p_at, p_lo, p_hi, p_scale, p_slopes, at_b, lo_b, hi_b, scale_h, head, key_heads, Q, K, GROUP, False, BLOCK_M
    )  # fmt: skip
    first, last = group[5], group[6]
    peak, reach, theta, cut = load_kept(p_kept, o_rows, live, rows)
    p_v += (head // key_heads).to(tl.int64) * v_b + (head % key_heads).to(tl.int64) * v_h
    mass = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for begin in range(first // PAGE + split, tl.cdiv(last, PAGE), splits * BLOCK_P):
        o_p = begin + tl.arange(0, BLOCK_P) * splits
        b_best = tl.load(
            p_best + o_rows[:, None] * pages + o_p[None, :], mask=live[:, None] & (o_p * PAGE < last)[None, :], other=-INF
        )
        inside = matters(b_best, peak[:, None], reach[:, None], theta[:, None], RULE)
        inside = tl.max(inside.to(tl.int32), 0) > 0
        page = tl.min(tl.where(inside, o_p, MOST), 0)
        while page < MOST:
            o_n = page * PAGE + tl.arange(0, PAGE)
            o = (o_rows * pages + page)[:, None] * PAGE + tl.arange(0, PAGE)[None, :]
            k = weigh(tl.load(p_s + o, mask=live[:, None], other=-INF), o_n, peak, reach, theta, cut, RULE, R)
            b_v = load_page(p_v, page, tl.max((k != 0.0).to(tl.int32), 0) > 0, v_n, DV, BLOCK_DV)
            mass += tl.sum(k, 1)
            acc = add_values(acc, k, b_v)
            page = tl.min(tl.where(inside & (o_p > page), o_p, MOST), 0)
    o_parts = o_rows * splits + split
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(p_part + o_parts[:, None] * DV + o_d[None, :], acc, mask=live[:, None] & (o_d < DV)[None, :])
    tl.store(p_mass + o_parts, mass, mask=live)


@triton.jit
def weigh_above(t, o_n, peak, RULE: tl.constexpr, R: tl.constexpr):
    """(M, N) K of t = s − θ in units of that of the best; where that is not above θ, 1 for every legal key."""
    none = tl.zeros_like(peak)
    return weigh(t, o_n, grounded(peak), tl.minimum(peak, LONGEST), none, none.to(tl.int32), RULE, R)


@triton.jit
def fade(old, new, RULE: tl.constexpr, R: tl.constexpr):
    """(M,) what sums in units of a best key are in those of a better one: the weight of the old beside the new.

    0 where the old was below a fixed θ and the new is not: the sums were those of uniform weights.
    """
    return tl.sum(weigh_above(old[:, None], tl.arange(0, 1), new, RULE, R), 1)


@triton.jit
def shrink(x, factor):
    """x · factor, and 0 where the factor is, whatever x holds."""
    return tl.where(factor == 0.0, 0.0, x * factor)


@triton.jit(do_not_specialize=LENGTHS)
def estimate_directly(
    p_q, p_k, p_v, p_best, p_bound, p_list, p_kept, p_skipped, p_part, p_mass, p_peak, p_at, p_lo, p_hi, p_scale, p_slopes,
    at_b, lo_b, hi_b, scale_h, k_b, k_h, k_n, v_b, v_h, v_n, key_heads, Q, K, pages, splits, rows, margin,
    SELECT: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Σ K v and Σ K over the pages of a program in units of their best key, and max s − θ, in one look at K and V.

    θ is fixed, or 0 for softmax. As long as no key is above a fixed θ the weights are uniform; the first that is takes all.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    live = tl.arange(0, BLOCK_M) < GROUP * Q
    o_rows = tl.cast(head, tl.int64) * GROUP * Q + tl.arange(0, BLOCK_M)
    group = load_group(
        p_at, p_lo, p_hi, p_scale, p_slopes, at_b, lo_b, hi_b, scale_h, head, key_heads, Q, K, GROUP, ALIBI, BLOCK_M
    )  # fmt: skip
    first, last = group[5], group[6]
    b_q = load_queries(p_q, o_rows, live, D, BLOCK_D)
    b, h = (head // key_heads).to(tl.int64), (head % key_heads).to(tl.int64)
    p_k += b * k_b + h * k_h
    p_v += b * v_b + h * v_h
    count = tl.cdiv(tl.maximum(tl.cdiv(last, PAGE) - first // PAGE - split, 0), splits)
    if SELECT:
        p_list += (tl.cast(head, tl.int64) * splits + split) * tl.cdiv(pages, splits)
        count, skipped = list_pages(
            p_bound, p_best, p_list, p_kept, o_rows, live, first, last, split, splits, pages, rows, True, RULE, BLOCK_P
        )  # fmt: skip
        tl.store(p_skipped + head * splits + split, skipped)
    peak = tl.full((BLOCK_M,), -INF, tl.float32)
    mass = tl.zeros((BLOCK_M, PAGE), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for i in range(count):
        page = tl.load(p_list + i) if SELECT else first // PAGE + split + i * splits
        o_n = page * PAGE + tl.arange(0, PAGE)
        t = find_scores(b_q, p_k, group, page, k_n, ALIBI, D, BLOCK_D)
        if RULE == FIXED:
            t = t - (group[3] - margin)[:, None]
        better = tl.maximum(peak, tl.max(tl.where(t == t, t, INF), 1))  # above what is no number, nothing else weighs anything
        factor = fade(peak, better, RULE, R)[:, None]
        k = weigh_above(t, o_n, better, RULE, R)
        b_v = load_page(p_v, page, (o_n >= first) & (o_n < last), v_n, DV, BLOCK_DV)
        if RULE == FIXED:  # a value without a weight may hold anything
            b_v = tl.where((tl.max((k != 0.0).to(tl.int32), 0) > 0)[:, None], b_v, 0.0).to(b_v.dtype)
        mass = shrink(mass, factor) + k
        acc = add_values(shrink(acc, factor), k, b_v)
        peak = better
    o_parts = o_rows * splits + split
    o_d = tl.arange(0, BLOCK_DV)
    tl.store(p_part + o_parts[:, None] * DV + o_d[None, :], acc, mask=live[:, None] & (o_d < DV)[None, :])
    tl.store(p_mass + o_parts, tl.sum(mass, 1), mask=live)
    tl.store(p_peak + o_parts, peak, mask=live)


@triton.jit(do_not_specialize=LENGTHS)
def combine(
    p_part, p_mass, p_peak, p_o, splits,
    DIRECT: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """o = Σ K v / Σ K of one row; 0 where no key is legal. DIRECT: each part is in units of its own best key."""
    row = tl.cast(tl.program_id(0), tl.int64)
    o_d = tl.arange(0, BLOCK_DV)
    best = tl.full((BLOCK,), -INF, tl.float32)
    if DIRECT:
        for start in range(0, splits, BLOCK):
            o = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(p_peak + row * splits + o, mask=o < splits, other=-INF))
        best = tl.full((BLOCK,), tl.max(best, 0), tl.float32)
    mass = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for start in range(0, splits, BLOCK):
        o = start + tl.arange(0, BLOCK)
        more = tl.load(p_mass + row * splits + o, mask=o < splits, other=0.0)
        m = (o < splits)[:, None] & (o_d < DV)[None, :]
        part = tl.load(p_part + (row * splits + o)[:, None] * DV + o_d[None, :], mask=m, other=0.0)
        if DIRECT:
            factor = fade(tl.load(p_peak + row * splits + o, mask=o < splits, other=-INF), best, RULE, R)
            more, part = shrink(more, factor), shrink(part, factor[:, None])
        mass += more
        acc += tl.sum(part, 0)
    total = tl.sum(mass, 0)
    tl.store(p_o + row * DV + o_d, (acc / tl.where(total == 0.0, 1.0, total)).to(p_o.dtype.element_ty), mask=o_d < DV)
