"""What every kernel starts from: which rows a program has, which keys they see, and tiles of their scores.

The scores are cut into tiles of M queries × N keys. A tile is *whole* where every query sees every key: no mask is
taken there. A call with a tensor for a mask has no such tiles.
Names: b_ a block of numbers, p_ a pointer, o_ offsets, m_ a mask. D head dim, T tiles.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused import launch
from compactattn.fused.profiles import ALL, INF, LARGEST, LEARNED, SMALLEST, load_order


@triton.constexpr_function
def has_slopes(bends):
    """What bends the scores is in the bits of a number."""
    return bends & launch.ALIBI != 0


@triton.constexpr_function
def has_bias(bends):
    return bends & launch.BIASED != 0


@triton.constexpr_function
def has_allowed(bends):
    return bends & launch.ALLOWED != 0


@triton.constexpr_function
def hides(bends):
    """Whether a tensor may hide single keys."""
    return bends & (launch.BIASED | launch.ALLOWED) != 0


@triton.jit
def load_rows(p, start, m_rows, stride, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr):
    """(BLOCK, BLOCK_D) rows start … of a matrix, with zeros beyond D and, unless WHOLE, where the mask is off."""
    o_rows, o_d = start + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    p = p + o_rows.to(tl.int64)[:, None] * stride + o_d[None, :]
    if WHOLE:
        if D == BLOCK_D:
            return tl.load(p)
        else:
            return tl.load(p, mask=(o_d < D)[None, :], other=0.0)
    else:
        return tl.load(p, mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(p, start, m_rows, stride, b, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes (BLOCK, BLOCK_D) rows start … of a matrix, in the dtype of that."""
    o_rows, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    p = p + tl.cast(start, tl.int64) * stride + o_rows[:, None] * stride + o_d[None, :]
    tl.store(p, b.to(p.dtype.element_ty), mask=m_rows[:, None] & (o_d < D)[None, :])


@triton.jit
def load_sight(p_at, p_lo, p_hi, start, Q, BLOCK: tl.constexpr):
    """(M,) where each query stands and the keys lo ≤ j < hi it sees; rows beyond Q see none."""
    o_m = start + tl.arange(0, BLOCK)
    b_at = tl.load(p_at + o_m, mask=o_m < Q, other=0).to(tl.int32)
    b_lo = tl.load(p_lo + o_m, mask=o_m < Q, other=0).to(tl.int32)
    b_hi = tl.load(p_hi + o_m, mask=o_m < Q, other=0).to(tl.int32)
    return b_at, b_lo, b_hi


@triton.jit
def span(b_lo, b_hi, K, BENDS: tl.constexpr):
    """The keys first … last − 1 that any of these rows sees, and those that all of them see; rows that see none aside."""
    live = b_lo < b_hi
    first, last = tl.min(tl.where(live, b_lo, K), 0), tl.max(tl.where(live, b_hi, 0), 0)
    if hides(BENDS):
        return first, last, K, 0
    return first, last, tl.max(tl.where(live, b_lo, 0), 0), tl.min(tl.where(live, b_hi, K), 0)


@triton.jit
def plan(bounds, BLOCK_N: tl.constexpr):
    """Tiles of a block of queries: begin, head, count of masked ones, and the first and last + 1 of the whole ones.

    Masked tile i is begin + i for i < head, and else whole_last + i − head.
    """
    first, last, full_first, full_last = bounds
    begin, end = first // BLOCK_N, tl.cdiv(last, BLOCK_N)
    whole_first = tl.minimum(tl.maximum(tl.cdiv(full_first, BLOCK_N), begin), tl.maximum(end, begin))
    whole_last = tl.minimum(tl.maximum(full_last // BLOCK_N, whole_first), tl.maximum(end, begin))
    head = whole_first - begin
    masked = tl.maximum(head + end - whole_last, 0)
    return begin, head, masked, whole_first, whole_last


@triton.jit
def count_tiles(whole, counts, LISTED: tl.constexpr, WHOLE: tl.constexpr):
    """How many masked or whole tiles to visit: all that `plan` has, or those of a list."""
    if LISTED:
        return counts[1] if WHOLE else counts[0]
    else:
        return whole[4] - whole[3] if WHOLE else whole[2]


@triton.jit
def find_tile(i, whole, p_list, size, LISTED: tl.constexpr, WHOLE: tl.constexpr):
    """The i-th of them; the whole ones of a list stand at its end."""
    if LISTED:
        return tl.load(p_list + (size - 1 - i if WHOLE else i)).to(tl.int32)
    else:
        begin, head, _, _, whole_last = whole
        return whole_last - 1 - i if WHOLE else tl.where(i < head, begin + i, whole_last + i - head)


@triton.jit
def dot(a, b):
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def add_dot(acc, a, b):
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def scores(a, b, o_n, lo, hi, WHOLE: tl.constexpr):
    """q·k of a tile, −∞ where a query does not see a key: the product starts from that, so that no mask outlives it."""
    if WHOLE:
        return dot(a, b)
    else:
        return add_dot(tl.where(legal(o_n, lo, hi), 0.0, -INF), a, b)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Numbers of a tile as a product in that dtype will see them; what is not a number may become one."""
    if dtype == tl.bfloat16:  # the processor's own way there and back takes sixteen times as long
        return ((x.to(tl.int32, bitcast=True) + 0x8000) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def load_scale(p):
    """A scale is positive; that times a score of −∞ must be −∞."""
    return tl.maximum(tl.load(p), SMALLEST, propagate_nan=ALL)


@triton.jit
def bend(s, o_n, at, bends, BENDS: tl.constexpr):
    """Scores with the bias and −slope · |distance| added, −inf where a tensor hides a key, whatever that holds.

    Here and below keys lie along one axis of a tile, rows along the other.
    """
    slope, p_bias, bias_n, p_allowed, allowed_n, lo, hi = bends
    if has_bias(BENDS):
        bias = tl.load(p_bias + tl.cast(o_n, tl.int64) * bias_n, mask=legal(o_n, lo, hi), other=-INF).to(tl.float32)
        s = tl.where(bias == -INF, -INF, s + bias)
    if has_slopes(BENDS):
        s = s - slope * tl.abs(at - o_n).to(tl.float32)
    if has_allowed(BENDS):
        s = tl.where(tl.load(p_allowed + tl.cast(o_n, tl.int64) * allowed_n, mask=legal(o_n, lo, hi), other=0) != 0, s, -INF)
    return s


@triton.jit
def bends_of(h, rows, p_slopes, p_bias, p_allowed, steps, BENDS: tl.constexpr):
    """What `bend` needs of a block of rows: the slope of their head, and their part of the tensors."""
    b, o_m, b_lo, b_hi = rows
    bias_b, bias_h, bias_m, bias_n, allowed_b, allowed_h, allowed_m, allowed_n = steps
    slope = tl.load(p_slopes + h).to(tl.float32) if has_slopes(BENDS) else 0.0
    o_m = tl.cast(o_m, tl.int64)[:, None]
    if has_bias(BENDS):
        p_bias = p_bias + b * bias_b + h * bias_h + o_m * bias_m
    if has_allowed(BENDS):
        p_allowed = p_allowed + b * allowed_b + h * allowed_h + o_m * allowed_m
    return slope, p_bias, bias_n, p_allowed, allowed_n, b_lo[:, None], b_hi[:, None]


@triton.jit
def legal(o_n, lo, hi):
    """Whether a key is one of those that a query may see."""
    return (o_n >= lo) & (o_n < hi)


@triton.jit
def quiet(ds, s, BENDS: tl.constexpr):
    """Numbers of a tile, 0 where a tensor hides a key, which may hold anything."""
    return tl.where(s == -INF, 0.0, ds) if hides(BENDS) else ds


@triton.jit
def hush(b, s, AXIS: tl.constexpr, BENDS: tl.constexpr):
    """Rows or keys of a tile, with zeros for those that a tensor hides from all the others, whatever they hold."""
    if hides(BENDS):
        seen = (s == -INF) == 0
        return tl.where((tl.max(seen.to(tl.int32), AXIS) > 0)[:, None], b, 0.0).to(b.dtype)
    else:
        return b


@triton.jit
def shift(s, peak):
    """x = s − max s; 0 at the best key also if that is infinite."""
    return tl.minimum(s, LARGEST, propagate_nan=ALL) - tl.minimum(peak, LARGEST, propagate_nan=ALL)


@triton.jit
def grounded(peak):
    """max s, and 0 where no key is legal, so that x is −inf there and not NaN."""
    return tl.where(peak == -INF, 0.0, peak)


@triton.jit
def open_block(
    p_q, p_scale, p_slopes, p_at, p_lo, p_hi, p_bias, p_allowed, p_orders, q_b, q_h, q_m, scale_h, at_b, lo_b, hi_b, steps,
    H, Q, K, R: tl.constexpr, BENDS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """What a program of one block of queries starts from: its place, what its rows see, its queries, and its head's numbers."""
    blocks = tl.cdiv(Q, BLOCK_M)
    begin = (blocks - 1 - tl.program_id(0) % blocks) * BLOCK_M  # the longest causal rows first
    head = tl.program_id(0) // blocks
    b, h = tl.cast(head // H, tl.int64), tl.cast(head % H, tl.int64)
    b_at, b_lo, b_hi = load_sight(p_at + b * at_b, p_lo + b * lo_b, p_hi + b * hi_b, begin, Q, BLOCK_M)
    live = b_lo < b_hi
    b_q = load_rows(p_q + b * q_b + h * q_h, begin, live, q_m, D, BLOCK_M, BLOCK_D, False)
    scale = load_scale(p_scale + h * scale_h)
    order = load_order(p_orders, h) if R == LEARNED else R
    bends = bends_of(h, (b, begin + tl.arange(0, BLOCK_M), b_lo, b_hi), p_slopes, p_bias, p_allowed, steps, BENDS)
    view = (b_at, b_lo, b_hi, live, span(b_lo, b_hi, K, BENDS))
    return (head, b, h, begin), view, b_q, (scale, order, bends)
