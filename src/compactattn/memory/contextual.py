"""Contextual memory: kernel regression over what the sequence has shown so far (paper Eqs. 2 and 5)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compactattn.attention import attend
from compactattn.dropout import check_rate
from compactattn.kernels import Kernel
from compactattn.masks import ALiBi, Mask
from compactattn.memory.features import context_keys, peek_values
from compactattn.memory.inspection import Look, look
from compactattn.memory.released import Path, scoring
from compactattn.memory.scalars import Scalars

LARGEST_LOG_BETA = 5.0  # β² is at most e¹⁰


class Context(NamedTuple):
    """What a contextual memory keeps of n past positions."""

    average: Tensor  # (B, H, D) the leaky average that the keys ended with
    keys: Tensor  # (B, H, n, D)
    values: Tensor  # (B, H, n − 1, D): the last value waits for the next position
    waiting: Tensor  # (B, H, 1, D) the last value before it is mixed


class ContextualMemory(nn.Module):
    """y_t = W_o Σ_{i < t} w_i v_i with w = kernel(β² k_t·k_i): the query is the newest key, the diagonal is excluded.

    A value peeks at the position after it, which a strictly causal query has already seen. Row 0 is zero.
    In training each weight is dropped with probability `dropout`. β² starts as given, or as e².
    """

    def __init__(
        self, width: int, heads: int, kernel: Kernel, *, alibi: bool = False, as_released: Path = "", dropout: float = 0.0,
        beta_squared: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = check_rate("dropout", dropout)
        self.heads = heads
        self.alibi = alibi
        self.scoring = scoring(kernel, as_released)
        self.to_keys, self.to_values, self.to_output = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.leak = Scalars.leaks(heads)
        self.log_beta = Scalars(torch.full((heads,), math.log(beta_squared) / 2 if beta_squared else 1.0))
        self.log_value_scale = Scalars(torch.full((heads,), -0.5))
        self.mix = nn.Parameter(torch.rand(heads))

    def forward(self, x: Tensor) -> Tensor:
        features, _ = self.features(x, None, keep=False)
        return self.answer(self.regress(*features))

    def advance(self, x: Tensor, past: Context | None) -> tuple[Tensor, Context | None]:
        """The memory's answer at new positions (B, T, C) that follow the past, and the past with them."""
        features, context = self.features(x, past)
        return self.answer(self.regress(*features)), context

    def features(self, x: Tensor, past: Context | None, keep: bool = True) -> tuple[tuple[Tensor, ...], Context | None]:
        """What `regress` takes: queries at new positions, the keys and values of all (paper Eq. 5), and β²."""
        projected, raw = self._split(self.to_keys(x)), self._split(self.to_values(x))
        q, average = context_keys(projected, self.leak().abs(), None if past is None else past.average)
        k = q if past is None else torch.cat((past.keys, q), 2)
        source = raw if past is None else torch.cat((past.waiting, raw), 2)
        # the last value peeks at nothing: no query reaches it before the next position has come
        new = peek_values(source, self.mix, self.log_value_scale().exp())
        v = new if past is None else torch.cat((past.values, new), 2)
        context = Context(average, k, v[:, :, :-1], raw[:, :, -1:]) if keep else None
        return (q, k, v, self.beta_squared()), context

    def regress(self, q: Tensor, k: Tensor, v: Tensor, beta_squared: Tensor) -> Tensor:
        """(B, H, T, D): the estimate of the value at each query."""
        scale, mask = self._rule(beta_squared)
        return attend(q, k, v, self.scoring.kernel, scale=scale, mask=mask, dropout=self.dropout if self.training else 0.0)

    def answer(self, y: Tensor) -> Tensor:
        """(B, T, C) of an estimate (B, H, T, D)."""
        return self.to_output(y.transpose(1, 2).flatten(2))

    def inspect(self, x: Tensor) -> Look:
        """What each query attends to."""
        (q, k, _, beta_squared), _ = self.features(x, None, keep=False)
        found = look(q, k, self.scoring.kernel, *self._rule(beta_squared))
        if not self.scoring.lifted:
            return found
        # the readout measures h from scores without a bias
        scale = self.scoring.scale(beta_squared)[:, None]
        cosine = (found.readout.threshold - scale + beta_squared[:, None]) / scale
        return found._replace(readout=found.readout._replace(bandwidth=(2 - 2 * cosine).clamp_min(0).sqrt()))

    def _rule(self, beta_squared: Tensor) -> tuple[Tensor, Mask]:
        """The scale of the scores and what a query may see."""
        mask = self.scoring.mask(beta_squared)
        return self.scoring.scale(beta_squared), mask & ALiBi() if self.alibi else mask

    def beta_squared(self) -> Tensor:
        """(H,) 1/h²: how sharply each head tells keys apart."""
        return (2 * self.log_beta().clamp_max(LARGEST_LOG_BETA)).exp()

    def _split(self, x: Tensor) -> Tensor:
        """(B, H, T, D) of (B, T, C)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
