"""S4D: a diagonal state space for every channel, and a gate (Gu, Gupta, Goel and Ré, 2022)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, glu

from compactattn.mixers.convolution import DiagonalSSM, full_precision
from compactattn.mixers.recurrence import Recurrence


class S4D(Recurrence):
    """y = GLU(W gelu(SSM(x))), with W to twice the width. The state is that of the SSM."""

    def __init__(self, width: int, state: int = 64) -> None:
        super().__init__()
        self.diagonal = DiagonalSSM(width, state)
        self.to_output = nn.Linear(width, 2 * width)

    def advance(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        with full_precision(x):
            y, past = self.diagonal.advance(x, past)
        return self._gate(y), past

    def step(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        with full_precision(x):
            y, past = self.diagonal.step(x, past)
        return self._gate(y), past

    def _gate(self, y: Tensor) -> Tensor:
        return glu(self.to_output(gelu(y)), -1)
