"""The scaled output layer and its cross-entropy in one step: logits exist for one chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

CHUNK = 2**24  # logits held at once


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, scale: float) -> Tensor:
    """Σ over counted tokens of −log softmax(scale · W h)_target, in fp32 (fp64 for fp64).

    Shapes: hidden (N, C), weight (V, C), targets and counted (N,). The gradients are made with the loss, chunk by
    chunk, so that no (N, V) tensor is ever stored.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    needed = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    return _head_loss(hidden, weight, targets, counted, scale, needed)[0]


@custom_op("compactattn::head_loss", mutates_args=())
def _head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, counted: Tensor, scale: float, gradients: bool
) -> tuple[Tensor, Tensor, Tensor]:
    work = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=work)
    dhidden = torch.empty_like(hidden) if gradients else hidden.new_empty(0)
    dweight = torch.zeros_like(weight, dtype=work) if gradients else hidden.new_empty(0, dtype=work)
    with torch.autocast(hidden.device.type, enabled=False):
        for part in torch.arange(len(hidden), device="cpu").split(max(1, CHUNK // len(weight))):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            h, target, counts = hidden[rows], targets[rows, None], counted[rows, None].to(work)
            logits = (h @ weight.T).to(work).mul_(scale)
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += ((normaliser - logits.gather(1, target)) * counts).sum()
            if gradients:
                slope = logits.sub_(normaliser).exp_()
                slope.scatter_add_(1, target, slope.new_full((), -1.0).expand_as(target))
                slope = slope.mul_(counts * scale).to(h.dtype)
                dhidden[rows] = slope @ weight
                dweight += slope.T @ h
    return total, dhidden, dweight


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
