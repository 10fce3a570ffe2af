"""The gradients dq, dk and dv, as rows.pull.

One program has a block of queries (dq) or of keys (dk, dv) of one head, and writes it alone: no atomics, so
that every run gives the same bits. It visits only the tiles in its list, where it has one. With y = u (s − θ),

    w = y₊^r,    ds = g · y^(r−1) ⊙ (dw − c),    g = r u,    dw = do·v

(for entmax of r = 1, 2, 3 u is 1/r, as forward, and g is 1). What θ receives,
−Σ ds, goes to the best key(s), the k-th key or the scale, as the rule has it. The centre c is do·o, or do·õ where θ moves so
that Σ w = 1: the forward kernel leaves õ, the mean of the values under the weights y^(r−1); in fp32 c has sums of its own.
In half precision o and õ are kept in two numbers, one what rounding left of the other: an error of c is common to a row and
does not average out. With DROPS a dropped weight has dw = 0 and the others dw = do·v / (1 − p); o and õ hold that already.

Shapes: M queries, N keys of a tile; D head dim of q and k, DV of v.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.drops import open_drop, thin
from compactattn.fused.lists import COUNTS
from compactattn.fused.profiles import INF, LEARNED, LOG2E, SMALLEST, is_whole, load_order, order_slope
from compactattn.fused.threshold import ANCHORED, FIXED, LENGTHS, NEAREST, NORMALISING, is_plain
from compactattn.fused.tiles import (
    add_dot,
    bends_of,
    count_tiles,
    dot,
    find_tile,
    has_bias,
    has_slopes,
    hides,
    hush,
    load_rows,
    load_scale,
    open_block,
    plan,
    quiet,
    rounded,
    scores,
    store_rows,
)
from compactattn.fused.weights import is_best, is_even, largest_scale, load_kept, make_row, turn_row, weigh


@triton.jit
def pull(s, o_n, row, steep, dw, pulls, RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr):
    """ds = g · slope ⊙ (dw − c), with what θ receives handed to the key(s) that set it. `pulls` are g, −g c and that."""
    gain, offset, share = pulls
    ds = steep * tl.fma(dw, gain, offset)
    if R != INF:
        if RULE == ANCHORED:
            ds = tl.fma(is_best(s, row, R, BENDS, EXACT), share, ds)
        elif RULE == NEAREST:
            ds += tl.where(o_n == row[6], share, 0.0)
    return ds


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    p_do, p_q, p_k, p_v, d_k, d_v, p_o, p_tilt, p_dq, p_kept, p_pulled, p_dscale, p_dorder, p_list, p_count,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, p_seed,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, dq_b, dq_h, dq_m, scale_h, at_b, lo_b, hi_b,
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin, limit, boost,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    DROPS: tl.constexpr, LISTED: tl.constexpr, SCALED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, its part of dscale and of dr, and for `backward_keys` the centre and share of each row."""
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    place, view, b_q, own = open_block(
        p_q, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, q_b, q_h, q_m, scale_h, at_b, lo_b, hi_b, steps,
        H, Q, K, R, BENDS, D, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    head, b, h, begin = place
    b_at, b_lo, b_hi, live, bounds = view
    scale, order, bends = own
    b_do = load_rows(p_do + b * do_b + h * do_h, begin, live, do_m, DV, BLOCK_M, BLOCK_DV, False)
    p_k += b * k_b + h // GROUP * k_h
    p_v += b * v_b + h // GROUP * v_h
    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
    row, gain = make_row(kept, b_at, scale, bends, order, margin, True, RULE, R, PEAKED)

    block = tl.cast(head, tl.int64) * tl.cdiv(Q, BLOCK_M) + begin // BLOCK_M
    counts = (tl.load(p_count + COUNTS * block), tl.load(p_count + COUNTS * block + 1)) if LISTED else (0, 0)
    sight = (b_at, b_lo, b_hi, bounds, plan(bounds, BLOCK_N), counts)
    keys = (p_k, p_v, k_n, v_n, d_k, d_v, b.to(tl.int32), (h // GROUP).to(tl.int32), p_list + block * tiles, tiles)
    drop = open_drop(p_seed, b, h, limit, boost) if DROPS else (0, 0, 0, 0)
    flat = turn_row(row)

    TILTED: tl.constexpr = R != INF and RULE != FIXED
    o_o = b * o_b + h * o_h
    none = tl.zeros((BLOCK_M,), tl.float32)
    share, lean = none, none
    SHARED: tl.constexpr = TILTED and RULE != NORMALISING  # what θ receives goes to single keys
    if EXACT and ((RULE == FIXED and R != 0.0) or (TILTED and RULE != NEAREST)):
        under, sums, slopes = pull_all(
            b_q, b_do, keys, flat, (none[:, None], none[:, None], none[:, None]), sight, drop, begin,
            RULE, R, BENDS, EXACT, DROPS, LISTED, True, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
        )  # fmt: skip
        centre = sums / tl.where(slopes > 0.0, slopes, 1.0)
        if SHARED:  # the centre is the mean under the weights
            lean = centre
            centre = tl.sum(under, 1) * (row[8] if is_whole(R) else 1.0)
            lean = tl.where(slopes > 0.0, lean - centre, 0.0)
    else:
        p_mean = p_tilt + o_o if TILTED and RULE == NORMALISING else p_o + o_o
        mean = load_rows(p_mean, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        if not EXACT:
            p_rest = p_tilt + o_o + (far * DV if TILTED else 0)
            mean += load_rows(p_rest, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
        centre = sum_product(b_do, mean)
        if SHARED:
            lean = sum_product(b_do, load_rows(p_tilt + o_o, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False))
    if SHARED:
        known = kept[1] > 0.0
        share = tl.where(known, -R / tl.where(known, kept[1], 1.0) * kept[3] / kept[2] * lean, 0.0)
    part = 1.0 if GROUP == 1 else scale / largest_scale(p_scale, h // GROUP, scale_h, GROUP)
    o_pulled = block * BLOCK_M + tl.arange(0, BLOCK_M)
    padded = tl.cast(tl.num_programs(0), tl.int64) * BLOCK_M
    if is_even(RULE, R, BENDS, EXACT):  # all that `backward_keys` needs, for every row of the block
        tl.store(p_pulled + 2 * o_pulled, row[10])
        tl.store(p_pulled + 2 * o_pulled + 1, -gain * part * centre)
    elif is_plain(RULE, R, BENDS, EXACT):
        tl.store(p_pulled + o_pulled, row[3] if RULE == ANCHORED else row[10])
        tl.store(p_pulled + padded + o_pulled, row[8] if RULE == ANCHORED else gain * part)
        tl.store(p_pulled + 2 * padded + o_pulled, -gain * part * centre)
        tl.store(p_pulled + 3 * padded + o_pulled, row[9] if RULE == FIXED else share * part)
    else:
        tl.store(p_pulled + o_pulled, centre)
        tl.store(p_pulled + padded + o_pulled, share * part)
        if has_bias(BENDS):
            tl.store(p_pulled + 2 * padded + o_pulled, share)

    pulls = (gain[:, None], (-gain * centre)[:, None], (centre if R == LEARNED else share)[:, None])
    acc, drift, dorder = pull_all(
        b_q, b_do, keys, flat, pulls, sight, drop, begin,
        RULE, R, BENDS, EXACT, DROPS, LISTED, SCALED, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
    )  # fmt: skip
    acc = tl.where(live[:, None], acc, 0.0)
    store_rows(p_dq + b * dq_b + h * dq_h, begin, m_rows, dq_m, acc * scale, D, BLOCK_M, BLOCK_D)
    if R == LEARNED:
        tl.store(p_dorder + tl.program_id(0), tl.sum(dorder, 0))
    if SCALED:
        if hides(BENDS):
            b_q = tl.where((kept[0] != -INF)[:, None], b_q, 0.0)
        dscale = tl.sum(acc * b_q.to(tl.float32), 1)
        if RULE == FIXED:
            dscale -= drift
        elif RULE == NORMALISING and R != INF and BENDS == 0:
            # Σ ds = 0 but for an error of the centre, which reaches dscale through the mean score under the slopes
            mean = kept[0] - kept[1] + kept[2] / tl.where(kept[3] > 0.0, kept[3], INF) * (R if is_whole(R) else kept[1])
            dscale -= tl.where(live & (kept[0] != -INF), drift * mean / scale, 0.0)
        tl.store(p_dscale + tl.program_id(0), tl.sum(dscale, 0))


@triton.jit
def sum_product(a, b):
    """(M,) the products of the rows of two blocks."""
    return tl.sum(a.to(tl.float32) * b.to(tl.float32), 1)


@triton.jit
def pull_all(
    b_q, b_do, keys, row, pulls, sight, drop, begin,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, DROPS: tl.constexpr,
    LISTED: tl.constexpr, SCALED: tl.constexpr, CENTRE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """`pull_keys` over all tiles, the masked ones first."""
    none = tl.zeros((BLOCK_M,), tl.float32)
    sums = (tl.zeros((BLOCK_M, 1 if CENTRE else BLOCK_D), tl.float32), none, none)
    b_m = begin + tl.arange(0, BLOCK_M)[:, None]
    sums = pull_keys(
        sums, b_q, b_do, keys, row, pulls, sight, drop, b_m,
        RULE, R, BENDS, EXACT, DROPS, LISTED, SCALED, CENTRE, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
    )  # fmt: skip
    if not hides(BENDS):
        sums = pull_keys(
            sums, b_q, b_do, keys, row, pulls, sight, drop, b_m,
            RULE, R, BENDS, EXACT, DROPS, LISTED, SCALED, CENTRE, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
        )  # fmt: skip
    return sums


@triton.jit
def pull_keys(
    sums, b_q, b_do, keys, row, pulls, sight, drop, b_m,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, DROPS: tl.constexpr,
    LISTED: tl.constexpr, SCALED: tl.constexpr, CENTRE: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Σ ds k over the masked or the whole tiles, Σ ds where dscale hangs on it, and what a learned r receives.

    With CENTRE nothing of it, but Σ u dw and Σ u, whose quotient is the centre of ds: u is y^(r−1), or w where θ is fixed.
    Where it is anchored that quotient is for what θ receives, and the first sum, Σ K dw, for the centre.
    """
    acc, drift, dorder = sums
    p_k, p_v, k_n, v_n, d_k, d_v, b, h, p_list, tiles = keys
    _, b_lo, b_hi, bounds, whole, counts = sight
    for i in range(0, count_tiles(whole, counts, LISTED, WHOLE)):
        tile = find_tile(i, whole, p_list, tiles, LISTED, WHOLE)
        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = (o_n >= bounds[0]) & (o_n < bounds[1])
        if WHOLE and DESCRIBED:
            b_k = d_k.load([b, h, tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_D)
            b_v = d_v.load([b, h, tile * BLOCK_N, 0]).reshape(BLOCK_N, BLOCK_DV)
        else:
            b_k = load_rows(p_k, tile * BLOCK_N, m_n, k_n, D, BLOCK_N, BLOCK_D, WHOLE)
            b_v = load_rows(p_v, tile * BLOCK_N, m_n, v_n, DV, BLOCK_N, BLOCK_DV, WHOLE)
        raw = scores(b_q, tl.trans(b_k), o_n[None, :], b_lo[:, None], b_hi[:, None], WHOLE)
        dw = dot(b_do, tl.trans(b_v))
        if DROPS:
            dw = thin(dw, drop, b_m, o_n[None, :]) * drop[3]
        s, k, steep = weigh(raw, o_n[None, :], row, RULE, R, BENDS, EXACT)
        centring = k if RULE == FIXED else steep
        ds = centring * dw if CENTRE else pull(s, o_n[None, :], row, steep, dw, pulls, RULE, R, BENDS, EXACT)
        ds = quiet(ds, s, BENDS)
        b_k = hush(b_k, s, 0, BENDS)
        if CENTRE or (SCALED and (RULE == FIXED or (RULE == NORMALISING and R != INF and BENDS == 0))):
            # a fixed θ moves with the scale: what it takes from dscale must be rounded as the scores' share is
            drift += tl.sum(rounded(ds, b_k.dtype) if RULE == FIXED and not CENTRE else ds, 1)
        if CENTRE:
            dorder += tl.sum(centring, 1)
            if RULE == ANCHORED:
                acc += tl.sum(quiet(k * dw, s, BENDS), 1)[:, None]
        else:
            if R == LEARNED:
                dorder += tl.sum(quiet(order_slope(k, row[11]) * (dw - pulls[2]), s, BENDS), 1)
            acc = add_dot(acc, ds.to(b_k.dtype), b_k)
    return acc, drift, dorder


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
    p_do, p_q, d_do, d_q, p_k, p_v, p_dk, p_dv, p_kept, p_pulled, p_list, p_count,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, p_seed,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    scale_h, at_b, lo_b, hi_b, bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin, limit, boost,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    DROPS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from the queries of its group of heads in its list. A step has no slope, and no dk.

    DESCRIBED: d_q and d_do are descriptors, by which whole tiles are copied.
    """
    blocks = tl.cdiv(K, BLOCK_N)
    begin = tl.program_id(0) % blocks * BLOCK_N  # the keys that most queries see first
    head = tl.program_id(0) // blocks
    b, key_head = tl.cast(head // (H // GROUP), tl.int64), tl.cast(head % (H // GROUP), tl.int64)
    o_n = begin + tl.arange(0, BLOCK_N)
    p_seen = p_count + COUNTS * ((b * H + key_head * GROUP) * blocks + begin // BLOCK_N)
    m_n = (o_n >= tl.load(p_seen + 2)) & (o_n < tl.load(p_seen + 3))  # what no query sees may hold anything
    b_k = load_rows(p_k + b * k_b + key_head * k_h, begin, m_n, k_n, D, BLOCK_N, BLOCK_D, False)
    b_v = load_rows(p_v + b * v_b + key_head * v_h, begin, m_n, v_n, DV, BLOCK_N, BLOCK_DV, False)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    sight = (p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b)
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    largest = largest_scale(p_scale, key_head, scale_h, GROUP)
    for member in range(GROUP):
        h = key_head * GROUP + member
        scale = load_scale(p_scale + h * scale_h)
        part = 1.0 if GROUP == 1 else scale / largest
        order = load_order(p_orders, h) if R == LEARNED else R
        bends = (b, h, p_slopes, p_bias, p_allowed, steps)
        block = (b * H + h) * blocks + begin // BLOCK_N
        padded = tl.cast(tiles, tl.int64) * BLOCK_M  # rows of a head in p_pulled
        queries = (
            p_q + b * q_b + h * q_h, p_do + b * do_b + h * do_h, q_m, do_m,
            (b * H + h) * Q, (b * H + h) * padded, rows // Q * padded, Q, tl.cast(rows, tl.int64),
            d_q, d_do, b.to(tl.int32), h.to(tl.int32),
        )  # fmt: skip
        drop = open_drop(p_seed, b, h, limit, boost) if DROPS else (0, 0, 0, 0)
        dk, dv = pull_queries(
            dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list + block * tiles,
            tl.load(p_count + COUNTS * block), tiles, (scale, part), bends, order, margin, drop,
            RULE, R, BENDS, EXACT, PEAKED, DROPS, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
        )  # fmt: skip
        if not hides(BENDS):
            dk, dv = pull_queries(
                dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list + block * tiles,
                tl.load(p_count + COUNTS * block + 1), tiles, (scale, part), bends, order, margin, drop,
                RULE, R, BENDS, EXACT, PEAKED, DROPS, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, DESCRIBED,
            )  # fmt: skip
    if DROPS:
        dv = dv * boost
    store_rows(p_dv + b * dv_b + key_head * dv_h, begin, o_n < K, dv_n, dv, DV, BLOCK_N, BLOCK_DV)
    if R != 0.0:
        store_rows(p_dk + b * dk_b + key_head * dk_h, begin, o_n < K, dk_n, dk * largest, D, BLOCK_N, BLOCK_D)


@triton.jit
def pull_queries(
    dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list, count, tiles, scales, bends, order, margin, drop,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    DROPS: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Adds Σ ds q and Σ w do over the masked or the whole tiles of one head.

    With keys along the first axis w and ds enter these products as they leave the others, from registers; but then every
    number of a query takes M / 4 of them. It pays where a query has two.
    """
    scale, part = scales
    p_q, p_do, q_m, do_m, first_row, first_pulled, padded, Q, far, d_q, d_do, b, h = queries
    KEYS_FIRST: tl.constexpr = is_even(RULE, R, BENDS, EXACT)
    o_n = o_n[:, None] if KEYS_FIRST else o_n[None, :]
    for i in range(0, count):
        start = tl.load(p_list + (tiles - 1 - i if WHOLE else i)).to(tl.int32) * BLOCK_M
        o_m = start + tl.arange(0, BLOCK_M)
        m_rows = o_m < Q
        b_at = o_m
        if has_slopes(BENDS):
            b_at = tl.load(sight[0] + o_m, mask=m_rows, other=0).to(tl.int32)
        live, b_lo, b_hi = m_rows, o_m, o_m
        if not WHOLE:
            b_lo = tl.load(sight[1] + o_m, mask=m_rows, other=0).to(tl.int32)
            b_hi = tl.load(sight[2] + o_m, mask=m_rows, other=0).to(tl.int32)
            live = b_lo < b_hi
        if WHOLE and DESCRIBED:  # no pointer of a row takes a register
            b_q = d_q.load([b, h, start, 0]).reshape(BLOCK_M, BLOCK_D)
            b_do = d_do.load([b, h, start, 0]).reshape(BLOCK_M, BLOCK_DV)
        else:
            b_q = load_rows(p_q, start, live, q_m, D, BLOCK_M, BLOCK_D, False)
            b_do = load_rows(p_do, start, live, do_m, DV, BLOCK_M, BLOCK_DV, False)
        row, pulls = load_pulled(
            p_kept, p_pulled, first_pulled + o_m, padded, first_row + o_m, m_rows, far, b_at, scale,
            bends_of(bends[1], (bends[0], o_m, b_lo, b_hi), bends[2], bends[3], bends[4], bends[5], BENDS), order, margin,
            part, RULE, R, BENDS, EXACT, PEAKED,
        )  # fmt: skip
        lo, hi = along(b_lo, KEYS_FIRST), along(b_hi, KEYS_FIRST)
        if KEYS_FIRST:  # noqa: SIM108
            raw = scores(b_k, tl.trans(b_q), o_n, lo, hi, WHOLE)
        else:
            raw = scores(b_q, tl.trans(b_k), o_n, lo, hi, WHOLE)
        s, w, steep = weigh(raw, o_n, row, RULE, R, BENDS, EXACT)
        if RULE == ANCHORED and is_whole(R):
            w = w * row[8]
        b_q, b_do = hush(b_q, s, 1, BENDS), hush(b_do, s, 1, BENDS)
        if DROPS:
            w = thin(w, drop, along(o_m, KEYS_FIRST), o_n)
        w = w.to(b_do.dtype)
        dv = add_dot(dv, w if KEYS_FIRST else tl.trans(w), b_do)
        if R != 0.0:
            dw = dot(b_v, tl.trans(b_do)) if KEYS_FIRST else dot(b_do, tl.trans(b_v))
            if DROPS:
                dw = thin(dw, drop, along(o_m, KEYS_FIRST), o_n) * drop[3]
            ds = quiet(pull(s, o_n, row, steep, dw, pulls, RULE, R, BENDS, EXACT), s, BENDS).to(b_q.dtype)
            dk = add_dot(dk, ds if KEYS_FIRST else tl.trans(ds), b_q)
    return dk, dv


@triton.jit
def along(b, KEYS_FIRST: tl.constexpr):
    """(M,) numbers of the queries along their axis of a tile."""
    return b[None, :] if KEYS_FIRST else b[:, None]


@triton.jit
def load_pulled(
    p_kept, p_pulled, o_pulled, padded, o_rows, m_rows, far, b_at, scale, bends, order, margin, part,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
):  # fmt: skip
    """The rows as `weigh` and `pull` take them; the gain and the share hold `part` of a scale, as `largest_scale` has it."""
    if is_even(RULE, R, BENDS, EXACT):
        base, offset = tl.split(tl.load(p_pulled + 2 * o_pulled[:, None] + tl.arange(0, 2)[None, :]))
        base, offset = base[None, :], offset[None, :]
        rise = scale * (LOG2E if R == INF else 1.0 / R)
        return (base, scale, bends, base, base, base, base, base, base, rise, base, order), (part, offset, base)
    elif is_plain(RULE, R, BENDS, EXACT):
        base, gain = tl.load(p_pulled + o_pulled)[:, None], tl.load(p_pulled + padded + o_pulled)[:, None]
        offset, last = tl.load(p_pulled + 2 * padded + o_pulled)[:, None], tl.load(p_pulled + 3 * padded + o_pulled)[:, None]
        inverse, rise = gain, last
        if RULE == ANCHORED:
            rise = tl.maximum(scale * (1.0 / margin), SMALLEST)
            gain = inverse * (R * (1.0 / margin) * part)
        return (base, scale, bends, base, base, base, base, base, inverse, rise, base, order), (gain, offset, last)
    else:
        centre, share = tl.load(p_pulled + o_pulled)[:, None], tl.load(p_pulled + padded + o_pulled)[:, None]
        kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
        row, gain = make_row(kept, b_at, scale, bends, order, margin, True, RULE, R, PEAKED)
        slant = (gain * part)[:, None]
        return turn_row(row), (slant, -slant * centre, share)
