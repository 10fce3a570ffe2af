"""What a model is fed, and where the training loop gets it from.

Shapes: B batch, T time.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Sequences, the token that follows at each position, and which positions matter."""

    inputs: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, the next token at each position
    counted: Tensor  # (B, T) bool, positions whose loss and accuracy count
    judged: Tensor  # (B, T) bool, positions that must all be right for an exact match; each is counted too

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        # a copy to the CPU that does not wait may be read before it is there
        non_blocking = non_blocking and torch.device(device).type != "cpu"
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in self))


class Stream(Protocol):
    """An endless supply of numbered samples, all padded to one length.

    Sample i is a pure function of the stream and i, so no number of workers or ranks can change the data.
    """

    @property
    def vocab(self) -> int: ...

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first + count − 1."""
        ...
