"""The kernels: the estimate o = Σ w v, and its gradients dq and dk, dv, as reference.estimate and rows.pull.

One program has a block of queries (forward, dq) or of keys (dk, dv) of one head, and writes it alone: no atomics, so
that every run gives the same bits. With K the height of a key and y^(r−1) its slope, both as in profiles.py,

    w = K / Z,    ds = g · slope ⊙ (dw − c),    g = r / (ρ Z),    dw = do·v,

and what θ receives, −Σ ds, goes to the best key(s), the k-th key or the scale, as the rule has it.

Values of r and the rule are compile-time numbers; lengths are not, so that a new length compiles nothing.
Shapes: M queries, N keys of a tile; D head dim of q and k, DV of v.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.profiles import INF, heights
from compactattn.fused.threshold import ANCHORED, FIXED, NEAREST, NORMALISING, find_threshold
from compactattn.fused.tiles import grounded, load_rows, load_score, load_sight, score, shift, span, store_rows

# numbers kept of each row between forward and backward; the last two of Nearest only
PEAK, REACH, MASS, THETA, CUT = (tl.constexpr(place) for place in range(5))
LENGTHS = ["H", "Q", "K", "rows", "nearest", "at_b", "lo_b", "hi_b", "scale_h"]  # a new value compiles nothing


@triton.jit
def weigh(s, o_n, peak, reach, theta, cut, RULE: tl.constexpr, R: tl.constexpr):
    """(M, N) K of every key and its slope, both 0 off the support; the weights are K / Σ K."""
    k, steep = heights(shift(s, peak), tl.where(reach > 0.0, reach, 1.0)[:, None], R)
    if RULE == ANCHORED:
        if R == INF:
            k = tl.where(shift(s, peak) > -reach[:, None], k, 0.0)
            steep = k
    elif RULE == FIXED:
        if R == 0.0:
            k = tl.where(s > theta[:, None], 1.0, 0.0)
        near = (reach > 0.0)[:, None]
        k = tl.where(near, k, tl.where(s == -INF, 0.0, s - s + 1.0))  # nothing in reach is uniform; NaN stays NaN
        steep = tl.where(near, steep, 0.0)
    elif RULE == NEAREST:
        if R == 0.0:
            k = k * 0.0 + 1.0
        inside = (s > theta[:, None]) | ((s == theta[:, None]) & (o_n[None, :] <= cut[:, None]))
        k = tl.where(inside, k, 0.0)
        steep = tl.where(inside & ((reach > 0.0)[:, None] | (R == INF)), steep, 0.0)
    return k, steep


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    p_q, p_k, p_v, p_o, p_kept, p_support, p_scale, p_slopes, p_at, p_lo, p_hi,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, scale_h, at_b, lo_b, hi_b,
    H, Q, K, rows, margin, nearest,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, ALIBI: tl.constexpr, READOUT: tl.constexpr,
    SINGLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = Σ w v for a block of queries of one head; keeps the threshold of each row for the backward kernels."""
    blocks = tl.cdiv(Q, BLOCK_M)
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # the longest causal rows first
    head = tl.program_id(0) // blocks
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, begin, Q, BLOCK_M)
    first, last = span(b_lo, b_hi, K)
    live = b_lo < b_hi
    b_q = load_rows(p_q + b * q_b + h * q_h, begin, live, q_m, D, BLOCK_M, BLOCK_D)
    scale = tl.load(p_scale + h * scale_h)
    slope = tl.load(p_slopes + h).to(tl.float32) if ALIBI else 0.0
    p_k += b * k_b + h // GROUP * k_h
    p_v += b * v_b + h // GROUP * v_h
    row, sight = (b_q, p_k, k_n, b_at, scale, slope), (b_lo, b_hi, first, last)

    b_s = load_score(row, sight, 0, ALIBI, D, BLOCK_N, BLOCK_D) if SINGLE else 0.0
    peak, reach, theta, cut = find_threshold(
        b_s, row, sight, scale, margin, nearest, SINGLE, RULE, R, ALIBI, D, BLOCK_M, BLOCK_N, BLOCK_D
    )  # fmt: skip
    reach = tl.where(live, reach, 1.0)
    theta = tl.where(live, theta, 0.0)
    ground = grounded(peak)

    mass = tl.zeros((BLOCK_M,), tl.float32)
    support = tl.zeros((BLOCK_M,), tl.int32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    if SINGLE:
        o_n = tl.arange(0, BLOCK_N)
        k, _ = weigh(b_s, o_n, ground, reach, theta, cut, RULE, R)
        b_v = load_rows(p_v, 0, (o_n >= first) & (o_n < last), v_n, DV, BLOCK_N, BLOCK_DV)
        mass = tl.sum(k, 1)
        if READOUT:
            support = tl.sum((k > 0.0).to(tl.int32), 1)
        acc = tl.dot(k.to(b_v.dtype), b_v, acc, input_precision="ieee")
    else:
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            s = load_score(row, sight, start, ALIBI, D, BLOCK_N, BLOCK_D)
            k, _ = weigh(s, o_n, ground, reach, theta, cut, RULE, R)
            b_v = load_rows(p_v, start, (o_n >= first) & (o_n < last), v_n, DV, BLOCK_N, BLOCK_DV)
            mass += tl.sum(k, 1)
            if READOUT:
                support += tl.sum((k > 0.0).to(tl.int32), 1)
            acc = tl.dot(k.to(b_v.dtype), b_v, acc, input_precision="ieee")
    mass = tl.where(mass == 0.0, 1.0, mass)  # no key: 0 / 1

    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    store_rows(p_o + b * o_b + h * o_h, begin, m_rows, o_m, acc / mass[:, None], DV, BLOCK_M, BLOCK_DV)
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    tl.store(p_kept + PEAK * far + o_rows, peak, mask=m_rows)
    tl.store(p_kept + REACH * far + o_rows, reach, mask=m_rows)
    tl.store(p_kept + MASS * far + o_rows, mass, mask=m_rows)
    if RULE == NEAREST:
        tl.store(p_kept + THETA * far + o_rows, theta, mask=m_rows)
        tl.store(p_kept + CUT * far + o_rows, cut.to(tl.float32, bitcast=True), mask=m_rows)
    if READOUT:
        tl.store(p_support + o_rows, support, mask=m_rows)


@triton.jit
def load_kept(p_kept, o_rows, m_rows, far, scale, margin, RULE: tl.constexpr, R: tl.constexpr):
    """(M,) each: max s, reach, θ, cut and Z as the forward kernel kept them, and the factor g of the slopes."""
    peak = grounded(tl.load(p_kept + PEAK * far + o_rows, mask=m_rows, other=0.0))
    reach = tl.load(p_kept + REACH * far + o_rows, mask=m_rows, other=1.0)
    mass = tl.load(p_kept + MASS * far + o_rows, mask=m_rows, other=1.0)
    theta = peak * 0.0 + (scale - margin)
    cut = (peak * 0.0).to(tl.int32)
    if RULE == NEAREST:
        theta = tl.load(p_kept + THETA * far + o_rows, mask=m_rows, other=0.0)
        cut = tl.load(p_kept + CUT * far + o_rows, mask=m_rows, other=0.0).to(tl.int32, bitcast=True)
    safe = tl.where(reach > 0.0, reach, 1.0)
    gain = 1.0 / mass if R == INF else tl.where(reach > 0.0, R / (safe * mass), 0.0)
    return peak, reach, theta, cut, mass, gain


@triton.jit
def pull_sums(s, k, steep, dw, peak):
    """(M,) each: Σ K dw, Σ slope dw, Σ slope and the number of best keys. What has no slope may hold anything."""
    known = tl.where(steep == 0.0, 0.0, dw)
    best = tl.sum((s == peak[:, None]).to(tl.float32), 1)
    return tl.sum(k * tl.where(k == 0.0, 0.0, dw), 1), tl.sum(steep * known, 1), tl.sum(steep, 1), best


@triton.jit
def pull(s, o_n, steep, dw, peak, cut, gain, centre, share, RULE: tl.constexpr, R: tl.constexpr):
    """(M, N) ds, with what θ receives already handed to the key(s) that set it."""
    ds = tl.where(steep == 0.0, 0.0, gain[:, None] * steep * (dw - centre[:, None]))
    if R != INF:
        if RULE == ANCHORED:
            ds += tl.where(s == peak[:, None], share[:, None], 0.0)
        elif RULE == NEAREST:
            ds += tl.where(o_n[None, :] == cut[:, None], share[:, None], 0.0)
    return ds


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    p_do, p_q, p_k, p_v, p_dq, p_kept, p_pulled, p_dscale, p_scale, p_slopes, p_at, p_lo, p_hi,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dq_b, dq_h, dq_m, scale_h, at_b, lo_b, hi_b,
    H, Q, K, rows, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, ALIBI: tl.constexpr,
    SINGLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, its part of dscale, and for `backward_keys` the centre and share of each row."""
    blocks = tl.cdiv(Q, BLOCK_M)
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = tl.program_id(0) // blocks
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, begin, Q, BLOCK_M)
    first, last = span(b_lo, b_hi, K)
    live = b_lo < b_hi
    b_q = load_rows(p_q + b * q_b + h * q_h, begin, live, q_m, D, BLOCK_M, BLOCK_D)
    b_do = load_rows(p_do + b * do_b + h * do_h, begin, live, do_m, DV, BLOCK_M, BLOCK_DV)
    scale = tl.load(p_scale + h * scale_h)
    slope = tl.load(p_slopes + h).to(tl.float32) if ALIBI else 0.0
    p_k += b * k_b + h // GROUP * k_h
    p_v += b * v_b + h // GROUP * v_h
    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    peak, reach, theta, cut, mass, gain = load_kept(p_kept, o_rows, m_rows, far, scale, margin, RULE, R)

    # what the whole row says about its centre
    if SINGLE:
        o_n = tl.arange(0, BLOCK_N)
        m_n = (o_n >= first) & (o_n < last)
        b_k = load_rows(p_k, 0, m_n, k_n, D, BLOCK_N, BLOCK_D)
        b_v = load_rows(p_v, 0, m_n, v_n, DV, BLOCK_N, BLOCK_DV)
        b_s = score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI)
        k, steep = weigh(b_s, o_n, peak, reach, theta, cut, RULE, R)
        dw = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
        weighed, sloped, slopes, best = pull_sums(b_s, k, steep, dw, peak)
    else:
        weighed = tl.zeros((BLOCK_M,), tl.float32)
        sloped = tl.zeros((BLOCK_M,), tl.float32)
        slopes = tl.zeros((BLOCK_M,), tl.float32)
        best = tl.zeros((BLOCK_M,), tl.float32)
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n = (o_n >= first) & (o_n < last)
            b_k = load_rows(p_k, start, m_n, k_n, D, BLOCK_N, BLOCK_D)
            b_v = load_rows(p_v, start, m_n, v_n, DV, BLOCK_N, BLOCK_DV)
            b_s = score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI)
            k, steep = weigh(b_s, o_n, peak, reach, theta, cut, RULE, R)
            dw = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
            more_weighed, more_sloped, more_slopes, more_best = pull_sums(b_s, k, steep, dw, peak)
            weighed += more_weighed
            sloped += more_sloped
            slopes += more_slopes
            best += more_best
    moved = RULE == NORMALISING and R != INF  # θ moves so that Σ w = 1
    centre = sloped / tl.where(slopes == 0.0, 1.0, slopes) if moved else weighed / mass
    dtheta = -gain * (sloped - centre * slopes)
    share = dtheta / tl.maximum(best, 1.0) if RULE == ANCHORED else dtheta
    tl.store(p_pulled + o_rows, centre, mask=m_rows)
    tl.store(p_pulled + far + o_rows, share, mask=m_rows)

    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if SINGLE:
        ds = pull(b_s, o_n, steep, dw, peak, cut, gain, centre, share, RULE, R)
        acc = tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision="ieee")
    else:
        for start in range(first // BLOCK_N * BLOCK_N, last, BLOCK_N):
            o_n = start + tl.arange(0, BLOCK_N)
            m_n = (o_n >= first) & (o_n < last)
            b_k = load_rows(p_k, start, m_n, k_n, D, BLOCK_N, BLOCK_D)
            b_v = load_rows(p_v, start, m_n, v_n, DV, BLOCK_N, BLOCK_DV)
            b_s = score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI)
            k, steep = weigh(b_s, o_n, peak, reach, theta, cut, RULE, R)
            dw = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
            ds = pull(b_s, o_n, steep, dw, peak, cut, gain, centre, share, RULE, R)
            acc = tl.dot(ds.to(b_k.dtype), b_k, acc, input_precision="ieee")
    store_rows(p_dq + b * dq_b + h * dq_h, begin, m_rows, dq_m, acc * scale, D, BLOCK_M, BLOCK_D)
    dscale = tl.sum(acc * b_q.to(tl.float32), 1)
    if RULE == FIXED:
        dscale += dtheta
    tl.store(p_dscale + tl.program_id(0), tl.sum(dscale, 0))


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
    p_do, p_q, p_k, p_v, p_dk, p_dv, p_kept, p_pulled, p_scale, p_slopes, p_at, p_lo, p_hi,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    scale_h, at_b, lo_b, hi_b, H, Q, K, rows, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, ALIBI: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from all queries of its group of heads. A step has no slope, and no dk."""
    blocks = tl.cdiv(K, BLOCK_N)
    begin = tl.program_id(0) % blocks * BLOCK_N
    head = tl.program_id(0) // blocks
    b, key_head = tl.cast(head // (H // GROUP), tl.int64), tl.cast(head % (H // GROUP), tl.int64)
    p_at += b * at_b
    p_lo += b * lo_b
    p_hi += b * hi_b
    # the queries that see any of these keys
    first, last = Q, 0
    for start in range(0, Q, CHUNK):
        b_at, b_lo, b_hi = load_sight(p_at, p_lo, p_hi, start, Q, CHUNK)
        o_m = start + tl.arange(0, CHUNK)
        sees = (b_lo < b_hi) & (b_lo < begin + BLOCK_N) & (b_hi > begin)
        first = tl.minimum(first, tl.min(tl.where(sees, o_m, Q), 0))
        last = tl.maximum(last, tl.max(tl.where(sees, o_m + 1, 0), 0))

    o_n = begin + tl.arange(0, BLOCK_N)
    b_k = load_rows(p_k + b * k_b + key_head * k_h, begin, o_n < K, k_n, D, BLOCK_N, BLOCK_D)
    b_v = load_rows(p_v + b * v_b + key_head * v_h, begin, o_n < K, v_n, DV, BLOCK_N, BLOCK_DV)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    far = tl.cast(rows, tl.int64)
    for member in range(GROUP):
        h = key_head * GROUP + member
        scale = tl.load(p_scale + h * scale_h)
        slope = tl.load(p_slopes + h).to(tl.float32) if ALIBI else 0.0
        acc = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
        for start in range(first // BLOCK_M * BLOCK_M, last, BLOCK_M):
            b_at, b_lo, b_hi = load_sight(p_at, p_lo, p_hi, start, Q, BLOCK_M)
            live = b_lo < b_hi
            b_q = load_rows(p_q + b * q_b + h * q_h, start, live, q_m, D, BLOCK_M, BLOCK_D)
            b_do = load_rows(p_do + b * do_b + h * do_h, start, live, do_m, DV, BLOCK_M, BLOCK_DV)
            m_rows = start + tl.arange(0, BLOCK_M) < Q
            o_rows = (b * H + h) * Q + start + tl.arange(0, BLOCK_M)
            peak, reach, theta, cut, mass, gain = load_kept(p_kept, o_rows, m_rows, far, scale, margin, RULE, R)
            b_s = score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI)
            k, steep = weigh(b_s, o_n, peak, reach, theta, cut, RULE, R)
            w = k * (1.0 / mass)[:, None]
            dv = tl.dot(tl.trans(w.to(b_do.dtype)), b_do, dv, input_precision="ieee")
            if R != 0.0:
                centre = tl.load(p_pulled + o_rows, mask=m_rows, other=0.0)
                share = tl.load(p_pulled + far + o_rows, mask=m_rows, other=0.0)
                dw = tl.dot(b_do, tl.trans(b_v), input_precision="ieee")
                ds = pull(b_s, o_n, steep, dw, peak, cut, gain, centre, share, RULE, R)
                acc = tl.dot(tl.trans(ds.to(b_q.dtype)), b_q, acc, input_precision="ieee")
        dk += acc * scale
    store_rows(p_dv + b * dv_b + key_head * dv_h, begin, o_n < K, dv_n, dv, DV, BLOCK_N, BLOCK_DV)
    if R != 0.0:
        store_rows(p_dk + b * dk_b + key_head * dk_h, begin, o_n < K, dk_n, dk, D, BLOCK_N, BLOCK_D)
