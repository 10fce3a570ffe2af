"""Cross-entropy of rows of logits, whose gradient takes their place: the Triton twin of the loop in models/head.py.

Shapes: N tokens, V words.
"""

# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-def"
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOOR = tl.constexpr(-1e30)  # below every logit, and finite: −inf − −inf is no number


@triton.jit
def cross_entropy(p_logits, p_targets, p_counted, p_losses, scale, stride, V, GRADIENT: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row: a running maximum and sum in every lane, then the gradient, which is 0 in the padding."""
    row = tl.program_id(0).to(tl.int64)
    p_row = p_logits + row * stride
    o = tl.arange(0, BLOCK)
    target, counted = tl.load(p_targets + row), tl.load(p_counted + row).to(tl.float32)
    known = (target >= 0) & (target < V)  # a word that is none has no loss
    aim = tl.load(p_row + target, mask=known, other=float("nan")).to(tl.float32) * scale
    b_peak, b_mass = tl.full((BLOCK,), FLOOR, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        b_s = tl.load(p_row + start + o, mask=start + o < V, other=float("-inf")).to(tl.float32) * scale
        b_top = tl.maximum(b_peak, b_s)
        b_mass = b_mass * tl.exp(b_peak - b_top) + tl.exp(b_s - b_top)
        b_peak = b_top
    peak = tl.max(b_peak, 0)
    mass = tl.sum(b_mass * tl.exp(b_peak - peak), 0)
    tl.store(p_losses + row, (peak - aim + tl.log(mass)) * counted)
    if GRADIENT:
        for start in range(0, stride, BLOCK):
            b_s = tl.load(p_row + start + o, mask=start + o < V, other=float("-inf")).to(tl.float32) * scale
            b_ds = tl.exp(b_s - peak) / mass - tl.where(start + o == target, 1.0, 0.0)
            tl.store(p_row + start + o, b_ds * (counted * scale), mask=start + o < stride)


def rows(logits: Tensor, words: int, targets: Tensor, counted: Tensor, scale: float, gradient: bool) -> Tensor:
    """(N,) losses of logits (N, V or more), 0 where not counted; with `gradient` the logits become their own gradient."""
    losses = logits.new_empty(len(logits), dtype=torch.float32)
    with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
        cross_entropy[(len(logits),)](
            logits, targets.contiguous(), counted.contiguous(), losses, scale, logits.stride(0), words,
            GRADIENT=gradient, BLOCK=min(4096, triton.next_power_of_2(words)), num_warps=8,
        )  # fmt: skip
    return losses
