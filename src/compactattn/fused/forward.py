"""The estimate o = Σ w v, as reference.estimate.

One program has a block of queries of one head. It visits only the tiles in its list, where it has one, and leaves what the
backward kernels need: of each row its best score, ρ, Z and the sum of the slopes, and õ, the mean of the values under the
weights y^(r−1), where the centre of ds is made of it. With DROPS the values enter o and õ thinned by dropout, each row its own;
Z and the slopes know nothing of it.
Shapes: M queries, N keys of a tile; D head dim of q and k, DV of v.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.drops import open_drop, thin
from compactattn.fused.lists import COUNTS
from compactattn.fused.profiles import ALL, INF, LOG2E, is_whole
from compactattn.fused.threshold import (
    ANCHORED,
    FIXED,
    LENGTHS,
    MASS,
    MOST_TURNS,
    NEAREST,
    NORMALISING,
    PEAK,
    REACH,
    SLOPES,
    WORD,
    either,
    larger,
    newton_step,
    shorten,
    tolerate,
)
from compactattn.fused.tiles import (
    add_dot,
    bend,
    count_tiles,
    find_tile,
    grounded,
    hides,
    hush,
    load_rows,
    open_block,
    plan,
    rounded,
    scores,
    store_rows,
)
from compactattn.fused.weights import is_best, is_direct, load_kept, make_row, turn_row, weigh


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    p_q, p_k, p_v, d_k, d_v, p_o, p_tilt, p_kept, p_support, p_list, p_count, p_flags,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, p_seed,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, scale_h, at_b, lo_b, hi_b,
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin, limit, boost,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    DROPS: tl.constexpr, READOUT: tl.constexpr, GRAD: tl.constexpr, LISTED: tl.constexpr, TRACK: tl.constexpr,
    TOLERANCE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """o = Σ w v for a block of queries of one head, and õ; keeps what the backward kernels need of each row.

    The two best of each class gave a ρ; the sums over all keys give Newton's next step. It is small: made to first
    order on the sums themselves it is exact enough, else the sums are taken again.
    """
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    place, view, b_q, own = open_block(
        p_q, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, q_b, q_h, q_m, scale_h, at_b, lo_b, hi_b, steps,
        H, Q, K, R, BENDS, D, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    head, b, h, begin = place
    b_at, b_lo, b_hi, live, bounds = view
    scale, order, bends = own
    keys = (
        p_k + b * k_b + h // GROUP * k_h,
        p_v + b * v_b + h // GROUP * v_h,
        d_k,
        d_v,
        b.to(tl.int32),
        (h // GROUP).to(tl.int32),
    )
    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    block = tl.cast(head, tl.int64) * tl.cdiv(Q, BLOCK_M) + begin // BLOCK_M
    lists = (p_list + block * tiles, p_flags + block * tiles, tiles)
    counts = (tl.load(p_count + COUNTS * block), tl.load(p_count + COUNTS * block + 1)) if LISTED else (0, 0)
    whole = plan(bounds, BLOCK_N)
    sight = (b_at, b_lo, b_hi, bounds, whole, counts)
    b_m = begin + tl.arange(0, BLOCK_M)[:, None]
    drop = open_drop(p_seed, b, h, limit, boost) if DROPS else (0, 0, 0, 0)

    SOFT: tl.constexpr = RULE == NORMALISING and R == INF
    SOLVES: tl.constexpr = RULE == NORMALISING and R != INF
    SLOPED: tl.constexpr = SOLVES or (GRAD and R != INF and R != 0.0 and RULE != FIXED)
    TILT: tl.constexpr = SLOPED and not (EXACT and RULE == ANCHORED)  # there the backward pass takes sums of its own
    none = tl.zeros((BLOCK_M,), tl.float32)
    if SOFT or is_direct(RULE, PEAKED):
        kept = (tl.where(live, scale - margin, -INF), none, none + 1.0, none, none, none.to(tl.int32))
    else:
        kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
        kept = (kept[0], kept[1], none + 1.0, none, kept[4], kept[5])
    peak, reach = kept[0], kept[1]
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    tilt = tl.zeros((BLOCK_M, BLOCK_DV if TILT else 1), tl.float32)
    mass, slopes, best, step = none, none, none, none
    support, alone = none.to(tl.int32), none.to(tl.int32)  # alone: rows in whose reach no key is
    turn, going = 0, tl.max(live.to(tl.int32), 0)
    while (going > 0) & (turn < MOST_TURNS):
        sign = tl.where(alone > 0, -1.0, 1.0)
        row, _ = make_row(
            (peak, reach, sign, none, kept[4], kept[5]), b_at, scale, bends, order, margin, False, RULE, R, PEAKED
        )
        flat = turn_row(row)
        zero = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        leaning = tl.zeros((BLOCK_M, BLOCK_DV if TILT else 1), tl.float32)
        sums = (zero, leaning, none, none, none, none.to(tl.int32), none - INF)
        sums = gather(
            sums, b_q, keys, k_n, v_n, flat, sight, lists, drop, b_m,
            RULE, R, BENDS, EXACT, DROPS, READOUT, SLOPED, TILT, SOFT, LISTED, TRACK, False,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
        )  # fmt: skip
        if not hides(BENDS):
            sums = gather(
                sums, b_q, keys, k_n, v_n, flat, sight, lists, drop, b_m,
                RULE, R, BENDS, EXACT, DROPS, READOUT, SLOPED, TILT, SOFT, LISTED, TRACK, True,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
            )  # fmt: skip
        acc, tilt, mass, slopes, best, support, running = sums
        going = going * 0
        if SOFT:
            peak = tl.where(live, running, -INF)
        if RULE == FIXED:  # nothing in reach is uniform
            total = tl.sum(acc, 1)
            fresh = (live & (peak != -INF) & (mass == 0.0) & (total == total)).to(tl.int32) * (1 - alone)  # NaN is something
            alone += fresh
            going = tl.max(fresh, 0)
        if SOLVES:
            solid = live & (slopes > 0.0)
            step = tl.where(solid, newton_step(tl.where(solid, mass, 1.0), tl.where(solid, slopes, 1.0), reach, order, R), 0.0)
            off = tl.abs(step) > tolerate(order, TOLERANCE, R) * reach
            going = tl.max(off.to(tl.int32), 0)
            reach = tl.where(off, shorten(reach, step), reach)
        turn += 1
    if SOLVES:
        lower = step if is_whole(R) else order * step / reach
        # Σ y^(r−2) v is not at hand; the sums and means go on from r and r − 1 to r − 2 as those of an exponential tail do
        ratio = slopes / tl.where(mass > 0.0, mass, 1.0)
        share = lower * ratio
        lean = share / (1.0 - tl.minimum(share, 0.5))
        growth = 0.0 if is_whole(R) else lower  # in units of ρ, which shrinks: what is left of the step does not grow with r
        mass += growth * mass - lower * slopes
        reach = shorten(reach, step)
    if RULE == FIXED:
        mass = tl.where(alone > 0, -mass, mass)
        if is_direct(RULE, PEAKED):
            reach = none
    if SOFT:
        reach = none + INF
    mass = tl.where(mass == 0.0, 1.0, mass)  # no key: 0 / 1
    slopes = tl.where(peak == peak, slopes, peak)
    thinned = boost if DROPS else 1.0
    divisor = tl.where(live, tl.abs(mass) / thinned, INF)
    divisor = tl.where(peak == peak, divisor, peak)  # a score that is not a number
    factor = 1.0 / divisor
    if SOLVES:
        out = tl.fma(tilt, (-lower * factor)[:, None], acc * (factor + growth * factor)[:, None])
    else:  # in fp32 its error in the last bits counts: the centre of ds is do·o
        out = acc / divisor[:, None] if EXACT else acc * factor[:, None]
    out = tl.where(live[:, None], out, 0.0)  # exactly, also beside a value that is no number
    store_rows(p_o + b * o_b + h * o_h, begin, m_rows, o_m, out, DV, BLOCK_M, BLOCK_DV)
    tl.store(p_kept + PEAK * far + o_rows, peak, mask=m_rows)
    tl.store(p_kept + REACH * far + o_rows, reach, mask=m_rows)
    tl.store(p_kept + MASS * far + o_rows, mass, mask=m_rows)
    tl.store(p_kept + SLOPES * far + o_rows, slopes / tl.maximum(best, 1.0), mask=m_rows)
    if GRAD and R != 0.0 and not (SOLVES and EXACT):
        p_tilt += b * o_b + h * o_h
        if TILT:
            factor = tl.where(live & (slopes != 0.0), thinned / tl.where(slopes == 0.0, 1.0, slopes), 0.0)
            if SOLVES:
                mean = tl.fma(tilt, (factor - lean * factor)[:, None], acc * (lean * ratio * factor)[:, None])
            else:
                mean = tl.fma(tilt, factor[:, None], -out)
            store_rows(p_tilt, begin, m_rows, o_m, mean, DV, BLOCK_M, BLOCK_DV)
        if not EXACT:
            centred = mean if SOLVES else out
            rest = centred - rounded(centred, b_q.dtype)
            store_rows(p_tilt + (far * DV if TILT else 0), begin, m_rows, o_m, rest, DV, BLOCK_M, BLOCK_DV)
    if READOUT:
        tl.store(p_support + o_rows, support, mask=m_rows)


@triton.jit
def gather(
    sums, b_q, keys, k_n, v_n, row, sight, lists, drop, b_m,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, DROPS: tl.constexpr,
    READOUT: tl.constexpr, SLOPED: tl.constexpr, TILT: tl.constexpr, SOFT: tl.constexpr, LISTED: tl.constexpr,
    TRACK: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Σ K v, Σ slope v, Σ K, Σ slope, the number of best keys and of keys inside, over the masked or the whole tiles.

    With TRACK it also flags the tiles that hold a weight.
    """
    acc, tilt, mass, slopes, best, support, peak = sums
    _, b_lo, b_hi, bounds, whole, counts = sight
    p_list, p_flags, size = lists
    p_k, p_v, d_k, d_v, b, h = keys
    end = count_tiles(whole, counts, LISTED, WHOLE)
    for group in range(0, end, WORD):
        bits = tl.zeros((BLOCK_M,), tl.int32)  # which tiles of the group hold a weight of each row
        for i in range(group, tl.minimum(group + WORD, end)):
            tile = find_tile(i, whole, p_list, size, LISTED, WHOLE)
            o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            m_n = (o_n >= bounds[0]) & (o_n < bounds[1])
            if WHOLE and DESCRIBED:  # no pointer of a row takes a register
                b_k = d_k.load([b, h, tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
                b_v = d_v.load([b, h, tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_DV)
            else:
                b_k = load_rows(p_k, tile * BLOCK_N, m_n, k_n, D, BLOCK_N, BLOCK_D, WHOLE)
                b_v = load_rows(p_v, tile * BLOCK_N, m_n, v_n, DV, BLOCK_N, BLOCK_DV, WHOLE)
            raw = scores(b_q, tl.trans(b_k), o_n[None, :], b_lo[:, None], b_hi[:, None], WHOLE)
            if SOFT:
                s = bend(raw * row[1], o_n[None, :], row[0], row[2], BENDS)
                top = tl.maximum(peak, tl.reduce(s, 1, larger), propagate_nan=ALL)
                ground = grounded(top)
                fade = tl.exp2((peak - ground) * LOG2E)
                k = tl.exp2((s - ground[:, None]) * LOG2E)
                mass = mass * fade
                acc = acc * fade[:, None]
                peak = top
            else:
                s, k, steep = weigh(raw, o_n[None, :], row, RULE, R, BENDS, EXACT)
                if RULE == ANCHORED and SLOPED:
                    best += tl.sum(is_best(s, row, R, BENDS, EXACT), 1)
            b_v = hush(b_v, s, 0, BENDS)
            if READOUT:  # before rounding makes a weight vanish, and whatever key was the best so far
                support += tl.sum((s > -INF if SOFT else k > 0.0).to(tl.int32), 1)
            if RULE == FIXED or R == INF:
                near = rounded(k, b_v.dtype)
                k = tl.where(k == k, near, k) if DROPS else near  # what is not a number may be dropped, and must show in Z
            more = tl.sum(k, 1)
            mass += more
            acc = add_dot(acc, (thin(k, drop, b_m, o_n[None, :]) if DROPS else k).to(b_v.dtype), b_v)
            if SLOPED:
                slopes += tl.sum(steep, 1)
            if TILT:
                if DROPS:
                    steep = thin(steep, drop, b_m, o_n[None, :])
                tilt = add_dot(tilt, steep.to(b_v.dtype), b_v)
            if TRACK:
                holds = (more == 0.0) == 0
                if RULE == NEAREST:  # the k-th key may weigh nothing, and receives what θ does
                    holds = holds | (tl.max((o_n[None, :] == row[6]).to(tl.int32), 1) > 0)
                bits = bits | (holds.to(tl.int32) << (i - group))
        if TRACK:
            o = group + tl.arange(0, WORD)
            tiles = find_tile(tl.minimum(o, end - 1), whole, p_list, size, LISTED, WHOLE)
            flag = (tl.reduce(bits, 0, either) >> tl.arange(0, WORD)) & 1
            tl.store(p_flags + tiles, flag.to(tl.int8), mask=o < end)
    return acc, tilt, mass, slopes, best, support, peak
