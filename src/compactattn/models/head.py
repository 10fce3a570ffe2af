"""The scaled output layer and its cross-entropy in one step: logits exist for one chunk of tokens at a time.

Never are more than CHUNK of them held, 2^28 on a GPU and 2^24 on a CPU, however large batch and vocabulary are; what is smaller
than that is one chunk, and on a CPU those of bf16 stand beside their copy in fp32. A token with more logits is a chunk alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from compactattn.fused.launch import HAVE_TRITON, is_new

CHUNK = {"cpu": 2**24, "cuda": 2**28}  # logits held at once
ALIGNED = 64  # words to which a GPU pads the vocabulary


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, scale: float) -> Tensor:
    """Σ over counted tokens of −log softmax(scale · W h)_target, in fp32 (fp64 for fp64).

    Shapes: hidden (N, C), weight (V, C), targets and counted (N,). The gradients are made with the loss, chunk by
    chunk, so that no logits have to be kept. Under autocast the products run in its dtype; the gradient of the weight is
    summed in fp32 all the same.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    needed = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _head_loss(hidden, weight, targets, counted, scale, needed)[0]


def fused(hidden: Tensor) -> bool:
    """Whether the Triton kernel does the rows."""
    return HAVE_TRITON and hidden.is_cuda and hidden.dtype != torch.float64 and is_new(hidden.device.index or 0)


@custom_op("compactattn::head_loss", mutates_args=())
def _head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, scale: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=work)
    dhidden = torch.empty_like(hidden) if gradients else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=work) if gradients else hidden.new_empty(0, dtype=work)
    words, fast = len(weight), fused(hidden)
    # rows of logits that start on no multiple of 16 bytes would slow the products down
    matrix = pad(weight.to(hidden.dtype), (0, 0, 0, -words % ALIGNED)) if fast else weight.to(hidden.dtype)
    most = max(1, CHUNK.get(hidden.device.type, CHUNK["cpu"]) // len(matrix))  # tokens in a chunk
    count = -(-len(hidden) // most) or 1
    size = max(1, -(-len(hidden) // count))  # chunks of one size: a short one would cost as much
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), size):
            h, target, counts = (x[start : start + size] for x in (hidden, targets, counted))
            losses, slope = (_pull_fused if fast else _pull_rows)(h @ matrix.T, words, target, counts, scale, gradients)
            total += losses.sum()
            if gradients:
                dhidden[start : start + size] = slope @ matrix
                dweight += (slope.T @ h)[:words]
    return total, dhidden, dweight


def _pull_rows(
    logits: Tensor, words: int, targets: Tensor, counted: Tensor, scale: float, gradients: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row and its gradient by the logits."""
    s = logits.to(torch.promote_types(logits.dtype, torch.float32)).mul_(scale)
    target, counts = targets[:, None], counted[:, None].to(s.dtype)
    normaliser = s.logsumexp(-1, keepdim=True)
    losses = (normaliser - s.gather(1, target)) * counts
    if gradients:
        s.sub_(normaliser).exp_().scatter_add_(1, target, s.new_full((), -1.0).expand_as(target)).mul_(counts * scale)
    return losses, s.to(logits.dtype)


def _pull_fused(
    logits: Tensor, words: int, targets: Tensor, counted: Tensor, scale: float, gradients: bool
) -> tuple[Tensor, Tensor]:
    from compactattn.fused import cross_entropy

    return cross_entropy.rows(logits, words, targets, counted, scale, gradients), logits


@_head_loss.register_fake
def _(hidden, weight, targets, counted, scale, gradients):  # type: ignore[no-untyped-def]
    work = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_empty((), dtype=work)
    if not gradients:
        return total, hidden.new_empty(0), hidden.new_empty(0, dtype=work)
    return total, torch.empty_like(hidden), torch.empty_like(weight, dtype=work)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, dhidden, dweight = output
    ctx.dtype = inputs[1].dtype
    ctx.save_for_backward(dhidden, dweight)


def _pull(ctx: Any, dtotal: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    dhidden, dweight = ctx.saved_tensors
    return dhidden * dtotal.to(dhidden.dtype), (dweight * dtotal).to(ctx.dtype), None, None, None, None


_head_loss.register_autograd(_pull, setup_context=_save)
