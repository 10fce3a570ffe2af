"""Keys and values of a contextual memory (paper Eq. 5).

Shapes: (B, H, T, D) with B batch, H heads, T time, D head dim; (H,) one number per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from compactattn.memory.operators import fused_keys, fused_values, usable

CHUNK = {"cpu": 64, "cuda": 256}  # times that one matrix product covers


def leaky_average(x: Tensor, leak: Tensor) -> Tensor:
    """Σ_{i ≤ t} exp(−leak · (t − i)) x_i at each time t, from the T×T definition.

    Departs from the paper's λ_φ: exp(−leak) takes its place, so that the decay lies in (0, 1].
    """
    time = torch.arange(x.shape[-2], device=x.device)
    age = time[:, None] - time  # (T, T)
    decay = torch.exp(-leak[..., None, None] * age.clamp_min(0)) * (age >= 0)
    return torch.einsum("hij,bhjd->bhid", decay.to(x.dtype), x)


def leaky_scan(x: Tensor, leak: Tensor, state: Tensor | None = None) -> Tensor:
    """The leaky average in time linear in T: matrix products inside chunks, and the same scan over the ends of the chunks.

    `state` (B, H, D) is the average that the sequence before x ended with; the last row of the result is the next state.
    """
    time, chunk = x.shape[-2], CHUNK.get(x.device.type, 64)
    if time <= chunk:
        out = leaky_average(x, leak)
    else:
        chunks = pad(x, (0, 0, 0, -time % chunk)).unflatten(-2, (-1, chunk))  # (B, H, N, chunk, D)
        batch, heads, count, _, dim = chunks.shape
        inside = leaky_average(chunks.permute(0, 2, 1, 3, 4).flatten(0, 1), leak).unflatten(0, (batch, count))
        ends = inside[..., -1, :].transpose(1, 2)  # (B, H, N, D)
        entering = pad(leaky_scan(ends, leak * chunk), (0, 0, 1, -1)).transpose(1, 2)  # (B, N, H, D)
        inside = inside + _fade(leak, chunk, x) * entering[..., None, :]
        out = inside.transpose(1, 2).reshape(batch, heads, count * chunk, dim)[..., :time, :]
    return out if state is None else out + _fade(leak, time, x) * state[..., None, :]


def _fade(leak: Tensor, time: int, like: Tensor) -> Tensor:
    """(H, T, 1): what is left of a state t + 1 steps later."""
    return torch.exp(-leak[:, None] * torch.arange(1, time + 1, device=like.device))[..., None].to(like.dtype)


def unit(x: Tensor) -> Tensor:
    """x / ‖x‖ along the last dimension; 0 stays 0."""
    return normalize(x, dim=-1)


def context_keys(x: Tensor, leak: Tensor, state: Tensor | None = None, by_time: bool = False) -> tuple[Tensor, Tensor]:
    """Unit-norm keys k_t from projected inputs (paper Eq. 5, first line), and the average (B, H, D) that they end with.

    `state` is the average that the sequence before x ended with. `by_time` asks for keys that lie as (B, T, H, D) in memory.
    """
    if usable(x):
        keys, _, last = fused_keys(x, leak, state, by_time)
        return keys, last
    average = leaky_scan(x, leak, state)
    return unit(average), average[:, :, -1]


def peek_values(x: Tensor, mix: Tensor, gain: Tensor | None = None) -> Tensor:
    """v_t = gain · unit(mix · x_t + (1 − mix) · x_{t+1}) (paper Eq. 5, second line); the gain is 1 unless given.

    The last position sees zero for x_{t+1}; no query that is strictly causal can reach it.
    Departs from the paper's λ_ψ: a convex mix spans the same directions as λ_ψ ≥ 0.
    """
    gain = torch.ones_like(mix) if gain is None else gain
    if usable(x):
        return fused_values(x, mix, gain)
    ahead = pad(x[..., 1:, :], (0, 0, 0, 1))
    mix = mix[:, None, None]
    return unit(mix * x + (1 - mix) * ahead) * gain[:, None, None]
