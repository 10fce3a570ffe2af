"""Gated linear attention (Yang et al. 2023): a state whose every key channel decays as the input says."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from compactattn.mixers.linear_attention import decay_scan, decay_step, gated_norm
from compactattn.mixers.recurrence import Recurrence
from compactattn.rows import accumulator

RANK = 16  # of the map from the input to the decays
TEMPERATURE = 16.0  # α = sigmoid(·)^(1/16): slow decays from the start


class Written(NamedTuple):
    """What gated linear attention keeps of the past."""

    state: Tensor  # (B, H, K, V)


class GLA(Recurrence):
    """y_t = W_o (norm(o_t) ⊙ swish(W_r x_t + b_r)) with o_t = q_t S_t / √K and S_t = diag(α_t) S_{t−1} + k_tᵀ v_t.

    α_t = sigmoid(W₂ W₁ x_t + b)^(1/16). Keys are half as wide as values. The norm is the layer norm of each head, as in the
    paper, without weights; its later code has an RMS norm with weights.
    """

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.to_inputs = nn.Linear(width, 2 * width, bias=False)
        self.to_decay = nn.Sequential(nn.Linear(width, RANK, bias=False), nn.Linear(RANK, width // 2))
        self.to_gate = nn.Linear(width, width)
        self.to_output = nn.Linear(width, width, bias=False)

    def advance(self, x: Tensor, past: Written | None) -> tuple[Tensor, Written]:
        y, state = decay_scan(*self._project(x), None if past is None else past.state)
        return self._answer(y, x), Written(state)

    def step(self, x: Tensor, past: Written | None) -> tuple[Tensor, Written]:
        y, state = decay_step(*self._project(x), None if past is None else past.state)
        return self._answer(y, x), Written(state)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q / √K, k, v and log α, each (B, H, T, ·) of (B, T, C), or without T."""
        width = x.shape[-1]
        q, k, v = (self._split(part) for part in self.to_inputs(x).split((width // 2, width // 2, width), -1))
        with torch.autocast(x.device.type, enabled=False):  # bf16 would blur decays close to 1
            raw = self.to_decay(x.to(self.to_gate.weight.dtype))
            log_decay = logsigmoid(raw.to(accumulator(raw.dtype))) / TEMPERATURE
        return q * q.shape[-1] ** -0.5, k, v, self._split(log_decay)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).movedim(-2, 1)

    def _answer(self, y: Tensor, x: Tensor) -> Tensor:
        return self.to_output(gated_norm(y, self.to_gate(x)))
