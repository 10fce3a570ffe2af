"""How a call is cut into tiles: block sizes by shape, dtype and GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch


def is_hopper(device: torch.device) -> bool:
    """Whether it has what came with compute capability 9.0, as the interpreter does."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0)


def is_roomy(device: torch.device) -> bool:
    """Whether a program may have 160 KiB of shared memory. GPUs for desktops and the like have 99."""
    if device.type != "cuda":
        return True
    capability = torch.cuda.get_device_capability(device)
    return capability not in ((8, 6), (8, 9)) and capability < (12, 0)


@dataclass(frozen=True)
class Blocks:
    """How one kernel is cut: M queries × N keys at a time."""

    m: int
    n: int
    warps: int
    stages: int
    registers: int = 255  # of a thread; fewer let more programs share a processor


@dataclass(frozen=True)
class Cut:
    """How a call is cut: all four kernels into the same tiles."""

    threshold: Blocks
    forward: Blocks
    queries: Blocks
    keys: Blocks


def choose_cut(
    queries: int, width: int, dtype: torch.dtype, roomy: bool = True, even: bool = False, brief: bool = False
) -> Cut:
    """Blocks for a number of queries and the larger head dim; measured on an H200, see docs/LOG.md.

    `roomy`: `is_roomy`; `even`: `weights.is_even`; `brief`: few keys, `threshold.is_plain`, no dropout. The size of a tile
    hangs on neither of the last two.
    """
    if dtype == torch.float32:  # its products need the registers for themselves
        same = Blocks(32, 32, 4, 2) if queries > 16 and width <= 64 else Blocks(16, 32, 4, 1)
        return Cut(same, same, same, same)
    if width > 128 and not roomy:
        return Cut(*[Blocks(min(32, to_power(queries)), 32, 4, 1)] * 4)
    if queries <= 16 or width > 128:  # 64 keys at a time: with fewer classes Newton's last step grows
        m = min(64, to_power(queries))
        return Cut(*(Blocks(m, 64, 8 if m == 64 else 4, 2 if width <= 128 else 1) for _ in range(4)))
    least = Blocks(64, 64, 4, 2, 128)
    if width > 64 and not roomy:  # of keys two at a time, with a mask that is a tensor, are 105 KiB
        return Cut(least, Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 1))
    if width > 64:
        return Cut(least, Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2))
    by_key = Blocks(64, 64, 4, 3, 168 if even else 255)
    if brief:  # what a program begins and ends with counts, and is hidden by others beside it
        return Cut(least, Blocks(64, 64, 4, 3, 168), least, by_key)
    return Cut(least, Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3, 168), by_key)


def to_power(size: int) -> int:
    """The next power of two that tl.dot can take."""
    return max(16, 1 << (size - 1).bit_length())
