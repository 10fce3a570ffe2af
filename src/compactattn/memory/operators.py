"""The fused keys and values as operators of torch.library, so that torch.compile sees no graph break.

Triton is imported at the first launch and not before. Shapes: (B, H, T, D). What attention takes lies so in memory, as its
gradients do: a compiled graph copies a gradient that lies otherwise. Gradients of x lie as (B, T, H, D).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from compactattn.fused.launch import HAVE_TRITON, is_new

LARGEST_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def usable(x: Tensor) -> bool:
    """Whether the fused operators can do the work."""
    if not (HAVE_TRITON and x.is_cuda and x.dtype in DTYPES and x.shape[3] <= LARGEST_HEAD_DIM):
        return False
    return is_new(x.device.index or 0)


def _like(x: Tensor, by_time: bool) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) if by_time else x.new_empty(x.shape)


@custom_op("compactattn::context_keys", mutates_args=())
def fused_keys(x: Tensor, leak: Tensor, state: Tensor | None, by_time: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Unit keys, which lie `by_time` as (B, T, H, D), the norms they were divided by, and the average at their end."""
    from compactattn.fused import leaky

    return leaky.keys(x, leak, state, by_time)


@fused_keys.register_fake
def _(x, leak, state, by_time=False):  # type: ignore[no-untyped-def]
    norms, last = (x.new_empty(shape, dtype=torch.float32) for shape in (x.shape[:3], (*x.shape[:2], x.shape[3])))
    return _like(x, by_time), norms, last


@custom_op("compactattn::context_keys_backward", mutates_args=())
def _keys_backward(
    dkeys: Tensor, dlast: Tensor, keys: Tensor, norms: Tensor, leak: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from compactattn.fused import leaky

    return leaky.keys_gradient(dkeys, dlast, keys, norms, leak, state)


@_keys_backward.register_fake
def _(dkeys, dlast, keys, norms, leak, state):  # type: ignore[no-untyped-def]
    return _like(keys, by_time=True), norms.new_empty(norms.shape[1]), norms.new_empty(0 if state is None else state.shape)


def _save_keys(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, leak, state, _ = inputs
    keys, norms, _ = output
    ctx.save_for_backward(keys, norms, leak, state)


def _pull_keys(ctx: Any, dkeys: Tensor, _: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
    *_, leak, state = ctx.saved_tensors
    dx, dleak, dstate = _keys_backward(dkeys, dlast, *ctx.saved_tensors)
    return dx, dleak.to(leak.dtype), None if state is None else dstate.to(state.dtype), None


fused_keys.register_autograd(_pull_keys, setup_context=_save_keys)


@custom_op("compactattn::peek_values", mutates_args=())
def fused_values(x: Tensor, mix: Tensor, gain: Tensor) -> Tensor:
    """gain · unit(mix · x_t + (1 − mix) · x_{t+1})."""
    from compactattn.fused import leaky

    return leaky.values(x, mix, gain)


@fused_values.register_fake
def _(x, mix, gain):  # type: ignore[no-untyped-def]
    return _like(x, by_time=False)


@custom_op("compactattn::peek_values_backward", mutates_args=())
def _values_backward(dv: Tensor, x: Tensor, mix: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from compactattn.fused import leaky

    return leaky.values_gradient(dv, x, mix, gain)


@_values_backward.register_fake
def _(dv, x, mix, gain):  # type: ignore[no-untyped-def]
    return (
        _like(x, by_time=True),
        mix.new_empty(mix.shape, dtype=torch.float32),
        gain.new_empty(gain.shape, dtype=torch.float32),
    )


def _save_values(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _pull_values(ctx: Any, dv: Tensor) -> tuple[Tensor, ...]:
    _, mix, gain = ctx.saved_tensors
    dx, dmix, dgain = _values_backward(dv, *ctx.saved_tensors)
    return dx, dmix.to(mix.dtype), dgain.to(gain.dtype)


fused_values.register_autograd(_pull_values, setup_context=_save_values)
