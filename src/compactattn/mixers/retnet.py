"""Retention (Sun et al. 2023): linear attention with one fixed decay for each head, and rotary positions."""

from __future__ import annotations

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


class RetNet(Recurrence):
    """y_t = W_o (norm(o_t) ⊙ swish(W_g x_t)) with o_t = q_t S_t / √K and S_t = γ_h S_{t−1} + k_tᵀ v_t.

    γ_h = 1 − 2^(−5−h) for head h = 0, 1, …; q and k are turned by their position; the norm is that of each head (a group
    norm), without weights. Departs from the paper: values are as wide as keys, where it has twice the width, so that a layer
    has about as many parameters as other mixers; and positions are rotary, without the extra scale of xPos.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_inputs = nn.Linear(width, 4 * width, bias=False)
        self.to_output = nn.Linear(width, width, bias=False)

    def advance(self, x: Tensor, past: Retained | None) -> tuple[Tensor, Retained]:
        start = x.new_zeros(1, dtype=torch.long) if past is None else past.position
        time = torch.arange(x.shape[1], device=x.device)
        q, k, v, gate = self._project(x, start[:, None] + time)
        log_decay = self._log_decay(q)[None, :, None, None].expand(-1, -1, len(time), -1)
        y, state = decay_scan(q, k, v, log_decay, None if past is None else past.state)
        return self.to_output(gated_norm(y, gate)), Retained(state, (start + len(time)).expand(len(x)))

    def step(self, x: Tensor, past: Retained | None) -> tuple[Tensor, Retained]:
        position = x.new_zeros(len(x), dtype=torch.long) if past is None else past.position
        q, k, v, gate = self._project(x, position)
        y, state = decay_step(q, k, v, self._log_decay(q)[:, None], None if past is None else past.state)
        return self.to_output(gated_norm(y, gate)), Retained(state, position + 1)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, ...]:
        """q / √K, k and v, each (B, H, T, ·) of (B, T, C), and the gate (B, T, C); or without T."""
        width = x.shape[-1]
        both, v, gate = self.to_inputs(x).split((2 * width, width, width), -1)
        q, k = turn(both, position, width // self.heads).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).movedim(-2, 1) for part in (q, k, v))
        return q * q.shape[-1] ** -0.5, k, v, gate

    def _log_decay(self, like: Tensor) -> Tensor:
        """(H,) log γ."""
        head = torch.arange(self.heads, device=like.device, dtype=torch.float64)
        return torch.log1p(-torch.exp2(-5 - head)).to(accumulator(like.dtype))


def turn(x: Tensor, position: Tensor, dim: int) -> Tensor:
    """x (B, T, C) with rotary positions (B, T): channels 2i and 2i + 1 of every `dim` turn by position · 10000^(−2i/dim).

    q_i·k_j then depends on i − j alone. Angles are in fp64: fp32 is off by 0.01 radians after 100,000 positions.
    """
    x = x.to(accumulator(x.dtype))
    rate = BASE ** -(torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = position[..., None] * rate  # (B, T, dim / 2)
    complex_dtype = torch.promote_types(x.dtype, torch.complex32)  # Dynamo does not know dtype.to_complex
    turns = torch.polar(torch.ones_like(angle), angle).to(complex_dtype).tile(x.shape[-1] // dim)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turns).flatten(-2)
