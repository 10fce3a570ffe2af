"""The op: `attend` and `weights` check what they are given, choose a backend, call an operator and return."""

from __future__ import annotations

import logging
import math
from functools import cache
from numbers import Real
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from compactattn import operators
from compactattn.derivatives import may_need_gradient, refuse_tangents
from compactattn.dropout import check_rate, draw_seed
from compactattn.fused import launch
from compactattn.kernels import Fixed, Kernel, encode, parse, values_are_free
from compactattn.masks import Mask, MaskLike, resolve
from compactattn.native import launch as native
from compactattn.rows import accumulator

log = logging.getLogger("compactattn")

BACKENDS = {
    "auto": "the first that can",
    "fused": "'fused' (Triton)",
    "native": "'native' (compiled C)",
    "reference": "'reference' (blocked PyTorch)",
}
LARGEST_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ScaleError(ValueError):
    """A scale is not positive and finite; in training, where it is learned, the weights have run away."""


class Readout(NamedTuple):
    """What a compact kernel can tell about each query, (B, H, Q); no gradient flows through it."""

    threshold: Tensor  # θ: no key with s < θ has weight; +inf where no key is legal, −inf for the dense Gaussian
    bandwidth: Tensor  # h = √(2 − 2θ/scale) (Prop. 1), of unit q and k without bias alone; for the dense Gaussian 1/√scale
    support: Tensor  # number of keys with non-zero weight; all legal ones where a fixed kernel reached none


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | str = ..., *, scale: float | Tensor | None = None,
    mask: MaskLike = None, dropout: float = 0.0, backend: str = "auto", return_readout: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | str = ..., *, scale: float | Tensor | None = None,
    mask: MaskLike = None, dropout: float = 0.0, backend: str = "auto", return_readout: Literal[True],
) -> tuple[Tensor, Readout]: ...  # fmt: skip
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel | str = "biweight",
    *,
    scale: float | Tensor | None = None,
    mask: MaskLike = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_readout: bool = False,
) -> Tensor | tuple[Tensor, Readout]:
    """Attention as kernel regression: the Nadaraya-Watson estimate of the values at each query (paper Eq. 2).

    o = Σ_i w_i v_i with w = kernel(scale · q·k + bias). A query with no legal key returns exactly 0.

    Args:
        q: queries (B, H, Q, D), D at most 256, in fp16, bf16, fp32 or fp64. Heads come before time: a model that
            holds (B, T, H, D) passes q.transpose(1, 2).
        k: keys (B, H', K, D); H' divides H, and each key head serves H/H' query heads.
        v: values (B, H', K, Dv).
        kernel: a Kernel such as `biweight()`, or its text, such as "relumax(r=2)".
        scale: multiplies q·k; a number, or a tensor of shape () or (H,) with a gradient. Default 1/√D.
            On unit vectors it is β² = 1/h².
        mask: what a query may see; masks join with `&`, as in `Causal(1) & Padding(lengths)`.
            A bare boolean tensor marks the legal keys, a bare float tensor is added to the scores.
        dropout: probability 0 ≤ p < 1 with which each weight is dropped; the others are divided by 1 − p. Which, is a hash
            of (seed, sample, head, query, key) with one seed a call from PyTorch's generator of the device of q, so that
            torch.manual_seed decides it, for every backend alike. Pass 0 outside training.
        backend: "fused" (Triton kernels on a GPU), "native" (C on a CPU, compiled at the first call by the machine's own
            compiler), "reference" (blocked PyTorch anywhere), or "auto", which takes the first that can do the call.
            A backend that is asked for never gives way to another, but that "native" leaves a call in which q, k or v is
            somewhere not finite to the reference.
        return_readout: also return the threshold, bandwidth and support size of every query.

    Returns:
        The estimate (B, H, Q, Dv) in the dtype of q; with `return_readout`, a pair with a Readout.
    """
    kernel = _kernel(kernel)
    q, k, v = _autocast(q, k, v)
    _check_tensors(q, k, v)
    batch, heads, queries, dim = q.shape
    beta = _per_head("scale", 1 / math.sqrt(dim) if scale is None else scale, heads, q)
    orders = _orders(kernel, heads, q)
    dropout = check_rate("dropout", dropout)
    view = resolve(mask, (batch, heads, queries, k.shape[2]), q.device)
    learned = q, k, v, beta, view.bias, orders
    refuse_tangents(*learned)
    bias_grad = view.bias is not None and may_need_gradient(view.bias)
    chosen = _choose(backend, q, natively=native.lacks(orders is not None, bias_grad))
    out, threshold, support, *_ = operators.estimate(
        q, k, v, beta, view.at, view.lo, view.hi, view.allowed, view.bias, view.slopes,
        orders, *encode(kernel), return_readout, chosen == "fused", may_need_gradient(*learned),
        dropout, draw_seed(dropout, q.device), chosen == "native",
    )  # fmt: skip
    if not return_readout:
        return out
    return out, _readout(threshold.detach(), support, beta.detach()[:, None])


def weights(scores: Tensor, kernel: Kernel | str = "biweight", *, scale: float | Tensor = 1.0, dim: int = -1) -> Tensor:
    """Attention weights of scores along `dim`: each row on the simplex, with exact zeros.

    w = kernel(scale · scores), in the dtype of the scores; −inf marks an illegal key, and a row of
    nothing else returns zeros. `scale`, like a tensor alpha, has shape () or (H,), where the heads H are
    the third-last dimension once `dim` is last; kernels of fixed bandwidth read it as 1/h².
    """
    kernel = _kernel(kernel)
    if not isinstance(scores, Tensor) or scores.dtype not in DTYPES:
        given = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores must be a floating-point tensor (fp16, bf16, fp32 or fp64), got {given}")
    if scores.ndim == 0:
        raise ValueError("scores must have at least one dimension, got a single number; use scores[None]")
    if dim not in (-1, scores.ndim - 1):
        return weights(scores.movedim(dim, -1), kernel, scale=scale).movedim(-1, dim)
    heads = scores.shape[-3] if scores.ndim >= 3 else 1
    s = scores.to(accumulator(scores.dtype))
    beta, orders = _per_head("scale", scale, heads, s), _orders(kernel, heads, s)

    def spread(x: Tensor) -> Tensor:
        """(..., 1): one number for each row."""
        return (x[:, None, None] if scores.ndim >= 3 else x).expand(*scores.shape[:-1], 1)

    perfect = spread(beta).reshape(-1, 1) if isinstance(kernel.rule, Fixed) else None
    if isinstance(scale, Tensor) or scale != 1.0:
        illegal = s == -math.inf  # 0 · −inf would make the gradient of the scale NaN
        s = (s.masked_fill(illegal, 0.0) * spread(beta)).masked_fill(illegal, -math.inf)
    flat = s.flatten(0, -2) if scores.ndim > 1 else s[None]
    row_orders = None if orders is None else spread(orders).reshape(-1, 1)
    refuse_tangents(flat, perfect, row_orders)
    w = operators.weigh(flat, perfect, row_orders, *encode(kernel))[0]
    return w.reshape(scores.shape).to(scores.dtype)


# -- the edge: checks and choices ----------------------------------------------------------------


def _kernel(kernel: Kernel | str) -> Kernel:
    if isinstance(kernel, Mask):
        raise TypeError(f"{type(kernel).__name__} is a mask: pass it as mask=, and a kernel before it")
    return kernel if isinstance(kernel, Kernel) else parse(kernel)


def _orders(kernel: Kernel, heads: int, like: Tensor) -> Tensor | None:
    """(heads,) r = 1/(alpha − 1) of a learned alpha; None if r is fixed.

    alpha = 1 takes the largest r, and the gradient of it: for r → ∞ that is the one of alpha → 1⁺, −½ Σ w ln²w (dw − Σ w dw).
    """
    if kernel.profile.alpha is None:
        return None
    alpha = _per_head("alpha", kernel.profile.alpha, heads, like)
    gap = (alpha - 1).clamp(0.0, 1.0)  # unlike what lies beyond, the ends keep their gradient
    return 1 / torch.where(gap == 0, gap + torch.finfo(alpha.dtype).eps, gap)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as autocast wants them: matrix products run in its dtype, thresholds in fp32 all the same."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device == "meta" or not torch.is_autocast_enabled(device):  # which a meta tensor cannot be asked
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype != torch.float64 else x for x in tensors)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.ndim != 4:
            given = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor (batch, heads, time, head_dim), got {given}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {x.dtype}; attend takes fp16, bf16, fp32 or fp64")
        if not 1 <= x.shape[3] <= LARGEST_HEAD_DIM:
            remedy = ": split it into more heads" if x.shape[3] else ""
            raise ValueError(f"{name} has head dim {x.shape[3]}; supported are 1 to {LARGEST_HEAD_DIM}{remedy}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}; convert them, or use autocast")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must share a device, got {q.device}, {k.device}, {v.device}")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError(f"q, k and v must share the batch size; got {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must share heads and time; got {shapes}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must share the head dim; got {shapes}")
    if 0 in (q.shape[1], k.shape[1]) or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of q must be a positive multiple of the heads of k; got {shapes}. Heads come before time")


def _choose(backend: str, q: Tensor, fused: str = "", natively: str = "") -> str:
    """The backend that does the work; `fused` and `natively` say what they have no form of in this call."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return backend
    wanted = backend if backend != "auto" else "native" if q.device.type == "cpu" else "fused"
    # what installing Triton would not mend is told first; and nothing is compiled for a call that cannot be done
    reason = launch.supports(q) or fused if wanted == "fused" else natively or native.supports(q)
    if reason and backend != "auto":
        raise ValueError(f"backend={backend!r} is not available for this call: {reason}; choose one of auto, reference")
    chosen = "reference" if reason else wanted
    if backend == "auto" and not torch.compiler.is_compiling():
        _announce(q.device.type, chosen, reason)
    return chosen


@cache
def _announce(device: str, chosen: str, reason: str) -> None:
    level = logging.WARNING if reason and device != "cpu" else logging.INFO  # a GPU that falls back is told of unasked
    log.log(level, "attend on %s: backend=%s%s", device, BACKENDS[chosen], f", because {reason}" if reason else "")


def _per_head(name: str, x: float | Tensor, heads: int, like: Tensor) -> Tensor:
    """(heads,) from a number, a () or a (heads,) tensor, in the dtype that sums are kept in."""
    dtype = accumulator(like.dtype)
    if isinstance(x, Tensor):
        if x.ndim > 1 or (x.ndim == 1 and x.shape[0] not in (1, heads)):
            raise ValueError(f"{name} must have shape () or ({heads},), one per head; got shape {tuple(x.shape)}")
        if values_are_free(x) and not bool(((x > 0) & x.isfinite()).all()):
            raise ScaleError(f"{name} must be positive and finite, got {x.tolist()}; parameterise it, e.g. as exp(log_{name})")
        return x.to(device=like.device, dtype=dtype).reshape(-1).expand(heads)
    if not isinstance(x, Real):  # NumPy's numbers too
        raise TypeError(f"{name} must be a number or a tensor, got {type(x).__name__}")
    if not 0 < x < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {x!r}")
    return torch.full((heads,), float(x), dtype=dtype, device=like.device)


def _readout(threshold: Tensor, support: Tensor, scale: Tensor) -> Readout:
    """θ, h and the support size (paper Prop. 1: h = √(2 − 2rγτ), and rτ = θ, γ = 1/scale)."""
    # of unit vectors θ ≤ scale but for rounding
    h = (2 - 2 * threshold / scale).clamp_min(0).sqrt()
    h = torch.where(threshold == -math.inf, scale.rsqrt(), h)
    return Readout(threshold, torch.where(threshold == math.inf, 0.0, h), support)
