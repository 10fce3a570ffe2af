"""A look at the weights themselves, which the op never stores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from compactattn.attention import Readout, attend
from compactattn.kernels import Kernel
from compactattn.masks import MaskLike

COLUMNS = 128  # keys looked at in one call


class Look(NamedTuple):
    """What each query of one layer attends to."""

    weights: Tensor  # (B, H, Q, K)
    readout: Readout


def look(q: Tensor, k: Tensor, kernel: Kernel, scale: Tensor | None, mask: MaskLike) -> Look:
    """Weights and readout of every query: with one-hot values the estimate is the weights, exact zeros included."""
    one_hot = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*k.shape[:2], -1, -1)
    found = [attend(q, k, v, kernel, scale=scale, mask=mask, return_readout=True) for v in one_hot.split(COLUMNS, dim=-1)]
    return Look(torch.cat([weights for weights, _ in found], -1), found[0][1])
