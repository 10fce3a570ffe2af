"""Self-attention with any kernel, and ALiBi if asked for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from compactattn.attention import attend
from compactattn.dropout import check_rate
from compactattn.kernels import Kernel
from compactattn.masks import ALiBi, Causal, Mask
from compactattn.memory.inspection import Look, look


class KeysAndValues(NamedTuple):
    """What attention keeps of n past positions, each (B, H, n, D)."""

    keys: Tensor
    values: Tensor


class SelfAttention(nn.Module):
    """y_t = W_o Σ_{i ≤ t} w_i v_i with w = kernel(q_t·k_i / √D − slope · (t − i)).

    In training each weight is dropped with probability `dropout`.
    """

    def __init__(self, width: int, heads: int, kernel: Kernel, *, alibi: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = check_rate("dropout", dropout)
        self.heads = heads
        self.kernel = kernel
        self.mask: Mask = Causal() & ALiBi() if alibi else Causal()
        self.to_inputs = nn.Linear(width, 3 * width)
        self.to_output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        features, _ = self.features(x, None, keep=False)
        return self.answer(self.regress(*features))

    def advance(self, x: Tensor, past: KeysAndValues | None) -> tuple[Tensor, KeysAndValues | None]:
        """The answer at new positions (B, T, C) that follow the past, and the past with them."""
        features, past = self.features(x, past)
        return self.answer(self.regress(*features)), past

    def features(
        self, x: Tensor, past: KeysAndValues | None, keep: bool = True
    ) -> tuple[tuple[Tensor, ...], KeysAndValues | None]:
        """What `regress` takes: queries at new positions, and the keys and values of all."""
        q, k, v = self._split(x)
        if past is not None:
            k, v = torch.cat((past.keys, k), 2), torch.cat((past.values, v), 2)
        return (q, k, v), KeysAndValues(k, v) if keep else None

    def regress(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D): the estimate of the value at each query."""
        return attend(q, k, v, self.kernel, mask=self.mask, dropout=self.dropout if self.training else 0.0)

    def answer(self, y: Tensor) -> Tensor:
        """(B, T, C) of an estimate (B, H, T, D)."""
        return self.to_output(y.transpose(1, 2).flatten(2))

    def inspect(self, x: Tensor) -> Look:
        """What each query attends to."""
        q, k, _ = self._split(x)
        return look(q, k, self.kernel, None, self.mask)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (B, H, T, D) of (B, T, C)."""
        q, k, v = self.to_inputs(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v
