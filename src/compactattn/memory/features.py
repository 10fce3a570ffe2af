"""Keys and values of a contextual memory (paper Eq. 5), as they are defined.

Shapes: (..., T, D) with T time and D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad


def leaky_average(x: Tensor, leak: Tensor) -> Tensor:
    """Σ_{i ≤ t} exp(−leak · (t − i)) x_i at each time t, from the T×T definition.

    `leak` broadcasts to the leading dimensions of x.
    Departs from the paper's λ_φ: exp(−leak) takes its place, so that the decay lies in (0, 1].
    """
    time = torch.arange(x.shape[-2], device=x.device)
    age = time[:, None] - time  # (T, T)
    decay = torch.exp(-leak[..., None, None] * age.clamp_min(0)) * (age >= 0)
    return decay.to(x.dtype) @ x


def context_keys(x: Tensor, leak: Tensor) -> Tensor:
    """Unit-norm keys k_t from projected inputs (paper Eq. 5, first line)."""
    return normalize(leaky_average(x, leak), dim=-1)


def peek_values(x: Tensor, mix: Tensor) -> Tensor:
    """Unit-norm values v_t = unit(mix · x_t + (1 − mix) · x_{t+1}) (paper Eq. 5, second line).

    The last position sees zero for x_{t+1}; no query that is strictly causal can reach it.
    Departs from the paper's λ_ψ: a convex mix spans the same directions as λ_ψ ≥ 0.
    """
    ahead = pad(x[..., 1:, :], (0, 0, 0, 1))
    mix = mix[..., None, None]
    return normalize(mix * x + (1 - mix) * ahead, dim=-1)
