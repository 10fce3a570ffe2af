"""What every kernel starts from: which rows a program has, which keys they see, and a tile of their scores.

Names: b_ a block of numbers, p_ a pointer, o_ offsets, m_ a mask. M queries, N keys of a tile; D head dim.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.profiles import INF


@triton.jit
def load_rows(p, start, m_rows, stride, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK, BLOCK_D) rows start … of a matrix, with zeros where the mask is off and beyond D."""
    o_rows, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    p = p + tl.cast(start, tl.int64) * stride
    return tl.load(p + o_rows[:, None] * stride + o_d[None, :], mask=m_rows[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def store_rows(p, start, m_rows, stride, b, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes (BLOCK, BLOCK_D) rows start … of a matrix, in the dtype of that."""
    o_rows, o_d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    p = p + tl.cast(start, tl.int64) * stride
    p = p + o_rows[:, None] * stride + o_d[None, :]
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
def span(b_lo, b_hi, K):
    """The first and last + 1 key that any of these rows sees; an empty span if there is none."""
    live = b_lo < b_hi
    return tl.min(tl.where(live, b_lo, K), 0), tl.max(tl.where(live, b_hi, 0), 0)


@triton.jit
def score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI: tl.constexpr):
    """(M, N) s = scale · q·k − slope · |distance|, with −inf at illegal keys.

    Every kernel takes the product in this orientation and none fuses its multiplications and additions, so that a
    score has the same bits wherever it is computed: the best and the k-th key are found again by equality.
    """
    s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
    if ALIBI:
        s = s - slope * tl.abs(b_at[:, None] - o_n[None, :]).to(tl.float32)
    legal = (o_n[None, :] >= b_lo[:, None]) & (o_n[None, :] < b_hi[:, None])
    return tl.where(legal, s, -INF)


@triton.jit
def load_score(row, sight, start, ALIBI: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """(M, N) scores of the rows against the keys start …; keys that no row sees are not read."""
    b_q, p_k, stride, b_at, scale, slope = row
    b_lo, b_hi, first, last = sight
    o_n = start + tl.arange(0, BLOCK_N)
    b_k = load_rows(p_k, start, (o_n >= first) & (o_n < last), stride, D, BLOCK_N, BLOCK_D)
    return score(b_q, b_k, o_n, b_at, b_lo, b_hi, scale, slope, ALIBI)


@triton.jit
def shift(s, peak):
    """x = s − max s; 0 at the best key also if that is infinite."""
    return tl.where(s == peak[:, None], 0.0, s - peak[:, None])


@triton.jit
def grounded(peak):
    """max s, and 0 where no key is legal, so that x is −inf there and not NaN."""
    return tl.where(peak == -INF, 0.0, peak)
