"""Which tiles a program visits: lists built on the device, from what each block of queries sees and the flags of its tiles."""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from compactattn.fused.tiles import load_sight, span

COUNTS = tl.constexpr(4)  # numbers beside a list


@triton.jit(do_not_specialize=["Q", "K", "lo_b", "hi_b"])
def bound_blocks(p_lo, p_hi, p_bounds, lo_b, hi_b, Q, K, BENDS: tl.constexpr, BLOCK_M: tl.constexpr):
    """(B, blocks, 4): the keys that any and that all queries of a block see."""
    blocks = tl.cdiv(Q, BLOCK_M)
    b, block = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks
    _, b_lo, b_hi = load_sight(p_lo, p_lo + b * lo_b, p_hi + b * hi_b, block * BLOCK_M, Q, BLOCK_M)
    first, last, full_first, full_last = span(b_lo, b_hi, K, BENDS)
    o_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    if tl.max(((b_lo >= b_hi) & (o_m < Q)).to(tl.int32), 0) > 0:  # what a row that sees nothing holds must meet a mask
        full_first, full_last = K, 0
    p_bounds += 4 * tl.cast(tl.program_id(0), tl.int64)
    tl.store(p_bounds, first)
    tl.store(p_bounds + 1, last)
    tl.store(p_bounds + 2, full_first)
    tl.store(p_bounds + 3, full_last)


@triton.jit(do_not_specialize=["H", "blocks", "tiles", "bounds_b"])
def list_tiles(
    p_bounds, p_flags, p_list, p_count, bounds_b, H, blocks, tiles,
    BY_KEY: tl.constexpr, FLAGGED: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The tiles of keys that a block of queries of one head reaches; BY_KEY the blocks of queries that reach a tile.

    Masked ones stand in the list from its beginning, whole ones from its end. The counts are of these two, and then come the
    first key that any of the blocks sees and the last + 1, flagged or not: they are the same for every head.
    """
    size = blocks if BY_KEY else tiles
    own = tiles if BY_KEY else blocks
    head, place = tl.cast(tl.program_id(0) // own, tl.int64), tl.program_id(0) % own
    p_bounds += head // H * bounds_b
    p_flags += head * blocks * tiles
    p_list += tl.cast(tl.program_id(0), tl.int64) * size
    masked, whole, seen_first, seen_last = 0, 0, 2**30, 0
    for start in range(0, size, CHUNK):
        o = start + tl.arange(0, CHUNK)
        m = o < size
        block, tile = (o, place + o * 0) if BY_KEY else (place + o * 0, o)
        begin, end = tile * BLOCK_N, (tile + 1) * BLOCK_N
        first, last = tl.load(p_bounds + 4 * block, mask=m, other=0), tl.load(p_bounds + 4 * block + 1, mask=m, other=0)
        seen = m & (first < end) & (last > begin)
        seen_first = tl.minimum(seen_first, tl.min(tl.where(seen, first, 2**30), 0))
        seen_last = tl.maximum(seen_last, tl.max(tl.where(seen, last, 0), 0))
        if FLAGGED:  # elsewhere nothing was written
            seen = seen & (tl.load(p_flags + block * tiles + tile, mask=seen, other=0) != 0)
        full_first, full_last = (
            tl.load(p_bounds + 4 * block + 2, mask=m, other=0),
            tl.load(p_bounds + 4 * block + 3, mask=m, other=0),
        )
        full = (seen & (full_first <= begin) & (full_last >= end)).to(tl.int32)
        rest = seen.to(tl.int32) - full
        tl.store(p_list + masked + tl.cumsum(rest, 0) - 1, o.to(p_list.dtype.element_ty), mask=rest > 0)
        tl.store(p_list + size - whole - tl.cumsum(full, 0), o.to(p_list.dtype.element_ty), mask=full > 0)
        masked += tl.sum(rest, 0)
        whole += tl.sum(full, 0)
    p_count += COUNTS * tl.cast(tl.program_id(0), tl.int64)
    tl.store(p_count, masked)
    tl.store(p_count + 1, whole)
    tl.store(p_count + 2, seen_first)
    tl.store(p_count + 3, seen_last)
