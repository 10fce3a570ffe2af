"""Keys and values of a memory, each in one kernel forward and one backward: the Triton twins of memory/features.py.

A key is read and written once: leaky average, unit norm and the cast happen in between. Sums are kept in fp32.
Shapes: (B, H, T, D) in any order in memory with the head dim contiguous; (H,) one number per head. Gradients of x lie as
(B, T, H, D) in memory, which is how projections hold it.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPSILON = tl.constexpr(1e-12)  # as torch.nn.functional.normalize


# -- kernels -------------------------------------------------------------------------------------


@triton.jit
def tile(o_t, T, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets and mask of the rows o_t, (len(o_t), BLOCK_D)."""
    o_d = tl.arange(0, BLOCK_D)[None, :]
    o_t = o_t[:, None]
    return o_t.to(tl.int64) * stride + o_d, (o_t >= 0) & (o_t < T) & (o_d < D)


@triton.jit
def load(p, o_t, T, stride, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows o_t in fp32, 0 where there are none."""
    o, m = tile(o_t, T, stride, D, BLOCK_D)
    return tl.load(p + o, mask=m, other=0.0).to(tl.float32)


@triton.jit
def pull_unit(b_du, b_u, b_norm):
    """Gradient of x and u·du of each row, for u = x / max(‖x‖, ε)."""
    b_along = tl.sum(b_du * b_u, 1)
    b_inside = tl.where(b_norm >= EPSILON, b_along, 0.0)
    return (b_du - b_inside[:, None] * b_u) / tl.maximum(b_norm, EPSILON)[:, None], b_along


@triton.jit(do_not_specialize=["T"])
def keys_forward(
    p_x, p_leak, p_state, p_keys, p_norms, p_last, sx_b, sx_h, sx_t, so_b, so_h, so_t, H, T,
    STATE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program walks one head of one sample: inside a block a product with the decay, between blocks the last row."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    p_x += batch * sx_b + head * sx_h
    p_keys += batch * so_b + head * so_h
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    leak = tl.load(p_leak + head)
    age = o_t[:, None] - o_t[None, :]
    b_decay = tl.where(age >= 0, tl.exp(-leak * tl.maximum(age, 0)), 0.0)  # (BLOCK_T, BLOCK_T)
    b_fade = tl.exp(-leak * (o_t + 1))[:, None]
    b_state = tl.zeros((BLOCK_D,), tl.float32)
    if STATE:
        b_state = tl.load(p_state + row * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    for start in range(0, T, BLOCK_T):
        b_x = load(p_x, start + o_t, T, sx_t, D, BLOCK_D)
        b_y = tl.dot(b_decay, b_x, input_precision="tf32x3") + b_fade * b_state[None, :]
        b_norm = tl.sqrt(tl.sum(b_y * b_y, 1))
        o, m = tile(start + o_t, T, so_t, D, BLOCK_D)
        tl.store(p_keys + o, b_y / tl.maximum(b_norm, EPSILON)[:, None], mask=m)
        tl.store(p_norms + row * T + start + o_t, b_norm, mask=start + o_t < T)
        b_state = tl.sum(tl.where((o_t == tl.minimum(BLOCK_T, T - start) - 1)[:, None], b_y, 0.0), 0)
    tl.store(p_last + row * D + o_d, b_state, mask=o_d < D)


@triton.jit(do_not_specialize=["T"])
def keys_backward(
    p_dkeys, p_keys, p_norms, p_leak, p_state, p_dlast, p_dx, p_dstate, p_dleak,
    sg_b, sg_h, sg_t, sk_b, sk_h, sk_t, so_b, so_h, so_t, H, T,
    STATE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From the end to the start: dx_t = dy_t + λ dx_{t+1}, and dleak = −Σ_t λ dx_{t+1} · y_t with y = norm · key."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    p_dkeys += batch * sg_b + head * sg_h
    p_keys += batch * sk_b + head * sk_h
    p_dx += batch * so_b + head * so_h
    o_t, o_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    leak = tl.load(p_leak + head)
    age = o_t[None, :] - o_t[:, None]
    b_decay = tl.where(age > 0, tl.exp(-leak * tl.maximum(age, 0)), 0.0)
    b_fade = tl.exp(-leak * (BLOCK_T - o_t))[:, None]
    b_dlast = tl.load(p_dlast + row * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    b_dnext, b_dleak = tl.zeros((BLOCK_D,), tl.float32), tl.zeros((BLOCK_D,), tl.float32)
    blocks = tl.cdiv(T, BLOCK_T)
    for i in range(0, blocks):
        start = (blocks - 1 - i) * BLOCK_T
        b_dkey, b_key = load(p_dkeys, start + o_t, T, sg_t, D, BLOCK_D), load(p_keys, start + o_t, T, sk_t, D, BLOCK_D)
        b_norm = tl.load(p_norms + row * T + start + o_t, mask=start + o_t < T, other=1.0)
        b_dy, _ = pull_unit(b_dkey, b_key, b_norm)
        b_dy += tl.where((start + o_t == T - 1)[:, None], b_dlast[None, :], 0.0)
        b_later = tl.dot(b_decay, b_dy, input_precision="tf32x3") + b_fade * b_dnext[None, :]  # λ dx_{t+1}
        b_dx = b_dy + b_later
        o, m = tile(start + o_t, T, so_t, D, BLOCK_D)
        tl.store(p_dx + o, b_dx, mask=m)
        b_dleak -= tl.sum(b_later * b_key * tl.maximum(b_norm, EPSILON)[:, None], 0)
        b_dnext = tl.sum(tl.where((o_t == 0)[:, None], b_dx, 0.0), 0)
    if STATE:
        b_dstate = tl.exp(-leak) * b_dnext
        tl.store(p_dstate + row * D + o_d, b_dstate, mask=o_d < D)
        b_dleak -= b_dstate * tl.load(p_state + row * D + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    tl.store(p_dleak + row, tl.sum(b_dleak, 0))


@triton.jit
def peek(p_x, o_t, T, stride, mix, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """mix · x_t + (1 − mix) · x_{t+1}, its norm, and x_t − x_{t+1}."""
    b_x, b_ahead = load(p_x, o_t, T, stride, D, BLOCK_D), load(p_x, o_t + 1, T, stride, D, BLOCK_D)
    b_y = mix * b_x + (1 - mix) * b_ahead
    return b_y, tl.sqrt(tl.sum(b_y * b_y, 1)), b_x - b_ahead


@triton.jit
def pull_peek(p_dv, p_x, o_t, T, sg_t, sx_t, mix, gain, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Gradient of the mixed rows o_t, u·dv of each, and x_t − x_{t+1}."""
    b_y, b_norm, b_slope = peek(p_x, o_t, T, sx_t, mix, D, BLOCK_D)
    b_dv = load(p_dv, o_t, T, sg_t, D, BLOCK_D)
    b_dy, b_along = pull_unit(b_dv, b_y / tl.maximum(b_norm, EPSILON)[:, None], b_norm)
    return b_dy * gain, b_along, b_slope


@triton.jit(do_not_specialize=["T"])
def values_forward(
    p_x, p_mix, p_gain, p_values, sx_b, sx_h, sx_t, so_b, so_h, so_t, H, T,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mix, gain = tl.load(p_mix + head), tl.load(p_gain + head)
    b_y, b_norm, _ = peek(p_x + batch * sx_b + head * sx_h, o_t, T, sx_t, mix, D, BLOCK_D)
    o, m = tile(o_t, T, so_t, D, BLOCK_D)
    tl.store(p_values + batch * so_b + head * so_h + o, b_y * (gain / tl.maximum(b_norm, EPSILON))[:, None], mask=m)


@triton.jit(do_not_specialize=["T"])
def values_backward(
    p_dv, p_x, p_mix, p_gain, p_dx, p_dmix, p_dgain, sg_b, sg_h, sg_t, sx_b, sx_h, sx_t, so_b, so_h, so_t, H, T,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Nothing but x is kept: the rows are mixed again, also the one before the block, which peeked into it."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = row // H, row % H
    p_x += batch * sx_b + head * sx_h
    p_dv += batch * sg_b + head * sg_h
    o_t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    mix, gain = tl.load(p_mix + head), tl.load(p_gain + head)
    b_dbefore, _, _ = pull_peek(p_dv, p_x, o_t - 1, T, sg_t, sx_t, mix, gain, D, BLOCK_D)
    b_dy, b_along, b_slope = pull_peek(p_dv, p_x, o_t, T, sg_t, sx_t, mix, gain, D, BLOCK_D)
    o, m = tile(o_t, T, so_t, D, BLOCK_D)
    tl.store(p_dx + batch * so_b + head * so_h + o, mix * b_dy + (1 - mix) * b_dbefore, mask=m)
    part = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(p_dmix + part, tl.sum(tl.sum(b_dy * b_slope, 1), 0))
    tl.store(p_dgain + part, tl.sum(b_along, 0))


# -- launches ------------------------------------------------------------------------------------


def keys(x: Tensor, leak: Tensor, state: Tensor | None, by_time: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Keys (B, H, T, D), the norms (B, H, T) they were divided by, and the average (B, H, D) that they end with.

    The keys lie in memory as their shape says, or `by_time` as (B, T, H, D).
    """
    x, leak, state = _rows(x), _plain(leak), None if state is None else _plain(state)
    batch, heads, time, dim = x.shape
    out = empty(x, by_time)
    norms, last = (x.new_empty(shape, dtype=torch.float32) for shape in ((batch, heads, time), (batch, heads, dim)))
    with _on(x):
        keys_forward[(batch * heads,)](
            x, leak, leak if state is None else state, out, norms, last, *x.stride()[:3], *out.stride()[:3], heads, time,
            STATE=state is not None, **_scan_blocks(time, dim),
        )  # fmt: skip
    return out, norms, last


def keys_gradient(
    dkeys: Tensor, dlast: Tensor, out: Tensor, norms: Tensor, leak: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the leak and of the state; the last is empty without a state."""
    dkeys, dlast, leak, state = _rows(dkeys), _plain(dlast), _plain(leak), None if state is None else _plain(state)
    batch, heads, time, dim = out.shape
    dx, parts = empty(out, by_time=True), norms.new_empty((batch, heads))
    dstate = norms.new_empty((batch, heads, dim) if state is not None else 0)
    with _on(out):
        keys_backward[(batch * heads,)](
            dkeys, out, norms, leak, leak if state is None else state, dlast, dx, dstate, parts,
            *dkeys.stride()[:3], *out.stride()[:3], *dx.stride()[:3], heads, time,
            STATE=state is not None, **_scan_blocks(time, dim),
        )  # fmt: skip
    return dx, parts.sum(0), dstate


def values(x: Tensor, mix: Tensor, gain: Tensor) -> Tensor:
    x, mix, gain = _rows(x), _plain(mix), _plain(gain)
    batch, heads, time, dim = x.shape
    out, blocks = empty(x, by_time=False), _blocks(time, dim)
    with _on(x):
        values_forward[(batch * heads, triton.cdiv(time, blocks["BLOCK_T"]))](
            x, mix, gain, out, *x.stride()[:3], *out.stride()[:3], heads, time, **blocks
        )
    return out


def values_gradient(dv: Tensor, x: Tensor, mix: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, of the mix and of the gain."""
    dv, x, mix, gain = _rows(dv), _rows(x), _plain(mix), _plain(gain)
    batch, heads, time, dim = x.shape
    dx, blocks = empty(x, by_time=True), _blocks(time, dim)
    grid = (batch * heads, triton.cdiv(time, blocks["BLOCK_T"]))
    parts = x.new_empty((2, batch, heads, grid[1]), dtype=torch.float32)
    with _on(x):
        values_backward[grid](
            dv, x, mix, gain, dx, parts[0], parts[1],
            *dv.stride()[:3], *x.stride()[:3], *dx.stride()[:3], heads, time, **blocks,
        )  # fmt: skip
    dmix, dgain = parts.sum((1, 3)).unbind()
    return dx, dmix, dgain.clone()  # an operator may not return two views of one tensor


def empty(like: Tensor, by_time: bool) -> Tensor:
    """(B, H, T, D), which lies so in memory or `by_time` as (B, T, H, D)."""
    batch, heads, time, dim = like.shape
    return like.new_empty((batch, time, heads, dim)).transpose(1, 2) if by_time else like.new_empty(like.shape)


def _blocks(time: int, dim: int) -> dict[str, Any]:
    """Small blocks: they fit every GPU, and three programs of the scan run at once on a multiprocessor."""
    width = max(16, triton.next_power_of_2(dim))
    block = min(32 if width <= 128 else 16, max(16, triton.next_power_of_2(time)))
    return {"D": dim, "BLOCK_T": block, "BLOCK_D": width, "num_warps": 4 if width <= 64 else 8, "num_stages": 2}


def _scan_blocks(time: int, dim: int) -> dict[str, Any]:
    blocks = _blocks(time, dim)
    # 65,536 registers over three programs of 128 threads
    return blocks | {"maxnreg": 168} if blocks["num_warps"] == 4 else blocks


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _plain(x: Tensor) -> Tensor:
    return x.to(torch.float32).contiguous()


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
