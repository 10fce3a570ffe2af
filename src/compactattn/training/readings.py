"""What a step says of itself, read without making the device wait."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Reading:
    """Loss, gradient norm and wish to stop of one step, on their way to the host."""

    step: int
    values: Tensor  # (3,) on the host
    arrived: torch.cuda.Event | None

    def read(self) -> tuple[float, float, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, norm, stop = self.values.tolist()
        return loss, norm, stop


def lag(device: torch.device) -> int:
    """How many steps the host may run ahead of what it has read: a GPU should never wait for it."""
    return 1 if device.type == "cuda" else 0


def send(step: int, values: Tensor) -> Reading:
    """Starts the copy of a few numbers to the host, without waiting for it."""
    if values.device.type != "cuda":
        return Reading(step, values, None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return Reading(step, host, arrived)
