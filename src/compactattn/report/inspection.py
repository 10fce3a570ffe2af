"""What attention looks like from inside, ready to be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from compactattn.kernels import parse
from compactattn.memory.inspection import Summary


@dataclass(frozen=True)
class Inspection:
    """One layer's attention on one sequence: the weights of one head, and what every head tells about each query."""

    kernel: str
    layer: int  # from 0
    head: int  # from 0, the one whose weights are given
    weights: np.ndarray  # (Q, K)
    support: np.ndarray  # (H, Q): keys with non-zero weight
    bandwidth: np.ndarray  # (H, Q)
    tokens: Sequence[str] = field(default=())  # one for each position, or none
    summary: Summary | None = None  # which tokens each head used at one position
    run: str = ""  # the folder that it is of
    subject: str = ""  # what that run was trained on

    def __post_init__(self) -> None:
        parse(self.kernel)
        for name, dims in (("weights", 2), ("support", 2), ("bandwidth", 2)):
            value = np.asarray(getattr(self, name), dtype=float)
            if value.ndim != dims:
                raise ValueError(f"{name} of an inspection has {value.ndim} dimensions; it needs {dims}")
            object.__setattr__(self, name, value)
        queries, keys = self.weights.shape
        if self.support.shape != self.bandwidth.shape or self.support.shape[1] != queries:
            raise ValueError(
                f"an inspection of {queries} queries has support {self.support.shape} and bandwidth {self.bandwidth.shape};"
                f" both are (heads, {queries})"
            )
        if self.tokens and len(self.tokens) != keys:
            raise ValueError(f"an inspection of {keys} keys has {len(self.tokens)} tokens; give one for each, or none")
        if not 0 <= self.head < len(self.support):
            raise ValueError(f"head {self.head} is not one of the {len(self.support)} heads, which are numbered from 0")
