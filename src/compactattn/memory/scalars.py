"""Per-head scalars that Adam moves fast."""

from __future__ import annotations

import torch
from torch import Tensor, nn

GEAR = 10.0


class Scalars(nn.Module):
    """One learned number per head, stored divided by 10 and used times 10, so that they need no learning rate of their own."""

    def __init__(self, init: Tensor) -> None:
        super().__init__()
        self.stored = nn.Parameter(init / GEAR)

    def forward(self) -> Tensor:
        return self.stored * GEAR

    @staticmethod
    def leaks(heads: int) -> Scalars:
        """Leaks from 0.5 to 5, used by their absolute value."""
        return Scalars(torch.linspace(0.5, 5.0, heads))
