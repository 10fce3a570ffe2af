"""Retention (Sun et al. 2023): linear attention with one fixed decay for each head, and rotary positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compactattn.mixers.linear_attention import decay_scan, decay_step, gated_norm
from compactattn.mixers.recurrence import Recurrence
from compactattn.rows import accumulator

BASE = 10_000.0  # the slowest pair of channels turns by almost 1 / BASE radians a position


class Retained(NamedTuple):
    """What retention keeps of the past."""

    state: Tensor  # (B, H, K, V)
    position: Tensor  # (B,) of the next input


Rates = Callable[[int, torch.device], Tensor]


def rope_rates(pairs: int, device: torch.device) -> Tensor:
    """Radians a position by which each pair of channels turns: 10000^(−i/pairs), as in RoFormer."""
    return BASE ** -(torch.arange(0, 2 * pairs, 2, device=device, dtype=torch.float64) / (2 * pairs))


def even_rates(pairs: int, device: torch.device) -> Tensor:
    """The same from 1 to 1/10000, both ends included, as in the published RetNet."""
    return BASE ** -torch.linspace(0, 1, pairs, device=device, dtype=torch.float64)


class RetNet(Recurrence):
    """y_t = W_o (norm(o_t) ⊙ swish(W_g x_t)) with o_t = q_t S_t / √K and S_t = γ_h S_{t−1} + k_tᵀ v_t.

    γ_h = 1 − 2^(−5−h) for head h = 0, 1, …; q and k are turned by their position; the norm is that of each head (a group
    norm), without weights. Departs from the paper: values are as wide as keys, where it has twice the width, so that a layer
    has about as many parameters as other mixers; positions are rotary, without the extra scale of xPos; and no row is
    normalised before the norm, see `NormalisedRetNet`.
    """

    def __init__(self, width: int, heads: int, *, expand: int = 1, bias: bool = False, rates: Rates = rope_rates) -> None:
        super().__init__()
        self.heads, self.rates = heads, rates
        self.sizes = (2 * width, expand * width, expand * width)
        self.to_inputs = nn.Linear(width, sum(self.sizes), bias=bias)
        self.to_output = nn.Linear(expand * width, width, bias=bias)

    def advance(self, x: Tensor, past: Retained | None) -> tuple[Tensor, Retained]:
        start = x.new_zeros(1, dtype=torch.long) if past is None else past.position
        time = torch.arange(x.shape[1], device=x.device)
        position = start[:, None] + time
        q, k, v, gate = self._project(x, position)
        log_decay = self._log_decay(q)[None, :, None, None].expand(-1, -1, len(time), -1)
        y, state = decay_scan(q, k, v, log_decay, None if past is None else past.state)
        return self._answer(y, gate, position), Retained(state, (start + len(time)).expand(len(x)))

    def step(self, x: Tensor, past: Retained | None) -> tuple[Tensor, Retained]:
        position = x.new_zeros(len(x), dtype=torch.long) if past is None else past.position
        q, k, v, gate = self._project(x, position)
        y, state = decay_step(q, k, v, self._log_decay(q)[:, None], None if past is None else past.state)
        return self._answer(y, gate, position), Retained(state, position + 1)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """q / √K, k and v, each (B, H, T, ·) of (B, T, C), and the gate (B, T, C); or without T."""
        both, v, gate = self.to_inputs(x).split(self.sizes, -1)
        q, k = turn(both, position, self.rates(x.shape[-1] // self.heads // 2, x.device)).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).movedim(-2, 1) for part in (q, k, v))
        return q * q.shape[-1] ** -0.5, k, v, gate

    def _answer(self, y: Tensor, gate: Tensor, position: Tensor) -> Tensor:
        """(B, T, C) of the estimate (B, H, T, V) at positions (B, T); or without T."""
        return self.to_output(gated_norm(y, gate))

    def _log_decay(self, like: Tensor) -> Tensor:
        """(H,) log γ."""
        head = torch.arange(self.heads, device=like.device, dtype=torch.float64)
        return torch.log1p(-torch.exp2(-5 - head)).to(accumulator(like.dtype))


class NormalisedRetNet(RetNet):
    """RetNet with every row of scores normalised (paper, section 2.4), as in its published code and in RegBench's.

    o_t = Σ_j P_tj v_j with P_tj = q_t·k_j γ^(t−j) / D_t, divided by max(1, |Σ_j P_tj|), and D_t = √(Σ_j γ^(t−j)). No gradient
    passes through the division by the row's sum. The sum is the answer of one more value, which is always 1; so
    o_t = q_t S_t / max(D_t, |sum_t|), and the norm of the head follows.
    Values and gate are twice as wide as keys, all projections have biases, and the slowest pair of channels turns by 1/10000.
    Departs from the paper as its code does: rotary positions without the scale of xPos.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads, expand=2, bias=True, rates=even_rates)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        q, k, v, gate = super()._project(x, position)
        return q, k, torch.cat((v, torch.ones_like(v[..., :1])), -1), gate

    def _answer(self, y: Tensor, gate: Tensor, position: Tensor) -> Tensor:
        total = y[..., -1:].detach()
        return super()._answer(y[..., :-1] / torch.maximum(self._spread(position).to(y.dtype), total.abs()), gate, position)

    def _spread(self, position: Tensor) -> Tensor:
        """D (B, H, T, 1) at positions (B, T): √((1 − γ^(t+1)) / (1 − γ)); or without T."""
        log_decay = self._log_decay(position.double()).view(-1, *[1] * (position.ndim - 1))
        total = torch.expm1((position[:, None] + 1) * log_decay) / torch.expm1(log_decay)
        return total.sqrt()[..., None]


def turn(x: Tensor, position: Tensor, rates: Tensor) -> Tensor:
    """x (B, T, C) with rotary positions (B, T): pairs of channels turn by position · rate, with a rate for each pair of a head.

    q_i·k_j then depends on i − j alone. Angles are in fp64: fp32 is off by 0.01 radians after 100,000 positions.
    """
    x = x.to(accumulator(x.dtype))
    angle = position[..., None] * rates  # (B, T, dim / 2)
    complex_dtype = torch.promote_types(x.dtype, torch.complex32)  # Dynamo does not know dtype.to_complex
    turns = torch.polar(torch.ones_like(angle), angle).to(complex_dtype).tile(x.shape[-1] // (2 * len(rates)))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
