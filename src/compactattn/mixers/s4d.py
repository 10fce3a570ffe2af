"""S4D: a diagonal state space for every channel, and a gate (Gu, Gupta, Goel and Ré, 2022)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

from compactattn.mixers.convolution import DiagonalSSM, full_precision
from compactattn.mixers.recurrence import Recurrence


class S4D(Recurrence):
    """y = GLU(W gelu(SSM(x))), with W to twice the width. The state is that of the SSM.

    Without a gate y = W gelu(SSM(x)), as in RegBench's code. Other options are those of the SSM.
    """

    def __init__(self, width: int, state: int = 64, *, gated: bool = True, **diagonal: Any) -> None:
        super().__init__()
        self.diagonal = DiagonalSSM(width, state, **diagonal)
        self.to_output = nn.Linear(width, 2 * width if gated else width)
        self.gate = nn.GLU() if gated else nn.Identity()

    def advance(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        with full_precision(x):
            y, past = self.diagonal.advance(x, past)
        return self._answer(y), past

    def step(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        with full_precision(x):
            y, past = self.diagonal.step(x, past)
        return self._answer(y), past

    def _answer(self, y: Tensor) -> Tensor:
        return self.gate(self.to_output(gelu(y)))
