"""The gradient of an additive bias: ds, summed over all that share a number of it."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.backward import pull
from compactattn.fused.drops import open_drop, thin
from compactattn.fused.profiles import LEARNED, load_order
from compactattn.fused.threshold import LENGTHS
from compactattn.fused.tiles import bends_of, dot, load_rows, load_scale, load_sight, quiet, scores, span
from compactattn.fused.weights import load_kept, make_row, turn_row, weigh


@triton.jit(do_not_specialize=LENGTHS)
def backward_bias(
    p_do, p_q, p_k, p_v, p_dbias, p_kept, p_pulled, p_flags, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    p_seed, do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dbias_b, dbias_h, dbias_m, dbias_n,
    scale_h, at_b, lo_b, hi_b, bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    B, H, Q, K, rows, tiles, margin, limit, boost,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    DROPS: tl.constexpr, TRACK: tl.constexpr,
    BY_SAMPLE: tl.constexpr, BY_HEAD: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ ds of a tile of the bias, over the samples, heads, queries and keys that share a number of it, in their order."""
    blocks = tl.cdiv(Q, BLOCK_M)
    place = tl.program_id(0)
    tile_0, tile_1 = (place % tiles, place % tiles + 1) if BY_KEY else (0, tiles)
    place = place // tiles if BY_KEY else place
    block_0, block_1 = (place % blocks, place % blocks + 1) if BY_QUERY else (0, blocks)
    place = place // blocks if BY_QUERY else place
    h_0, h_1 = (place % H, place % H + 1) if BY_HEAD else (0, H)
    place = place // H if BY_HEAD else place
    b_0, b_1 = (place, place + 1) if BY_SAMPLE else (0, B)
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    far = tl.cast(rows, tl.int64)
    padded = tl.cast(B * H, tl.int64) * blocks * BLOCK_M
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for sample in range(b_0, b_1):
        for of_sample in range(h_0, h_1):
            b, h = tl.cast(sample, tl.int64), tl.cast(of_sample, tl.int64)
            scale = load_scale(p_scale + h * scale_h)
            order = load_order(p_orders, h) if R == LEARNED else R
            drop = open_drop(p_seed, b, h, limit, boost) if DROPS else (0, 0, 0, 0)
            for block in range(block_0, block_1):
                o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
                b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, block * BLOCK_M, Q, BLOCK_M)
                live, m_rows = b_lo < b_hi, o_m < Q
                bounds = span(b_lo, b_hi, K, BENDS)
                b_q = load_rows(p_q + b * q_b + h * q_h, block * BLOCK_M, live, q_m, D, BLOCK_M, BLOCK_D, False)
                b_do = load_rows(p_do + b * do_b + h * do_h, block * BLOCK_M, live, do_m, DV, BLOCK_M, BLOCK_DV, False)
                bends = bends_of(h, (b, o_m, b_lo, b_hi), p_slopes, p_bias, p_allowed, steps, BENDS)
                kept = load_kept(p_kept, (b * H + h) * Q + o_m, m_rows, far, RULE)
                row, gain = make_row(kept, b_at, scale, bends, order, margin, True, RULE, R, PEAKED)
                flat = turn_row(row)
                p_centre = p_pulled + ((b * H + h) * blocks + block) * BLOCK_M + tl.arange(0, BLOCK_M)
                offset, share = -gain * tl.load(p_centre), tl.load(p_centre + 2 * padded)
                pulls = (gain[:, None], offset[:, None], share[:, None])
                for tile in range(tile_0, tile_1):
                    reached = (bounds[0] < (tile + 1) * BLOCK_N) & (bounds[1] > tile * BLOCK_N)
                    if TRACK:
                        o_flag = ((b * H + h) * blocks + block) * tiles + tile
                        reached = reached & (tl.load(p_flags + o_flag, mask=reached, other=0) != 0)
                    if reached:
                        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
                        m_n = (o_n >= bounds[0]) & (o_n < bounds[1])
                        b_k = load_rows(p_k + b * k_b + h // GROUP * k_h, tile * BLOCK_N, m_n, k_n, D, BLOCK_N, BLOCK_D, False)
                        b_v = load_rows(
                            p_v + b * v_b + h // GROUP * v_h, tile * BLOCK_N, m_n, v_n, DV, BLOCK_N, BLOCK_DV, False
                        )
                        raw = scores(b_q, tl.trans(b_k), o_n[None, :], b_lo[:, None], b_hi[:, None], False)
                        s, _, steep = weigh(raw, o_n[None, :], flat, RULE, R, BENDS, EXACT)
                        dw = dot(b_do, tl.trans(b_v))
                        if DROPS:
                            dw = thin(dw, drop, o_m[:, None], o_n[None, :]) * drop[3]
                        ds = pull(s, o_n[None, :], flat, steep, dw, pulls, RULE, R, BENDS, EXACT)
                        acc += quiet(ds, s, BENDS)
    o_m, o_n = block_0 * BLOCK_M + tl.arange(0, BLOCK_M), tile_0 * BLOCK_N + tl.arange(0, BLOCK_N)
    if not BY_QUERY:
        acc = tl.where((o_m == 0)[:, None], tl.sum(acc, 0)[None, :], 0.0)
    if not BY_KEY:
        acc = tl.where((o_n == 0)[None, :], tl.sum(acc, 1)[:, None], 0.0)
    p = p_dbias + tl.cast(b_0, tl.int64) * dbias_b + tl.cast(h_0, tl.int64) * dbias_h
    p = p + tl.cast(o_m, tl.int64)[:, None] * dbias_m + tl.cast(o_n, tl.int64)[None, :] * dbias_n
    tl.store(p, acc, mask=(o_m < (Q if BY_QUERY else 1))[:, None] & (o_n < (K if BY_KEY else 1))[None, :])
