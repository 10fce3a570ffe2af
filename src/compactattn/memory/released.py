"""Where the published code departs from the paper's equations, as data: so that what it costs can be measured.

The *efficient* path hides the newest legal key from normalised ReLU, ReLUmax and uniform top-k, and computes normalised
ReLU as relu(cos)/Σ, with no bandwidth. The *plain* path applies β² twice. Every other kernel is as in the paper.
Not offered: the plain path also lets the future leak into normalised ReLU while 2β² < 1, which no mask of ours can do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from compactattn.kernels import STEP, Anchored, Fixed, Kernel, Nearest, rectified
from compactattn.masks import Bias, Causal, Mask

Path = Literal["", "efficient", "plain"]


@dataclass(frozen=True)
class Scoring:
    """How a contextual memory scores its keys, given β² of each head."""

    kernel: Kernel
    offset: int = 1  # the newest key that a query sees lies this far back
    power: float = 1.0  # the scale is β² to this power
    lifted: bool = False  # adds scale − β² to the scores, so that a fixed kernel measures from β²

    def scale(self, beta_squared: Tensor) -> Tensor:
        return beta_squared**self.power if self.power != 1 else beta_squared

    def mask(self, beta_squared: Tensor) -> Mask:
        causal = Causal(self.offset)
        if not self.lifted:
            return causal
        return causal & Bias((self.scale(beta_squared) - beta_squared)[None, :, None, None])


def scoring(kernel: Kernel, path: Path = "") -> Scoring:
    """The paper's scoring of a kernel, or the one that the published code gives it."""
    fixed, anchored = isinstance(kernel.rule, Fixed) and kernel.r == 1, isinstance(kernel.rule, Anchored) and kernel.r == 1
    uniform = isinstance(kernel.rule, Nearest) and kernel.profile == STEP
    if path == "efficient" and fixed:
        return Scoring(rectified(1.0, b=1.0), offset=2, power=0.0)  # scale 1, θ = 0: relu(cos) / Σ
    if path == "efficient" and (anchored or uniform):
        return Scoring(kernel, offset=2)
    if path == "plain" and (fixed or anchored):
        return Scoring(kernel, power=2.0, lifted=fixed)
    return Scoring(kernel)


def departs(kernel: Kernel, path: Path) -> bool:
    """Whether the published code gives this kernel other weights than the paper."""
    return scoring(kernel, path) != Scoring(kernel)
