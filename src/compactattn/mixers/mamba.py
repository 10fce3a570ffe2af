"""Mamba: a diagonal state space whose step, input and output depend on the input (Gu and Dao, 2023)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from compactattn.mixers.convolution import draw_steps, draw_taps, filter_causally, full_precision
from compactattn.mixers.recurrence import Recurrence
from compactattn.mixers.selective_scan import selective_scan

EXPAND, TAPS = 2, 4


class Selected(NamedTuple):
    """What Mamba keeps: the last inputs of the short filter, and the state of the scan."""

    inputs: Tensor  # (B, TAPS − 1, E)
    state: Tensor  # (B, N, E)


class Mamba(Recurrence):
    """y = W_o (silu(z) ⊙ (c_t · h_t + skip ⊙ u)) with h_t = exp(Δ_t a) h_{t−1} + Δ_t b_t u_t and u = silu(filter(W_u x)).

    Δ = softplus(W_Δ u + bias), b and c are linear in u. E = `inner` channels, 2 · width unless told otherwise, with N = `state`
    states each; a < 0 starts as −1 … −N and is stored flat, as what must not decay in training.
    """

    def __init__(self, width: int, state: int = 16, inner: int = 0) -> None:
        super().__init__()
        inner, rank = inner or EXPAND * width, math.ceil(width / 16)
        self.sizes = (rank, state, state)
        self.to_inputs = nn.Linear(width, 2 * inner, bias=False)
        self.taps = nn.Parameter(draw_taps(inner, TAPS))
        self.taps_bias = nn.Parameter(torch.empty(inner).uniform_(-(TAPS**-0.5), TAPS**-0.5))
        self.to_selection = nn.Linear(inner, sum(self.sizes), bias=False)
        self.to_step = nn.Linear(rank, inner, bias=False)
        nn.init.uniform_(self.to_step.weight, -(rank**-0.5), rank**-0.5)
        self.step_bias = nn.Parameter(draw_steps(inner).expm1().log())  # softplus takes it back
        self.log_rate = nn.Parameter(torch.arange(1.0, state + 1).log().repeat_interleave(inner))
        self.skip = nn.Parameter(torch.ones(inner))
        self.to_output = nn.Linear(inner, width, bias=False)

    def advance(self, x: Tensor, past: Selected | None) -> tuple[Tensor, Selected]:
        u, gate = self.to_inputs(x).chunk(2, -1)
        inputs, state = past or self._empty(u)
        with full_precision(x):
            u, inputs = filter_causally(u.to(self.taps.dtype), self.taps, inputs)
        u = silu(u + self.taps_bias)
        step, b, c = self._select(u)
        y, state = selective_scan(step * u, step, self._rates(), b, c, state)
        return self.to_output((y + self.skip * u) * silu(gate)), Selected(inputs, state)

    def step(self, x: Tensor, past: Selected | None) -> tuple[Tensor, Selected]:
        u, gate = self.to_inputs(x).chunk(2, -1)
        inputs, state = past or self._empty(u)
        seen = torch.cat((inputs, u[:, None].to(self.taps.dtype)), 1)  # (B, TAPS, E), the newest last
        u = silu((seen * self.taps.flip(1).mT).sum(1) + self.taps_bias)
        step, b, c = self._select(u)
        state = torch.exp(step[:, None] * self._rates()) * state + b[..., None] * (step * u)[:, None]
        y = (c[..., None] * state).sum(1)
        return self.to_output((y + self.skip * u) * silu(gate)), Selected(seen[:, 1:], state)

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Δ (…, E), b and c (…, N), as the input asks."""
        step, b, c = self.to_selection(u).split(self.sizes, -1)
        return softplus(self.to_step(step) + self.step_bias), b, c

    def _rates(self) -> Tensor:
        """a (N, E)."""
        return -self.log_rate.exp().view(self.sizes[1], -1)

    def _empty(self, u: Tensor) -> Selected:
        batch, inner = len(u), u.shape[-1]
        return Selected(self.taps.new_zeros(batch, TAPS - 1, inner), self.taps.new_zeros(batch, self.sizes[1], inner))
