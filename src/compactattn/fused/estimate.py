"""The kernels: the estimate o = Σ w v, and its gradients dq and dk, dv, as reference.estimate and rows.pull.

One program has a block of queries (forward, dq) or of keys (dk, dv) of one head, and writes it alone: no atomics, so
that every run gives the same bits. It visits only the tiles in its list, where it has one. With y = u (s − θ),

    w = y₊^r,    ds = g · y^(r−1) ⊙ (dw − c),    g = r u,    dw = do·v,

and what θ receives, −Σ ds, goes to the best key(s), the k-th key or the scale, as the rule has it. The centre c is do·o,
or do·õ where θ moves so that Σ w = 1: the forward kernel leaves õ, the mean of the values under the weights y^(r−1).
The vector that c comes from is kept in two numbers of the dtype, itself and what its rounding left: an error of c is common
to a whole row and does not average out.

Values of r and the rule are compile-time numbers; lengths are not, so that a new length compiles nothing.
Shapes: M queries, N keys of a tile; D head dim of q and k, DV of v.
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
    any_powers,
    is_whole,
    load_order,
    order_slope,
    root,
    whole_powers,
)  # fmt: skip
from compactattn.fused.threshold import (
    ANCHORED,
    CUT,
    FIXED,
    LENGTHS,
    MASS,
    MOST_TURNS,
    NEAREST,
    NORMALISING,
    PEAK,
    REACH,
    SLOPES,
    THETA,
    WORD,
    either,
    larger,
    newton_step,
    shorten,
    tolerate,
)  # fmt: skip
from compactattn.fused.tiles import (
    add_dot,
    bend,
    bends_of,
    count_tiles,
    dot,
    find_tile,
    grounded,
    has_bias,
    has_slopes,
    hides,
    hush,
    load_rows,
    load_sight,
    plan,
    sees,
    shift,
    span,
    store_rows,
)  # fmt: skip


@triton.constexpr_function
def is_plain(rule, r, bends, exact):
    """Whether one multiply-add leads from q·k to y: no bias, no key found by equality, and bits to spare."""
    straight = (rule == 0 or rule == 2) and r in (1.0, 2.0, 3.0)  # normalising, fixed
    return (straight or (rule == 0 and r == float("inf"))) and not bends and not exact


@triton.constexpr_function
def is_direct(rule, r, peaked):
    """Whether θ is known before any score."""
    return rule == 2 and not peaked


# -- rows ----------------------------------------------------------------------------------------


@triton.jit
def load_kept(p_kept, o_rows, m_rows, far, RULE: tl.constexpr):
    """(M,) each: max s (−inf where no key is seen), ρ, Z, Σ slopes, θ and the last key inside."""
    peak = tl.load(p_kept + PEAK * far + o_rows, mask=m_rows, other=-INF)
    reach = tl.load(p_kept + REACH * far + o_rows, mask=m_rows, other=1.0)
    mass = tl.load(p_kept + MASS * far + o_rows, mask=m_rows, other=1.0)
    slopes = tl.load(p_kept + SLOPES * far + o_rows, mask=m_rows, other=0.0)
    theta, cut = peak - reach, tl.zeros_like(peak).to(tl.int32)
    if RULE == NEAREST:
        theta = tl.load(p_kept + THETA * far + o_rows, mask=m_rows, other=0.0)
        cut = tl.load(p_kept + CUT * far + o_rows, mask=m_rows, other=0.0).to(tl.int32, bitcast=True)
    return peak, reach, mass, slopes, theta, cut


@triton.jit
def make_row(
    kept, at, scale, bends, order, margin, NORMALISED: tl.constexpr, RULE: tl.constexpr, R: tl.constexpr, PEAKED: tl.constexpr
):  # fmt: skip
    """What `weigh` needs of each row, and the gain g. K is y^r with y = rise · q·k + base = unit · (s − θ) + base.

    NORMALISED: K is w, else w but for the factor 1/Z. A row in whose reach no key is has Z < 0 and uniform weights.
    """
    peak, reach, mass, _, theta, cut = kept
    dead, alone = peak == -INF, mass < 0.0
    mass = tl.abs(mass)
    ground = grounded(peak)
    if RULE == FIXED:
        theta = tl.zeros_like(peak) + (scale - margin)
    safe = tl.where(dead, 1e37, tl.where(reach > 0.0, reach, 1.0))
    inverse = tl.where(dead, 0.0, 1.0 / mass) if NORMALISED else tl.where(dead, 0.0, 1.0)
    base = tl.zeros_like(peak)
    unit = base + 1.0 if RULE == NORMALISING or is_direct(RULE, R, PEAKED) else 1.0 / safe
    gain = base + 1.0
    rise = base + scale
    if R == INF:
        rise = rise * LOG2E
        base = -ground * LOG2E - (tl.log2(mass) if NORMALISED else 0.0)
        rise, base = tl.where(dead, 0.0, rise), tl.where(dead, -INF, base)
    elif is_whole(R):
        factor = root(mass, R) if NORMALISED else base + 1.0
        unit = tl.where(dead, 0.0, unit * factor)
        base = -(ground - reach) * unit if RULE == NORMALISING else base
        gain = R * unit
        if RULE == FIXED:
            rise = tl.where(alone, 0.0, scale * unit)
            base = tl.where(alone, tl.where(dead, 0.0, factor), -theta * unit)
            unit, gain = tl.where(alone, 0.0, unit), tl.where(alone, 0.0, gain)
        else:
            rise = scale * unit
        if RULE == NEAREST:
            gain = tl.where(reach > 0.0, gain, 0.0)
    elif R != 0.0:
        gain = tl.where(alone | (reach <= 0.0), 0.0, order / (safe * mass))
        base = tl.where(alone, 1.0, 0.0)
    elif RULE == FIXED:
        theta = tl.where(alone, -INF, theta)
    return (at, scale, bends, ground, safe, theta, cut, unit, inverse, rise, base, order), gain


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
    """The scores of a tile of q·k, K of every key and its slope, both 0 off the support."""
    at, scale, bends, peak, reach, theta, cut, unit, inverse, rise, base, order = row
    if is_plain(RULE, R, BENDS, EXACT):
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
            if RULE == FIXED:  # noqa: SIM108
                t = (s - theta) * unit + tl.where(unit == 0.0, base, 0.0)
            else:
                t = (x + reach) * unit
            k, steep = whole_powers(t, R)
        elif R == 0.0:
            inside = s > theta if RULE == FIXED else x > -reach if RULE == ANCHORED else s == s
            k = tl.where(inside, inverse, 0.0)
            steep = k * 0.0
        elif R == INF:
            k = tl.exp2(x * LOG2E) * inverse
            if RULE == ANCHORED:
                k = tl.where(x > -reach, k, 0.0)
            steep = k
        else:
            k, steep = any_powers(x, reach, order if R == LEARNED else R)
            k, steep = tl.where(base > 0.0, 1.0, k) * inverse, tl.where(base > 0.0, 0.0, steep)
        if RULE == NEAREST:
            inside = (s > theta) | ((s == theta) & (o_n <= cut))
            k, steep = tl.where(inside, k, 0.0), tl.where(inside, steep, 0.0)
        return s, k, steep


# -- forward -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    p_q, p_k, p_v, p_o, p_tilt, p_kept, p_support, p_list, p_count, p_flags,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, scale_h, at_b, lo_b, hi_b,
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    READOUT: tl.constexpr, GRAD: tl.constexpr, LISTED: tl.constexpr, TRACK: tl.constexpr, TOLERANCE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """o = Σ w v for a block of queries of one head, and õ; keeps what the backward kernels need of each row.

    The two best of each class gave a ρ; the sums over all keys give Newton's next step. It is small: made to first
    order on the sums themselves it is exact enough, else the sums are taken again.
    """
    blocks = tl.cdiv(Q, BLOCK_M)
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = tl.program_id(0) // blocks
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, begin, Q, BLOCK_M)
    bounds = span(b_lo, b_hi, K, BENDS)
    live = b_lo < b_hi
    b_q = load_rows(p_q + b * q_b + h * q_h, begin, live, q_m, D, BLOCK_M, BLOCK_D, False)
    scale = tl.load(p_scale + h * scale_h)
    order = load_order(p_orders, h) if R == LEARNED else R
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    bends = bends_of(h, (b, begin + tl.arange(0, BLOCK_M), b_lo, b_hi), p_slopes, p_bias, p_allowed, steps, BENDS)
    p_k += b * k_b + h // GROUP * k_h
    p_v += b * v_b + h // GROUP * v_h
    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    block = tl.cast(head, tl.int64) * blocks + begin // BLOCK_M
    lists = (p_list + block * tiles, p_flags + block * tiles, tiles)
    counts = (tl.load(p_count + 2 * block), tl.load(p_count + 2 * block + 1)) if LISTED else (0, 0)
    whole = plan(bounds, BLOCK_N)
    sight = (b_at, b_lo, b_hi, bounds, whole, counts)

    SOFT: tl.constexpr = RULE == NORMALISING and R == INF
    SOLVES: tl.constexpr = RULE == NORMALISING and R != INF
    TILT: tl.constexpr = SOLVES or (GRAD and R != INF and R != 0.0 and RULE != FIXED)
    none = tl.zeros((BLOCK_M,), tl.float32)
    if SOFT or is_direct(RULE, R, PEAKED):
        kept = (tl.where(live, scale - margin, -INF), none, none + 1.0, none, none, none.to(tl.int32))
    else:
        kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
        kept = (kept[0], kept[1], none + 1.0, none, kept[4], kept[5])
    peak, reach = kept[0], kept[1]
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    tilt = tl.zeros((BLOCK_M, BLOCK_DV if TILT else 1), tl.float32)
    mass, slopes, best, step = none, none, none, none
    support = none.to(tl.int32)
    turn, going = 0, tl.max(live.to(tl.int32), 0)
    while (going > 0) & (turn < MOST_TURNS):
        row, _ = make_row(
            (peak, reach, none + 1.0, none, kept[4], kept[5]), b_at, scale, bends, order, margin, False, RULE, R, PEAKED
        )
        flat = turn_row(row)
        zero = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
        leaning = tl.zeros((BLOCK_M, BLOCK_DV if TILT else 1), tl.float32)
        sums = (zero, leaning, none, none, none, none.to(tl.int32), none - INF)
        sums = gather(
            sums, b_q, p_k, p_v, k_n, v_n, flat, sight, lists,
            RULE, R, BENDS, EXACT, READOUT, GRAD, TILT, SOFT, LISTED, TRACK, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if not hides(BENDS):
            sums = gather(
                sums, b_q, p_k, p_v, k_n, v_n, flat, sight, lists,
                RULE, R, BENDS, EXACT, READOUT, GRAD, TILT, SOFT, LISTED, TRACK, True,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        acc, tilt, mass, slopes, best, support, running = sums
        going = going * 0
        if SOFT:
            peak = running
        if SOLVES:
            solid = live & (slopes > 0.0)
            step = tl.where(solid, newton_step(tl.where(solid, mass, 1.0), tl.where(solid, slopes, 1.0), reach, order, R), 0.0)
            off = tl.abs(step) > tolerate(order, TOLERANCE, R) * reach
            going = tl.max(off.to(tl.int32), 0)
            reach = tl.where(off, shorten(reach, step), reach)
        turn += 1
    if SOLVES:
        if is_whole(R):
            lower = R * step
            acc -= lower[:, None] * tilt
            mass -= lower * slopes
        else:  # in units of ρ, which shrinks: what is left of the step does not grow with r
            lower = order * step / reach
            acc += lower[:, None] * (acc - tilt)
            mass += lower * (mass - slopes)
        reach = shorten(reach, step)
    if RULE == FIXED:
        alone = live & (mass == 0.0)
        if tl.max(alone.to(tl.int32), 0) > 0:  # nothing in reach is uniform
            flatter, count = spread(p_v, v_n, b_at, b_lo, b_hi, bends, bounds, BENDS, DV, BLOCK_DV, BLOCK_M, BLOCK_N)
            acc = tl.where(alone[:, None], flatter, acc)
            mass = tl.where(alone, -count, mass)
            support = tl.where(alone, count.to(tl.int32), support)
        if is_direct(RULE, R, PEAKED):
            reach = none
    if SOFT:
        reach = none + INF
    mass = tl.where(mass == 0.0, 1.0, mass)  # no key: 0 / 1

    out = tl.where(live[:, None], acc / tl.abs(mass)[:, None], 0.0)
    store_rows(p_o + b * o_b + h * o_h, begin, m_rows, o_m, out, DV, BLOCK_M, BLOCK_DV)
    tl.store(p_kept + PEAK * far + o_rows, peak, mask=m_rows)
    tl.store(p_kept + REACH * far + o_rows, reach, mask=m_rows)
    tl.store(p_kept + MASS * far + o_rows, mass, mask=m_rows)
    tl.store(p_kept + SLOPES * far + o_rows, slopes / tl.maximum(best, 1.0), mask=m_rows)
    if GRAD and R != 0.0:
        p_tilt += b * o_b + h * o_h
        other = p_tilt + far * DV
        if TILT:
            mean = tl.where(live[:, None], tilt / tl.where(slopes == 0.0, 1.0, slopes)[:, None], 0.0)
            store_rows(p_tilt, begin, m_rows, o_m, mean, DV, BLOCK_M, BLOCK_DV)
        centred = mean if SOLVES else out
        store_rows(
            other if TILT else p_tilt, begin, m_rows, o_m, centred - centred.to(b_q.dtype).to(tl.float32), DV, BLOCK_M, BLOCK_DV
        )
    if READOUT:
        tl.store(p_support + o_rows, support, mask=m_rows)


@triton.jit
def gather(
    sums, b_q, p_k, p_v, k_n, v_n, row, sight, lists,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, READOUT: tl.constexpr, GRAD: tl.constexpr,
    TILT: tl.constexpr, SOFT: tl.constexpr, LISTED: tl.constexpr, TRACK: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ K v, Σ slope v, Σ K, Σ slope, the number of best keys and of keys inside, over the masked or the whole tiles.

    With TRACK it also flags the tiles that hold a weight.
    """
    acc, tilt, mass, slopes, best, support, peak = sums
    _, b_lo, b_hi, bounds, whole, counts = sight
    p_list, p_flags, size = lists
    end = count_tiles(whole, counts, LISTED, WHOLE)
    for group in range(0, end, WORD):
        bits = tl.zeros((BLOCK_M,), tl.int32)  # which tiles of the group hold a weight of each row
        for i in range(group, tl.minimum(group + WORD, end)):
            tile = find_tile(i, whole, p_list, size, LISTED, WHOLE)
            o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            m_n = (o_n >= bounds[0]) & (o_n < bounds[1])
            b_k = load_rows(p_k, tile * BLOCK_N, m_n, k_n, D, BLOCK_N, BLOCK_D, WHOLE)
            b_v = load_rows(p_v, tile * BLOCK_N, m_n, v_n, DV, BLOCK_N, BLOCK_DV, WHOLE)
            raw = dot(b_q, tl.trans(b_k))
            if SOFT:
                s = bend(raw * row[1], o_n[None, :], row[0], row[2], BENDS)
                if not WHOLE:
                    seen = sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS)
                    s = tl.where(seen, s, -INF)
                top = tl.maximum(peak, tl.reduce(s, 1, larger), propagate_nan=ALL)
                ground = grounded(top)
                fade = tl.exp2((peak - ground) * LOG2E)
                k = tl.exp2((s - ground[:, None]) * LOG2E)
                mass = mass * fade
                acc = acc * fade[:, None]
                peak = top
            else:
                s, k, steep = weigh(raw, o_n[None, :], row, RULE, R, BENDS, EXACT)
                if not WHOLE:
                    seen = sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS)
                    k, steep = tl.where(seen, k, 0.0), tl.where(seen, steep, 0.0)
                if RULE == ANCHORED and GRAD and TILT:
                    equal = s == row[3]
                    best += tl.sum((equal if WHOLE else equal & seen).to(tl.float32), 1)
            if not WHOLE:
                b_v = hush(b_v, seen, 0, BENDS)
            if RULE == FIXED:
                k = rounded(k, b_v.dtype)
            more = tl.sum(k, 1)
            mass += more
            acc = add_dot(acc, k.to(b_v.dtype), b_v)
            if TILT:
                slopes += tl.sum(steep, 1)
                tilt = add_dot(tilt, steep.to(b_v.dtype), b_v)
            if READOUT:
                support += tl.sum((k > 0.0).to(tl.int32), 1)
            if TRACK:
                bits = bits | (((more == 0.0) == 0).to(tl.int32) << (i - group))
        if TRACK:
            o = group + tl.arange(0, WORD)
            tiles = find_tile(tl.minimum(o, end - 1), whole, p_list, size, LISTED, WHOLE)
            flag = (tl.reduce(bits, 0, either) >> tl.arange(0, WORD)) & 1
            tl.store(p_flags + tiles, flag.to(tl.int8), mask=o < end)
    return acc, tilt, mass, slopes, best, support, peak


@triton.jit
def rounded(k, dtype: tl.constexpr):
    """The weights as the product with the values will see them: where Z is tiny, o must be a mean under just these."""
    if dtype == tl.bfloat16:
        return ((k.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    else:
        return k.to(dtype).to(tl.float32)


@triton.jit
def spread(
    p_v, v_n, b_at, b_lo, b_hi, bends, bounds, BENDS: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ v over the keys that each row sees, and their number."""
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    count = tl.zeros((BLOCK_M,), tl.int32)
    for tile in range(bounds[0] // BLOCK_N, tl.cdiv(bounds[1], BLOCK_N)):
        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        b_v = load_rows(p_v, tile * BLOCK_N, (o_n >= bounds[0]) & (o_n < bounds[1]), v_n, DV, BLOCK_N, BLOCK_DV, False)
        s = bend(tl.zeros((BLOCK_M, BLOCK_N), tl.float32), o_n[None, :], b_at[:, None], bends, BENDS)
        seen = sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS)
        acc = add_dot(acc, seen.to(b_v.dtype), hush(b_v, seen, 0, BENDS))
        count += tl.sum(seen.to(tl.int32), 1)
    return acc, (count if hides(BENDS) else b_hi - b_lo).to(tl.float32)


# -- backward ------------------------------------------------------------------------------------


@triton.jit
def pull(s, o_n, row, steep, dw, gain, offset, share, RULE: tl.constexpr, R: tl.constexpr):
    """ds = g · slope ⊙ (dw − c), with what θ receives handed to the key(s) that set it. `offset` is −g c."""
    ds = steep * tl.fma(dw, gain, offset)
    if R != INF:
        if RULE == ANCHORED:
            ds += tl.where(s == row[3], share, 0.0)
        elif RULE == NEAREST:
            ds += tl.where(o_n == row[6], share, 0.0)
    return ds


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    p_do, p_q, p_k, p_v, p_o, p_tilt, p_dq, p_kept, p_pulled, p_dscale, p_dorder, p_list, p_count,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m, dq_b, dq_h, dq_m, scale_h, at_b, lo_b, hi_b,
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    LISTED: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries, its part of dscale and of dr, and for `backward_keys` the centre and share of each row."""
    blocks = tl.cdiv(Q, BLOCK_M)
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M
    head = tl.program_id(0) // blocks
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, begin, Q, BLOCK_M)
    bounds = span(b_lo, b_hi, K, BENDS)
    live = b_lo < b_hi
    b_q = load_rows(p_q + b * q_b + h * q_h, begin, live, q_m, D, BLOCK_M, BLOCK_D, False)
    b_do = load_rows(p_do + b * do_b + h * do_h, begin, live, do_m, DV, BLOCK_M, BLOCK_DV, False)
    scale = tl.load(p_scale + h * scale_h)
    order = load_order(p_orders, h) if R == LEARNED else R
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    bends = bends_of(h, (b, begin + tl.arange(0, BLOCK_M), b_lo, b_hi), p_slopes, p_bias, p_allowed, steps, BENDS)
    p_k += b * k_b + h // GROUP * k_h
    p_v += b * v_b + h // GROUP * v_h
    m_rows = begin + tl.arange(0, BLOCK_M) < Q
    o_rows = tl.cast(head, tl.int64) * Q + begin + tl.arange(0, BLOCK_M)
    far = tl.cast(rows, tl.int64)
    kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
    row, gain = make_row(kept, b_at, scale, bends, order, margin, True, RULE, R, PEAKED)

    TILTED: tl.constexpr = R != INF and RULE != FIXED
    o_o = b * o_b + h * o_h
    p_rest = p_tilt + o_o + (far * DV if TILTED else 0)
    rest = tl.sum(b_do.to(tl.float32) * load_rows(p_rest, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32), 1)
    if TILTED:
        b_tilt = load_rows(p_tilt + o_o, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False)
        lean = tl.sum(b_do.to(tl.float32) * b_tilt.to(tl.float32), 1)
    share = tl.zeros_like(rest)
    if TILTED and RULE == NORMALISING:
        centre = lean + rest
    else:
        b_o = load_rows(p_o + o_o, begin, live, o_m, DV, BLOCK_M, BLOCK_DV, False)
        centre = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1) + rest
        if TILTED:
            known = kept[1] > 0.0
            share = tl.where(known, -R / tl.where(known, kept[1], 1.0) * kept[3] / kept[2] * (lean - centre), 0.0)
    o_pulled = (tl.cast(head, tl.int64) * blocks + begin // BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
    padded = tl.cast(tl.num_programs(0), tl.int64) * BLOCK_M
    if is_plain(RULE, R, BENDS, EXACT):  # all that `backward_keys` needs, for every row of the block
        tl.store(p_pulled + o_pulled, row[9])
        tl.store(p_pulled + padded + o_pulled, row[10])
        tl.store(p_pulled + 2 * padded + o_pulled, gain * scale)
        tl.store(p_pulled + 3 * padded + o_pulled, -gain * scale * centre)
    else:
        tl.store(p_pulled + o_pulled, centre)
        tl.store(p_pulled + padded + o_pulled, share * scale)
        if has_bias(BENDS):
            tl.store(p_pulled + 2 * padded + o_pulled, share)

    block = tl.cast(head, tl.int64) * blocks + begin // BLOCK_M
    counts = (tl.load(p_count + 2 * block), tl.load(p_count + 2 * block + 1)) if LISTED else (0, 0)
    sight = (b_at, b_lo, b_hi, bounds, plan(bounds, BLOCK_N), counts)
    pulls = (gain[:, None], (-gain * centre)[:, None], (centre if R == LEARNED else share)[:, None])
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    dself = tl.zeros((BLOCK_M,), tl.float32)
    flat = turn_row(row)
    acc, dself = pull_keys(
        acc, dself, b_q, b_do, p_k, p_v, k_n, v_n, flat, pulls, sight, p_list + block * tiles, tiles,
        RULE, R, BENDS, EXACT, LISTED, False, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if not hides(BENDS):
        acc, dself = pull_keys(
            acc, dself, b_q, b_do, p_k, p_v, k_n, v_n, flat, pulls, sight, p_list + block * tiles, tiles,
            RULE, R, BENDS, EXACT, LISTED, True, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc = tl.where(live[:, None], acc, 0.0)
    store_rows(p_dq + b * dq_b + h * dq_h, begin, m_rows, dq_m, acc * scale, D, BLOCK_M, BLOCK_D)
    if hides(BENDS):
        b_q = tl.where((kept[0] != -INF)[:, None], b_q, 0.0)
    dscale = tl.sum(acc * b_q.to(tl.float32), 1)
    if R == LEARNED:
        tl.store(p_dorder + tl.program_id(0), tl.sum(dself, 0))
    else:
        dscale += dself
    tl.store(p_dscale + tl.program_id(0), tl.sum(dscale, 0))


@triton.jit
def pull_keys(
    acc, dself, b_q, b_do, p_k, p_v, k_n, v_n, row, pulls, sight, p_list, tiles, RULE: tl.constexpr, R: tl.constexpr,
    BENDS: tl.constexpr, EXACT: tl.constexpr, LISTED: tl.constexpr, WHOLE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ ds k over the masked or the whole tiles, and what a fixed θ or a learned r receives."""
    _, b_lo, b_hi, bounds, whole, counts = sight
    for i in range(0, count_tiles(whole, counts, LISTED, WHOLE)):
        tile = find_tile(i, whole, p_list, tiles, LISTED, WHOLE)
        o_n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        m_n = (o_n >= bounds[0]) & (o_n < bounds[1])
        b_k = load_rows(p_k, tile * BLOCK_N, m_n, k_n, D, BLOCK_N, BLOCK_D, WHOLE)
        b_v = load_rows(p_v, tile * BLOCK_N, m_n, v_n, DV, BLOCK_N, BLOCK_DV, WHOLE)
        raw = dot(b_q, tl.trans(b_k))
        dw = dot(b_do, tl.trans(b_v))
        s, k, steep = weigh(raw, o_n[None, :], row, RULE, R, BENDS, EXACT)
        ds = pull(s, o_n[None, :], row, steep, dw, pulls[0], pulls[1], pulls[2], RULE, R)
        if not WHOLE:
            seen = sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS)
            ds = tl.where(seen, ds, 0.0)
            b_k = hush(b_k, seen, 0, BENDS)
        if RULE == FIXED:
            dself -= tl.sum(ds, 1)
        if R == LEARNED:
            dorder = order_slope(k, row[11]) * (dw - pulls[2])
            dself += tl.sum(dorder if WHOLE else tl.where(seen, dorder, 0.0), 1)
        acc = add_dot(acc, ds.to(b_k.dtype), b_k)
    return acc, dself


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
    p_do, p_q, p_k, p_v, p_dk, p_dv, p_kept, p_pulled, p_list, p_count,
    p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    scale_h, at_b, lo_b, hi_b, bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    H, Q, K, rows, tiles, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, from the queries of its group of heads in its list. A step has no slope, and no dk.

    A tile of the list has STEPS · M queries.
    """
    blocks = tl.cdiv(K, BLOCK_N)
    begin = tl.program_id(0) % blocks * BLOCK_N  # the keys that most queries see first
    head = tl.program_id(0) // blocks
    b, key_head = tl.cast(head // (H // GROUP), tl.int64), tl.cast(head % (H // GROUP), tl.int64)
    o_n = begin + tl.arange(0, BLOCK_N)
    b_k = load_rows(p_k + b * k_b + key_head * k_h, begin, o_n < K, k_n, D, BLOCK_N, BLOCK_D, False)
    b_v = load_rows(p_v + b * v_b + key_head * v_h, begin, o_n < K, v_n, DV, BLOCK_N, BLOCK_DV, False)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), tl.float32)
    sight = (p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b)
    steps = (bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n)
    for member in range(GROUP):
        h = key_head * GROUP + member
        scale = tl.load(p_scale + h * scale_h)
        order = load_order(p_orders, h) if R == LEARNED else R
        bends = (b, h, p_slopes, p_bias, p_allowed, steps)
        block = (b * H + h) * blocks + begin // BLOCK_N
        padded = tl.cast(tiles, tl.int64) * (STEPS * BLOCK_M)  # rows of a head in p_pulled
        queries = (
            p_q + b * q_b + h * q_h, p_do + b * do_b + h * do_h, q_m, do_m,
            (b * H + h) * Q, (b * H + h) * padded, rows // Q * padded, Q, tl.cast(rows, tl.int64),
        )  # fmt: skip
        dk, dv = pull_queries(
            dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list + block * tiles,
            tl.load(p_count + 2 * block), tiles, scale, bends, order, margin, RULE, R, BENDS, EXACT, PEAKED, False,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, STEPS,
        )  # fmt: skip
        if not hides(BENDS):
            dk, dv = pull_queries(
                dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list + block * tiles,
                tl.load(p_count + 2 * block + 1), tiles, scale, bends, order, margin, RULE, R, BENDS, EXACT, PEAKED, True,
                D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, STEPS,
            )  # fmt: skip
    store_rows(p_dv + b * dv_b + key_head * dv_h, begin, o_n < K, dv_n, dv, DV, BLOCK_N, BLOCK_DV)
    if R != 0.0:
        store_rows(p_dk + b * dk_b + key_head * dk_h, begin, o_n < K, dk_n, dk, D, BLOCK_N, BLOCK_D)


@triton.jit
def pull_queries(
    dk, dv, b_k, b_v, o_n, queries, sight, p_kept, p_pulled, p_list, count, tiles, scale, bends, order, margin,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr, WHOLE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Adds Σ ds q and Σ w do over the masked or the whole tiles of one head."""
    p_q, p_do, q_m, do_m, first_row, first_pulled, padded, Q, far = queries
    for i in range(0, count * STEPS):
        tile = tl.load(p_list + (tiles - 1 - i // STEPS if WHOLE else i // STEPS)).to(tl.int32)
        start = (tile * STEPS + i % STEPS) * BLOCK_M
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
        b_q = load_rows(p_q, start, live, q_m, D, BLOCK_M, BLOCK_D, False)
        b_do = load_rows(p_do, start, live, do_m, DV, BLOCK_M, BLOCK_DV, False)
        row, pulls = load_pulled(
            p_kept, p_pulled + first_pulled + o_m, padded, first_row + o_m, m_rows, far, b_at, scale,
            bends_of(bends[1], (bends[0], o_m, b_lo, b_hi), bends[2], bends[3], bends[4], bends[5], BENDS), order, margin,
            RULE, R, BENDS, EXACT, PEAKED,
        )  # fmt: skip
        raw = dot(b_q, tl.trans(b_k))
        s, w, steep = weigh(raw, o_n[None, :], row, RULE, R, BENDS, EXACT)
        if not WHOLE:
            seen = sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS)
            w = tl.where(seen, w, 0.0)
            b_q, b_do = hush(b_q, seen, 1, BENDS), hush(b_do, seen, 1, BENDS)
        dv = add_dot(dv, tl.trans(w.to(b_do.dtype)), b_do)
        if R != 0.0:
            dw = dot(b_do, tl.trans(b_v))
            ds = pull(s, o_n[None, :], row, steep, dw, pulls[0], pulls[1], pulls[2], RULE, R)
            if not WHOLE:
                ds = tl.where(seen, ds, 0.0)
            dk = add_dot(dk, tl.trans(ds.to(b_q.dtype)), b_q)
    return dk, dv


@triton.jit
def load_pulled(
    p_kept, p_pulled, padded, o_rows, m_rows, far, b_at, scale, bends, order, margin,
    RULE: tl.constexpr, R: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
):  # fmt: skip
    """The rows as `weigh` and `pull` take them; the gain and the share hold the scale already."""
    one, two = tl.load(p_pulled)[:, None], tl.load(p_pulled + padded)[:, None]
    if is_plain(RULE, R, BENDS, EXACT):
        gain, offset = tl.load(p_pulled + 2 * padded)[:, None], tl.load(p_pulled + 3 * padded)[:, None]
        return (one, scale, bends, one, one, one, one, one, one, one, two, order), (gain, offset, one)
    else:
        kept = load_kept(p_kept, o_rows, m_rows, far, RULE)
        row, gain = make_row(kept, b_at, scale, bends, order, margin, True, RULE, R, PEAKED)
        slant = (gain * scale)[:, None]
        return turn_row(row), (slant, -slant * one, two)


@triton.jit(do_not_specialize=LENGTHS)
def backward_bias(
    p_do, p_q, p_k, p_v, p_dbias, p_kept, p_pulled, p_flags, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders,
    do_b, do_h, do_m, q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, dbias_b, dbias_h, dbias_m, dbias_n,
    scale_h, at_b, lo_b, hi_b, bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n,
    B, H, Q, K, rows, tiles, margin,
    RULE: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, BENDS: tl.constexpr, EXACT: tl.constexpr, PEAKED: tl.constexpr,
    TRACK: tl.constexpr, BY_SAMPLE: tl.constexpr, BY_HEAD: tl.constexpr, BY_QUERY: tl.constexpr, BY_KEY: tl.constexpr,
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
            scale = tl.load(p_scale + h * scale_h)
            order = load_order(p_orders, h) if R == LEARNED else R
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
                        s, _, steep = weigh(dot(b_q, tl.trans(b_k)), o_n[None, :], flat, RULE, R, BENDS, EXACT)
                        dw = dot(b_do, tl.trans(b_v))
                        ds = pull(s, o_n[None, :], flat, steep, dw, gain[:, None], offset[:, None], share[:, None], RULE, R)
                        acc += tl.where(sees(s, o_n[None, :], b_lo[:, None], b_hi[:, None], BENDS), ds, 0.0)
    o_m, o_n = block_0 * BLOCK_M + tl.arange(0, BLOCK_M), tile_0 * BLOCK_N + tl.arange(0, BLOCK_N)
    if not BY_QUERY:
        acc = tl.where((o_m == 0)[:, None], tl.sum(acc, 0)[None, :], 0.0)
    if not BY_KEY:
        acc = tl.where((o_n == 0)[None, :], tl.sum(acc, 1)[:, None], 0.0)
    p = p_dbias + tl.cast(b_0, tl.int64) * dbias_b + tl.cast(h_0, tl.int64) * dbias_h
    p = p + tl.cast(o_m, tl.int64)[:, None] * dbias_m + tl.cast(o_n, tl.int64)[None, :] * dbias_n
    tl.store(p, acc, mask=(o_m < (Q if BY_QUERY else 1))[:, None] & (o_n < (K if BY_KEY else 1))[None, :])


# -- lists ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["Q", "K", "lo_b", "hi_b"])
def bound_blocks(p_lo, p_hi, p_bounds, lo_b, hi_b, Q, K, BENDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(B, blocks, 4): the keys that any and that all queries of a block see."""
    blocks = tl.cdiv(Q, BLOCK_M)
    b, block = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks
    _, b_lo, b_hi = load_sight(p_lo, p_lo + b * lo_b, p_hi + b * hi_b, block * BLOCK_M, Q, BLOCK_M)
    first, last, full_first, full_last = span(b_lo, b_hi, K, BENDS)
    p_bounds += 4 * tl.cast(tl.program_id(0), tl.int64)
    tl.store(p_bounds, first)
    tl.store(p_bounds + 1, last)
    tl.store(p_bounds + 2, full_first)
    tl.store(p_bounds + 3, full_last)


@triton.jit(do_not_specialize=["H", "blocks", "tiles", "bounds_b"])
def list_tiles(
    p_bounds, p_flags, p_list, p_count, bounds_b, H, blocks, tiles,
    BY_KEY: tl.constexpr, FLAGGED: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tiles of keys that a block of queries of one head reaches, or BY_KEY the blocks that reach SPAN tiles of keys.

    Masked ones stand in the list from its beginning, whole ones from its end.
    """
    size = blocks if BY_KEY else tiles
    own = tl.cdiv(tiles, SPAN) if BY_KEY else blocks
    head, place = tl.cast(tl.program_id(0) // own, tl.int64), tl.program_id(0) % own
    p_bounds += head // H * bounds_b
    p_flags += head * blocks * tiles
    p_list += tl.cast(tl.program_id(0), tl.int64) * size
    masked, whole = 0, 0
    for start in range(0, size, CHUNK):
        o = start + tl.arange(0, CHUNK)
        m = o < size
        block, begin = (o, place * SPAN * BLOCK_N) if BY_KEY else (place + o * 0, o * BLOCK_N)
        end = begin + (SPAN * BLOCK_N if BY_KEY else BLOCK_N)
        first, last = tl.load(p_bounds + 4 * block, mask=m, other=0), tl.load(p_bounds + 4 * block + 1, mask=m, other=0)
        seen = m & (first < end) & (last > begin)
        if FLAGGED:
            hit = m & (o < 0)
            for part in tl.static_range(SPAN if BY_KEY else 1):
                column = place * SPAN + part + o * 0 if BY_KEY else o
                reached = m & (first < (column + 1) * BLOCK_N) & (last > column * BLOCK_N)  # elsewhere nothing was written
                hit = hit | (tl.load(p_flags + block * tiles + column, mask=reached, other=0) != 0)
            seen = seen & hit
        full_first, full_last = (
            tl.load(p_bounds + 4 * block + 2, mask=m, other=0),
            tl.load(p_bounds + 4 * block + 3, mask=m, other=0),
        )
        full = (seen & (full_first <= begin) & (full_last >= end)).to(tl.int32)
        rest = seen.to(tl.int32) - full
        tl.store(p_list + masked + tl.cumsum(rest, 0) - 1, o.to(tl.int16), mask=rest > 0)
        tl.store(p_list + size - whole - tl.cumsum(full, 0), o.to(tl.int16), mask=full > 0)
        masked += tl.sum(rest, 0)
        whole += tl.sum(full, 0)
    tl.store(p_count + 2 * tl.program_id(0), masked)
    tl.store(p_count + 2 * tl.program_id(0) + 1, whole)
