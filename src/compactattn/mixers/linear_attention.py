"""Linear attention whose state decays: S_t = diag(α_t) S_{t−1} + k_tᵀ v_t and o_t = q_t S_t. What GLA and RetNet share.

Shapes: q and k (B, H, T, K), v (B, H, T, V), a state (B, H, K, V). log α ≤ 0 is (B, H, T, K), or (1, H, T, 1) where all
channels of a head decay alike. Everything here is summed in fp32 (fp64 for fp64), under autocast too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import layer_norm, pad, silu

from compactattn.rows import accumulator

CHUNK = {"cpu": 32, "cuda": 64}  # positions that one matrix product covers; powers of two


def decay_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The definition at one position: o (B, H, V) and the state after it, of q, k and log α (B, H, K) and v (B, H, V)."""
    q, k, v, log_decay = (_exact(x)[..., None] for x in (q, k, v, log_decay))
    new = k * v.mT  # (B, H, K, V)
    state = new if state is None else log_decay.exp() * state + new
    return (q * state).sum(-2), state


def decay_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same at all positions: o (B, H, T, V) and the state after the last.

    Matrix products inside chunks, and a loop over chunks for the states they start from. Every decay is exp of a sum of
    log α between two positions, so it is at most 1: gates however close to 0 divide nothing by nothing.
    """
    time = q.shape[2]
    chunk = min(CHUNK.get(q.device.type, 64), 1 << (time - 1).bit_length())
    with torch.autocast(q.device.type, enabled=False):
        # after the end nothing is written and nothing decays
        padded = (pad(_exact(x), (0, 0, 0, -time % chunk)) for x in (q, k, v, log_decay))
        q, k, v, log_decay = (x.unflatten(2, (-1, chunk)) for x in padded)  # (B, H, N, chunk, ·)
        since = log_decay.cumsum(-2)  # log of what is left of the state that the chunk starts from
        last = since[..., -1:, :]
        written = (k * (last - since).exp()).mT @ v  # (B, H, N, K, V)
        starts, state = _carry(written, last.exp().mT, state)
        out = _weights(q, k, since) @ v + (q * since.exp()) @ starts
        return out.flatten(2, 3)[:, :, :time], state


def gated_norm(y: Tensor, gate: Tensor) -> Tensor:
    """(B, T, C) of an estimate (B, H, T, V): layer norm of each head, without weights, times swish(gate). Or without T."""
    y = y.movedim(1, -2)
    return layer_norm(y, y.shape[-1:]).flatten(-2) * silu(gate)


def _exact(x: Tensor) -> Tensor:
    return x.to(accumulator(x.dtype))


def _carry(written: Tensor, decay: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The states that the chunks start from, and the one that the last ends with."""
    starts = [torch.zeros_like(written[:, :, 0]) if state is None else state]
    for left, new in zip(decay.unbind(2), written.unbind(2), strict=True):
        starts.append(torch.addcmul(new, left, starts[-1]))
    return torch.stack(starts[:-1], 2), starts[-1]


def _weights(q: Tensor, k: Tensor, since: Tensor) -> Tensor:
    """(…, chunk, chunk): Σ_d q_id k_jd exp(since_id − since_jd) for j ≤ i, and 0 above."""
    if since.shape[-1] > 1:
        return _ChannelDecay.apply(q, k, since)
    age = since - since.mT
    future = torch.ones(age.shape[-2:], dtype=torch.bool, device=age.device).triu(1)
    return q @ k.mT * age.masked_fill(future, -torch.inf).exp()


class _ChannelDecay(torch.autograd.Function):
    """`_weights` where every channel has its own decay.

    Blocks of 1, 2, 4, … positions lie in pairs. What the later block of a pair sees of the earlier is one matrix product, once
    q and k have decayed from and to the border between them; all pairs of all sizes make up the triangle. Keeps q, k and
    the sums, and no decay.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, since: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, since)
        weights = q.new_zeros(*q.shape[:-1], q.shape[-2])
        weights.diagonal(dim1=-2, dim2=-1).copy_((q * k).sum(-1))
        for size in _sizes(weights):
            later, earlier = _from_border(since, size)
            _pairs(weights, size).copy_((_halves(q, size)[1] * later) @ (_halves(k, size)[0] * earlier).mT)
        return weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, since = ctx.saved_tensors
        dq, dk = torch.zeros_like(q), torch.zeros_like(k)
        for size in _sizes(dweights):
            later, earlier = _from_border(since, size)
            dpairs = _pairs(dweights, size)
            _halves(dq, size)[1].addcmul_(later, dpairs @ (_halves(k, size)[0] * earlier))
            _halves(dk, size)[0].addcmul_(earlier, dpairs.mT @ (_halves(q, size)[1] * later))
        dsince = q * dq - k * dk  # the sums enter as since_i − since_j beside q_i k_j; on the diagonal they cancel
        own = dweights.diagonal(dim1=-2, dim2=-1)[..., None]
        return dq.addcmul_(own, k), dk.addcmul_(own, q), dsince


def _sizes(weights: Tensor) -> list[int]:
    """1, 2, 4, … below the chunk."""
    return [1 << level for level in range(weights.shape[-1].bit_length() - 1)]


def _halves(x: Tensor, size: int) -> tuple[Tensor, ...]:
    """The earlier and the later block of every pair, each (…, pairs, size, D), of (…, chunk, D)."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def _from_border(since: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Decays from the border of each pair to its later positions, and to the border from its earlier ones."""
    earlier, later = _halves(since, size)
    border = earlier[..., -1:, :]
    return (later - border).exp(), (border - earlier).exp()


def _pairs(weights: Tensor, size: int) -> Tensor:
    """(…, pairs, size, size): the part of (…, chunk, chunk) where the later block of a pair looks at the earlier; a view."""
    blocks = weights.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
    return blocks.diagonal(dim1=-4, dim2=-2)[..., size:, :size, :].movedim(-1, -3)
