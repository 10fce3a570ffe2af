"""Persistent memory: Gaussian kernel regression over learned keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from compactattn.memory.contextual import LARGEST_LOG_BETA
from compactattn.memory.features import leaky_scan, unit
from compactattn.memory.scalars import Scalars


class PersistentMemory(nn.Module):
    """y_t = W_o Σ_i softmax_i(β² k_t·M_i) V_i over `slots` learned pairs (M_i, V_i) of each head.

    Samples share the slots, so the batch is folded into the queries and the slots are never copied.
    """

    def __init__(self, width: int, heads: int, slots: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_keys, self.to_output = (nn.Linear(width, width, bias=False) for _ in range(2))
        shape = (heads, slots, width // heads)
        self.keys, self.values = (nn.Parameter(torch.randn(shape) * (width // heads) ** -0.5) for _ in range(2))
        self.leak = Scalars.leaks(heads)
        self.log_beta = Scalars(torch.ones(heads))
        self.log_value_scale = Scalars(torch.full((heads,), -0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.advance(x, None)[0]

    def advance(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """The memory's answer at new positions (B, T, C), and the leaky average (B, H, D) that they end with."""
        batch, time, _ = x.shape
        projected = self.to_keys(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        average = leaky_scan(projected, self.leak().abs(), past)
        beta_squared = (2 * self.log_beta().clamp_max(LARGEST_LOG_BETA)).exp()
        q = unit(average) * beta_squared[:, None, None]
        folded = q.transpose(0, 1).flatten(1, 2)  # (H, B·T, D)
        values = self.values * self.log_value_scale().exp()[:, None, None]
        y = scaled_dot_product_attention(folded[None], self.keys[None], values[None], scale=1.0)[0]
        y = y.unflatten(1, (batch, time)).permute(1, 2, 0, 3).flatten(2)
        return self.to_output(y), average[:, :, -1]
