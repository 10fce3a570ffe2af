"""H3: a shift and a diagonal state space, with products between them (Fu, Dao, Saab, Thomas, Rudra and Ré, 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compactattn.mixers.convolution import DiagonalSSM, ShiftSSM, full_precision
from compactattn.mixers.recurrence import Recurrence


class Hungry(NamedTuple):
    """What H3 keeps: the last keys, and the state of the diagonal SSM."""

    keys: Tensor  # (B, state − 1, C)
    state: Tensor  # (B, C, state / 2), complex


class H3(Recurrence):
    """y = W_o (q ⊙ SSM_diagonal(SSM_shift(k) ⊙ v)): the shift lets a value meet the key before it. Heads have one dimension.

    `taps` draws the first taps of the shift; other options are those of the diagonal SSM.
    Departs from the published code: there the input matrices of both SSMs are learned too, from 1. Their products with taps and
    readout say the same.
    """

    def __init__(
        self, width: int, state: int = 64, *, taps: Callable[[int, int], Tensor] = torch.randn, **diagonal: Any
    ) -> None:
        super().__init__()
        self.to_inputs = nn.Linear(width, 3 * width)
        self.shift = ShiftSSM(width, state, taps)
        self.diagonal = DiagonalSSM(width, state, **diagonal)
        self.to_output = nn.Linear(width, width)

    def advance(self, x: Tensor, past: Hungry | None) -> tuple[Tensor, Hungry]:
        q, k, v = self.to_inputs(x).chunk(3, -1)
        with full_precision(x):
            k, (keys,) = self.shift.advance(k, past and past[:1])
            y, (state,) = self.diagonal.advance(k * v, past and past[1:])
        return self.to_output(q * y), Hungry(keys, state)

    def step(self, x: Tensor, past: Hungry | None) -> tuple[Tensor, Hungry]:
        q, k, v = self.to_inputs(x).chunk(3, -1)
        with full_precision(x):
            k, (keys,) = self.shift.step(k, past and past[:1])
            y, (state,) = self.diagonal.step(k * v, past and past[1:])
        return self.to_output(q * y), Hungry(keys, state)
