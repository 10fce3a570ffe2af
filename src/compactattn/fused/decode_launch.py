"""Where PyTorch meets the decode kernels: how the pages are split, scratch, and the order of the launches.

Nothing here waits for the GPU, and no size hangs on the values of a tensor: a call can be recorded as a CUDA graph.
Shapes: B batch, H heads (H' of keys), Q queries, K keys, P pages, D head dim.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compactattn.fused.cut import is_hopper
from compactattn.fused.launch import CODES
from compactattn.masks import View

PAGE = 64  # keys of a page
MOST_ROWS = 64  # query heads of a group × queries: one tile holds them
MOST_FP32_ROWS = 16  # products in fp32 go without tensor cores, and their operands fill shared memory
WAVES = 16  # programs for each multiprocessor while K is read
PAGES_AT_ONCE = 32
MOST_SPLITS = 64
SCORES_AT_ONCE = 2048


class Bounds(NamedTuple):
    """Elementwise bounds on the keys of each page, and how many keys of a sample have been added to them."""

    low: Tensor  # (B, H', P, D)
    high: Tensor  # (B, H', P, D)
    filled: Tensor  # (B,)


def decode(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: tuple[float, str, float], bounds: Bounds | None
) -> tuple[Tensor, Tensor]:
    """(B, H, Q, Dv) the estimate, and (B, H') the number of pages of K that were not read."""
    from compactattn.fused import decode as kernels
    from compactattn.fused import decode_threshold

    batch, heads, queries, dim = q.shape
    key_heads, keys, value_dim = v.shape[1:]
    out = q.new_empty((batch, heads, queries, value_dim))
    if q.numel() == 0 or k.numel() == 0:
        return out.zero_(), q.new_zeros((batch, key_heads), dtype=torch.int32)
    q = q.contiguous()
    k, v = (x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in (k, v))
    r, rule, value = code
    soft = rule == "normalising" and r == torch.inf
    direct, select = soft or rule == "fixed", bounds is not None and not soft  # a Gaussian reads everything
    pages, rows = -(-keys // PAGE), batch * heads * queries
    # the sums of V are split by the length of the cache alone, so that a result does not hang on the batch around it
    splits = max(1, min(MOST_SPLITS, pages // 16))
    readers = splits if direct else max(1, min(pages, -(-WAVES * _multiprocessors(q.device) // (batch * key_heads))))
    scored = not direct or select  # a direct estimate keeps no scores but those of its most promising pages
    s, best, kept = (
        q.new_empty(shape, dtype=torch.float32) for shape in ((rows * scored, pages * PAGE), (rows * scored, pages), (4, rows))
    )
    found = q.new_empty((rows * scored, pages), dtype=torch.int32)
    wanted = q.new_empty((batch * key_heads * select, readers, -(-pages // readers)), dtype=torch.int32)
    part, mass, peak = (q.new_empty(shape, dtype=torch.float32) for shape in ((rows, splits, value_dim), *[(rows, splits)] * 2))
    sight = view.at, view.lo, view.hi, scale, scale if view.slopes is None else view.slopes.contiguous()
    steps = *(x.stride(0) if len(x) > 1 else 0 for x in sight[:3]), scale.stride(0)
    sizes = key_heads, queries, keys, pages
    group: dict[str, Any] = {"GROUP": heads // key_heads}
    tile = {**group, "BLOCK_M": _power(heads // key_heads * queries), "BLOCK_P": PAGES_AT_ONCE}
    scores: dict[str, Any] = {**tile, "ALIBI": view.slopes is not None, "D": dim, "BLOCK_D": _power(dim)}
    values: dict[str, Any] = {"DV": value_dim, "BLOCK_DV": _power(value_dim)}
    options = {"num_warps": 4, "num_stages": 4 if dim * q.element_size() <= 256 else 2, "enable_fp_fusion": False}
    ahead = select and is_hopper(q.device)  # others lack the shared memory
    choice = {"RULE": CODES[rule], "R": r}
    margin, nearest = (0.0, min(int(value), keys)) if rule == "nearest" else (value, 0)

    def find_threshold() -> None:
        decode_threshold.find_threshold[(rows,)](
            s, best, found, kept, *sight[1:4], *steps[1:], *sizes, rows, margin, nearest,
            **choice, **group, BLOCK=SCORES_AT_ONCE, num_warps=8,
        )  # fmt: skip

    skipped = q.new_zeros((batch, key_heads, readers if select else 1), dtype=torch.int32)
    bound = torch.empty_like(best) if select else best
    with torch.cuda.device(q.device) if q.device.type == "cuda" else nullcontext():
        if select:
            assert bounds is not None
            kernels.bound_pages[(batch * key_heads, splits)](
                q, k, *bounds, s, best, bound, *sight, *steps, *k.stride()[:3], *sizes, splits,
                **scores, **options | {"num_stages": 1},
            )  # fmt: skip
            find_threshold()
        if direct:
            kernels.estimate_directly[(batch * key_heads, splits)](
                q, k, v, best, bound, wanted, kept, skipped, part, mass, peak, *sight, *steps,
                *k.stride()[:3], *v.stride()[:3], *sizes, splits, rows, margin,
                SELECT=select, **choice, **scores, **values,
                **options | _cut(scores["BLOCK_D"], values["BLOCK_DV"], tile["BLOCK_M"], q.dtype),
            )  # fmt: skip
        else:
            kernels.score_pages[(batch * key_heads, readers)](
                q, k, s, best, bound, wanted, kept, skipped, *sight, *steps, *k.stride()[:3], *sizes, readers, rows,
                SELECT=select, RULE=CODES[rule] if select else 0, **scores,
                **options | {"num_stages": options["num_stages"] * (1 + ahead) - ahead},  # a list has to be read ahead, too
            )  # fmt: skip
            find_threshold()
            kernels.estimate[(batch * key_heads, splits)](
                s, best, v, kept, part, mass, *sight, *steps, *v.stride()[:3], *sizes, splits, rows,
                **choice, **tile, **values, num_warps=4,
            )  # fmt: skip
        kernels.combine[(rows,)](part, mass, peak, out, splits, DIRECT=direct, **choice, **values, BLOCK=16, num_warps=4)
    return out, skipped.sum(-1, dtype=torch.int32)


def _cut(dim: int, value_dim: int, rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Options of the kernel that reads K and V side by side: no spills where it can, and three programs to a multiprocessor."""
    exact = dtype == torch.float32  # the operands of its products fill registers and shared memory
    room = (dim + value_dim) * (8 if exact else 2)
    if room > 512 or exact:
        return {"num_stages": 3 if room <= 512 else 2 if room <= 1024 and rows <= 32 else 1, "num_warps": 8}
    return {"num_stages": 3, "num_warps": 4} | ({"maxnreg": 168} if rows <= 16 else {})


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power(size: int) -> int:
    """The next power of two that tl.dot can take."""
    return max(16, 1 << (size - 1).bit_length())
