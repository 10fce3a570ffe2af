"""Persistent memory: Gaussian kernel regression over learned keys and values."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from compactattn.attention import attend
from compactattn.dropout import check_rate
from compactattn.kernels import gaussian
from compactattn.memory.contextual import LARGEST_LOG_BETA
from compactattn.memory.features import context_keys
from compactattn.memory.scalars import Scalars

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PersistentMemory(nn.Module):
    """y_t = W_o Σ_i softmax_i(β² k_t·M_i) V_i over `slots` learned pairs (M_i, V_i) of each head.

    Samples share the slots, so the batch is folded into the queries and the slots are never copied.
    In training each weight is dropped with probability `dropout`.
    """

    def __init__(self, width: int, heads: int, slots: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = check_rate("dropout", dropout)
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
        q, average = context_keys(projected, self.leak().abs(), past, by_time=True)
        beta_squared = (2 * self.log_beta().clamp_max(LARGEST_LOG_BETA)).exp()
        folded = q.transpose(1, 2).flatten(0, 1).transpose(0, 1)  # (H, B·T, D)
        # there are fewer slots than queries, so what scales scores and values scales the slots
        keys = self.keys * beta_squared[:, None, None]
        values = self.values * self.log_value_scale().exp()[:, None, None]
        y = self._attend(folded[None], keys[None], values[None])[0]
        return self.to_output(y.transpose(0, 1).unflatten(0, (batch, time)).flatten(2)), average

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.training and self.dropout:  # PyTorch's own would store all weights on a CPU, and take five times as long
            return attend(q, k, v, gaussian(), scale=1.0, dropout=self.dropout)
        with prefer_cudnn(q):
            return scaled_dot_product_attention(q, k, v, scale=1.0)


def prefer_cudnn(x: Tensor) -> AbstractContextManager[Any]:
    """In training on a GPU cuDNN comes first, where it can: it prepares for each shape, and then is the fastest."""
    if not (x.is_cuda and torch.is_grad_enabled()):
        return nullcontext()
    return sdpa_kernel(BACKENDS, set_priority=True)
