"""The selective scan of Mamba in one kernel forward and one backward: the Triton twin of mixers/selective_scan.py.

One warp walks time for one sample and a block of channels, with all states of these channels in registers. Forward it stores
the states that enter chunks. Backward it takes the chunks from the last to the first and makes the states of each again, in
registers too: in memory every one would be written and read, which takes longer than to make it. Either way the rows of the
next chunk are on their way meanwhile. Nothing is added atomically: sums over channels and over samples are stored in parts.
Shapes: B batch, T time, E channels, N states; u and Δ (B, T, E), b and c (B, T, N), rates a (N, E), states (B, N, E), in fp32.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def,assignment"
from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4  # positions whose rows, decays and states fit in registers beside the rows that follow; compiled for sm_90, 8 spill
STATES_AT_ONCE = 256  # of a warp: eight in every thread
MOST_CHANNELS = 16  # of a program
LOG2_E, LN_2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


# -- kernels -------------------------------------------------------------------------------------


@triton.jit
def load_rows(p, start, T, o, SIZE, CHUNK: tl.constexpr):
    """The rows of a chunk, as a tuple; 0 after the end, where nothing decays and nothing is added."""
    rows = ()
    for i in tl.static_range(CHUNK):
        rows += (tl.load(p + (start + i) * SIZE + o, mask=(start + i < T) & (o < SIZE), other=0.0),)
    return rows


@triton.jit
def load_inputs(p_u, p_step, p_b, p_c, start, T, o_e, o_n, E, N, CHUNK: tl.constexpr):
    """The rows of u, Δ, b and c."""
    b_u, b_step = load_rows(p_u, start, T, o_e, E, CHUNK), load_rows(p_step, start, T, o_e, E, CHUNK)
    return b_u, b_step, load_rows(p_b, start, T, o_n, N, CHUNK), load_rows(p_c, start, T, o_n, N, CHUNK)


@triton.jit(do_not_specialize=["T"])
def scan_forward(
    p_u, p_step, p_rates, p_b, p_c, p_state, p_y, p_last, p_entering, T, E,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """h_t = exp(Δ_t a) h_{t−1} + b_t u_t and y_t = c_t · h_t."""
    sample = tl.program_id(0).to(tl.int64)
    o_t, o_n, o_e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    o, m = o_n[:, None] * E + o_e[None, :], (o_n < N)[:, None] & (o_e < E)[None, :]
    p_u, p_step, p_y = p_u + sample * T * E, p_step + sample * T * E, p_y + sample * T * E
    p_b, p_c, p_entering = p_b + sample * T * N, p_c + sample * T * N, p_entering + sample * tl.cdiv(T, CHUNK) * N * E
    b_rates = tl.load(p_rates + o, mask=m, other=0.0) * LOG2_E
    b_h = tl.load(p_state + sample * N * E + o, mask=m, other=0.0)
    later = load_inputs(p_u, p_step, p_b, p_c, 0, T, o_e, o_n, E, N, CHUNK)
    for start in range(0, T, CHUNK):
        b_u, b_step, b_b, b_c = later
        later = load_inputs(p_u, p_step, p_b, p_c, start + CHUNK, T, o_e, o_n, E, N, CHUNK)
        tl.store(p_entering + o, b_h, mask=m)
        p_entering += N * E
        b_y = tl.zeros((CHUNK, BLOCK_E), tl.float32)
        for i in tl.static_range(CHUNK):
            b_h = b_h * tl.exp2(b_step[i][None, :] * b_rates) + b_b[i][:, None] * b_u[i][None, :]
            b_y = tl.where((o_t == i)[:, None], tl.sum(b_c[i][:, None] * b_h, 0)[None, :], b_y)
        o_y, m_y = (start + o_t)[:, None] * E + o_e[None, :], (start + o_t < T)[:, None] & (o_e < E)[None, :]
        tl.store(p_y + o_y, b_y, mask=m_y)
    tl.store(p_last + sample * N * E + o, b_h, mask=m)


@triton.jit(do_not_specialize=["T"])
def scan_backward(
    p_dy, p_dlast, p_entering, p_u, p_step, p_rates, p_b, p_c, p_du, p_dstep, p_drates, p_db, p_dc, p_dstate, T, E,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """g_t = c_t dy_t + exp(Δ_{t+1} a) g_{t+1}, from the last position on; parts of da by sample, of db and dc by block."""
    sample = tl.program_id(0).to(tl.int64)
    o_t, o_n, o_e = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    o, m = o_n[:, None] * E + o_e[None, :], (o_n < N)[:, None] & (o_e < E)[None, :]
    p_u, p_step, p_dy = p_u + sample * T * E, p_step + sample * T * E, p_dy + sample * T * E
    p_du, p_dstep, p_b, p_c = p_du + sample * T * E, p_dstep + sample * T * E, p_b + sample * T * N, p_c + sample * T * N
    part = (sample * tl.num_programs(1) + tl.program_id(1)) * T * N
    p_db, p_dc = p_db + part, p_dc + part
    chunks = tl.cdiv(T, CHUNK)
    p_entering += sample * chunks * N * E
    b_rates = tl.load(p_rates + o, mask=m, other=0.0) * LOG2_E
    b_g = tl.load(p_dlast + sample * N * E + o, mask=m, other=0.0)
    b_drates = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    last = (chunks - 1) * CHUNK
    earlier = load_inputs(p_u, p_step, p_b, p_c, last, T, o_e, o_n, E, N, CHUNK)
    earlier_dy = load_rows(p_dy, last, T, o_e, E, CHUNK)
    earlier_h = tl.load(p_entering + (chunks - 1).to(tl.int64) * N * E + o, mask=m, other=0.0)
    for back in range(0, chunks):
        b_u, b_step, b_b, b_c = earlier
        b_dy, b_h = earlier_dy, earlier_h
        chunk = tl.maximum(chunks - 2 - back, 0)
        earlier = load_inputs(p_u, p_step, p_b, p_c, chunk * CHUNK, T, o_e, o_n, E, N, CHUNK)
        earlier_dy = load_rows(p_dy, chunk * CHUNK, T, o_e, E, CHUNK)
        earlier_h = tl.load(p_entering + chunk.to(tl.int64) * N * E + o, mask=m, other=0.0)
        b_du, b_dstep = tl.zeros((CHUNK, BLOCK_E), tl.float32), tl.zeros((CHUNK, BLOCK_E), tl.float32)
        b_db, b_dc = tl.zeros((BLOCK_N, CHUNK), tl.float32), tl.zeros((BLOCK_N, CHUNK), tl.float32)
        decays, kept = (), ()
        for i in tl.static_range(CHUNK):
            b_decay = tl.exp2(b_step[i][None, :] * b_rates)
            decays += (b_decay,)
            kept += (b_decay * b_h,)
            b_h = kept[i] + b_b[i][:, None] * b_u[i][None, :]
            b_dc = tl.where((o_t == i)[None, :], tl.sum(b_h * b_dy[i][None, :], 1)[:, None], b_dc)
        for i in tl.static_range(CHUNK - 1, -1, -1):
            b_g += b_c[i][:, None] * b_dy[i][None, :]
            b_du = tl.where((o_t == i)[:, None], tl.sum(b_b[i][:, None] * b_g, 0)[None, :], b_du)
            b_db = tl.where((o_t == i)[None, :], tl.sum(b_g * b_u[i][None, :], 1)[:, None], b_db)
            b_dexponent = kept[i] * b_g
            b_drates += b_dexponent * b_step[i][None, :]
            b_dstep = tl.where((o_t == i)[:, None], tl.sum(b_dexponent * b_rates, 0)[None, :], b_dstep)
            b_g *= decays[i]
        o_row = last - back * CHUNK + o_t
        o_by_e, m_by_e = o_row[:, None] * E + o_e[None, :], (o_row < T)[:, None] & (o_e < E)[None, :]
        tl.store(p_du + o_by_e, b_du, mask=m_by_e)
        tl.store(p_dstep + o_by_e, b_dstep * LN_2, mask=m_by_e)
        # as columns: a row of sums over channels would change hands among the threads
        o_by_n, m_by_n = o_row[None, :] * N + o_n[:, None], (o_row < T)[None, :] & (o_n < N)[:, None]
        tl.store(p_db + o_by_n, b_db, mask=m_by_n)
        tl.store(p_dc + o_by_n, b_dc, mask=m_by_n)
    tl.store(p_drates + sample * N * E + o, b_drates, mask=m)
    tl.store(p_dstate + sample * N * E + o, b_g, mask=m)


# -- launches ------------------------------------------------------------------------------------


def scan(u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states (B, n, N, E) that enter chunks."""
    u, step, rates, b, c, state = (x.contiguous() for x in (u, step, rates, b, c, state))
    batch, time, channels = u.shape
    y, last = torch.empty_like(u), torch.empty_like(state)
    entering = u.new_empty(batch, triton.cdiv(time, CHUNK), *rates.shape)
    grid, blocks = _blocks(u, rates)
    with _on(u):
        scan_forward[grid](u, step, rates, b, c, state, y, last, entering, time, channels, **blocks)
    return y, last, entering


def scan_gradient(
    dy: Tensor, dlast: Tensor, entering: Tensor, u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, Δ, a, b, c and the state."""
    dy, dlast, u, step, rates, b, c = (x.contiguous() for x in (dy, dlast, u, step, rates, b, c))
    _, time, channels = u.shape
    grid, blocks = _blocks(u, rates)
    du, dstep, dstate, drates = (torch.empty_like(x) for x in (u, step, dlast, dlast))
    db, dc = (u.new_empty(*grid, time, len(rates)) for _ in range(2))
    with _on(u):
        scan_backward[grid](
            dy, dlast, entering, u, step, rates, b, c, du, dstep, drates, db, dc, dstate, time, channels, **blocks
        )
    return du, dstep, drates.sum(0), db.sum(1), dc.sum(1), dstate


def _blocks(u: Tensor, rates: Tensor) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid, samples × blocks of channels, and the block sizes."""
    states = triton.next_power_of_2(len(rates))
    channels = min(MOST_CHANNELS, STATES_AT_ONCE // states)
    blocks = {"N": len(rates), "BLOCK_N": states, "BLOCK_E": channels, "CHUNK": CHUNK, "num_warps": 1}
    return (len(u), triton.cdiv(u.shape[2], channels)), blocks


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
