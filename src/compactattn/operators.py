"""The op for torch.library: two operators forward and two backward, so that torch.compile sees four nodes and no graph break.

What they are given has been checked, and the backend chosen. Shapes as in reference.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from compactattn import reference, rows
from compactattn.derivatives import differentiable, refuse_second
from compactattn.dropout import Dropout
from compactattn.fused import launch
from compactattn.kernels import RULES, Fixed, Nearest, decode_rule
from compactattn.masks import View
from compactattn.native import launch as native
from compactattn.rows import accumulator


def _full_precision(x: Tensor) -> torch.autocast:
    """Inside an operator, autocast has had its say: what is in fp32 there is meant to be."""
    return torch.autocast(x.device.type, enabled=False)


@custom_op("compactattn::attend", mutates_args=())
def attend_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    at: Tensor,
    lo: Tensor,
    hi: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    orders: Tensor | None,
    r: float,
    rule: str,
    value: float,
    readout: bool,
    fused: bool = False,
    grad: bool = True,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    natively: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    view = View((*q.shape[:3], k.shape[2]), at, lo, hi, allowed, bias, slopes)
    drop = None if seed is None else Dropout(dropout, seed)
    if fused:
        found, kept = launch.estimate(q, k, v, scale, view, (r, rule, value), orders, readout, grad, drop)
        return found.out, found.threshold, found.support, *kept
    order = r if orders is None else orders
    with _full_precision(q):
        if natively:
            found, reach = native.estimate(q, k, v, scale, view, (r, rule, value), readout, grad, drop)
        else:
            found, reach = reference.estimate(q, k, v, scale, view, decode_rule(rule, value), order, readout, drop, grad)
    return *found, reach, q.new_empty(0), q.new_empty(0)


@attend_operator.register_fake
def _(q, k, v, scale, at, lo, hi, allowed, bias, slopes, orders, r, rule, value, readout, fused=False, grad=True, *_):  # type: ignore[no-untyped-def]
    shape = q.shape[:3] if readout else (0, 0, 0)
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    work = accumulator(q.dtype)
    reach = q.new_empty(q.shape[:3] if grad else (0, 0, 0), dtype=work)
    kept = launch.kept_like(q, k, v, (r, rule, value), grad) if fused else (reach, q.new_empty(0), q.new_empty(0))
    return out, q.new_empty(shape, dtype=work), q.new_empty(shape, dtype=torch.int32), *kept


@custom_op("compactattn::attend_backward", mutates_args=())
def attend_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    at: Tensor,
    lo: Tensor,
    hi: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    slopes: Tensor | None,
    orders: Tensor | None,
    r: float,
    rule: str,
    value: float,
    bias_grad: bool,
    out: Tensor | None = None,
    rows: Tensor | None = None,
    tilt: Tensor | None = None,
    flags: Tensor | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    scale_grad: bool = True,  # what is new comes last: PyTorch keeps compiled graphs on disk that were made before it was there
    natively: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    view = View((*q.shape[:3], k.shape[2]), at, lo, hi, allowed, bias, slopes)
    drop = None if seed is None else Dropout(dropout, seed)
    order = r if orders is None else orders
    if out is not None and rows is not None and tilt is not None and flags is not None:
        kept = launch.Kept(rows, tilt, flags)
        wanted = (bias_grad, scale_grad)
        got = launch.estimate_backward(do, q, k, v, scale, view, (r, rule, value), orders, wanted, out, kept, drop)
    else:
        with _full_precision(q):
            if natively:
                got = native.estimate_backward(do, q, k, v, scale, view, (r, rule, value), rows, drop)
            else:
                got = reference.estimate_backward(
                    do, q, k, v, scale, view, decode_rule(rule, value), order, bias_grad, drop, rows
                )
    none = scale.new_zeros(0)
    dbias = none if got.bias is None else got.bias.to(bias.dtype)  # type: ignore[union-attr]
    dq, dk, dv = (x.contiguous() for x in got[:3])  # as the fake operator promises, whatever the strides of q, k, v
    return dq, dk, dv, got.scale, dbias, none.clone() if got.r is None else got.r


@attend_backward.register_fake
def _(do, q, k, v, scale, at, lo, hi, allowed, bias, slopes, orders, r, rule, value, bias_grad, *rest):  # type: ignore[no-untyped-def]
    dbias = torch.empty_like(bias) if bias_grad else scale.new_empty(0)
    dr = scale.new_empty(0) if orders is None else torch.empty_like(orders)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv, torch.empty_like(scale), dbias, dr


def _save_attend(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # of what is kept there is none, and zeros in its place would be written each time
    *tensors, ctx.r, ctx.rule, ctx.value, _, fused, _, ctx.dropout, seed, ctx.natively = inputs
    kept = (output[0], *output[3:]) if fused else (None, output[3], None, None)
    ctx.save_for_backward(*tensors, *kept, seed)


def _pull_attend(ctx: Any, do: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * len(ctx.needs_input_grad)
    bias_grad, scale_grad = bool(ctx.needs_input_grad[8]), bool(ctx.needs_input_grad[3])
    *tensors, out, rows, tilt, flags, seed = ctx.saved_tensors
    dq, dk, dv, dscale, dbias, dr = _estimate_backward(
        do, *tensors, ctx.r, ctx.rule, ctx.value, bias_grad, out, rows, tilt, flags, ctx.dropout, seed, scale_grad,
        ctx.natively,
    )  # fmt: skip
    orders = dr if ctx.needs_input_grad[10] else None
    dscale, dbias = dscale if scale_grad else None, dbias if bias_grad else None
    return dq, dk, dv, dscale, None, None, None, None, dbias, None, orders, *(None,) * 9


estimate = differentiable(attend_operator, _pull_attend, _save_attend)
_estimate_backward = differentiable(attend_backward, refuse_second)


def _goes_native(scores: Tensor, orders: Tensor | None) -> bool:
    return scores.dtype == torch.float32 and orders is None and scores.numel() > 0 and not native.supports(scores)


@custom_op("compactattn::weights", mutates_args=())
def weights_operator(
    scores: Tensor, perfect: Tensor | None, orders: Tensor | None, r: float, rule: str, value: float
) -> tuple[Tensor, Tensor, Tensor]:
    scores = scores.contiguous()
    if _goes_native(scores, orders):
        return native.weigh_all(scores, (r, rule, value), perfect)
    w, norm, edge = rows.weigh_all(scores, decode_rule(rule, value), r if orders is None else orders, perfect)
    return w, norm, scores.new_zeros(0, dtype=torch.long) if edge is None else edge


@weights_operator.register_fake
def _(scores, perfect, orders, r, rule, value):  # type: ignore[no-untyped-def]
    rows = (scores.shape[0], 1)
    return (
        torch.empty_like(scores, memory_format=torch.contiguous_format),
        scores.new_empty(rows),
        scores.new_empty(rows if RULES[rule] is Nearest else 0, dtype=torch.long),
    )


@custom_op("compactattn::weights_backward", mutates_args=())
def weights_backward(
    dw: Tensor, w: Tensor, norm: Tensor, edge: Tensor, orders: Tensor | None, r: float, rule: str, value: float
) -> tuple[Tensor, Tensor, Tensor]:
    w, dw = w.contiguous(), dw.contiguous()
    if _goes_native(w, orders):
        ds, dperfect, dr = native.pull_all(w, dw, norm, edge, (r, rule, value))
    else:
        of_row = edge if RULES[rule] is Nearest else None
        ds, dperfect, dr = rows.pull_all(w, dw, norm, of_row, decode_rule(rule, value), r if orders is None else orders)
    none = norm.new_zeros(0)
    return ds, none if dperfect is None else dperfect, none.clone() if dr is None else dr


@weights_backward.register_fake
def _(dw, w, norm, edge, orders, r, rule, value):  # type: ignore[no-untyped-def]
    none = norm.new_empty(0)
    dperfect = torch.empty_like(norm) if RULES[rule] is Fixed else none
    return (
        torch.empty_like(w, memory_format=torch.contiguous_format),
        dperfect,
        none.clone() if orders is None else torch.empty_like(norm),
    )


def _save_weights(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, orders, *ctx.code = inputs
    ctx.save_for_backward(*output, orders)


def _pull_weights(ctx: Any, dw: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    ds, dperfect, dr = _weigh_backward(dw, *ctx.saved_tensors, *ctx.code)
    _, fixed, learned, *_ = ctx.needs_input_grad
    return ds, dperfect if fixed else None, dr if learned else None, None, None, None


weigh = differentiable(weights_operator, _pull_weights, _save_weights)
_weigh_backward = differentiable(weights_backward, refuse_second)
