"""Kernels, masks and inputs for the tests of attend(), and attend() by its definition."""

import math

import torch

from compactattn import ALiBi, Bias, Causal, Packed, Padding, operators, parse
from compactattn.kernels import Fixed, encode
from compactattn.masks import resolve

KERNELS = [
    "gaussian",
    "sparsemax",
    "biweight",
    "triweight",
    "entmax(1.7)",
    "norm_relu",
    "rectified(r=2)",
    "relumax",
    "relumax(r=3, b=2)",
    "topk_softmax(3)",
    "topk_uniform(3)",
    "topk_biweight(4)",
    "ball",
    "margin",
    "truncated_gaussian(1.5)",
]
SHIFT_INVARIANT = [name for name in KERNELS if not isinstance(parse(name).rule, Fixed)]
MASKS = {
    "none": lambda q, k: None,
    "causal": lambda q, k: Causal(),
    "strict": lambda q, k: Causal(offset=1),
    "padding": lambda q, k: Padding([0, k], queries=[q, max(q - 1, 0)]),
    "packed": lambda q, k: Causal(1) & Packed([k // 3, 0, k - k // 3], queries=[q // 2, 0, q - q // 2]),
    "boolean": lambda q, k: torch.rand(2, 1, q, k) > 0.4,
    "bias": lambda q, k: Causal() & Bias(torch.randn(1, 4, q, k, dtype=torch.float64)),
    "alibi": lambda q, k: Causal() & ALiBi(),
}


def draw(queries, keys, heads=4, key_heads=2, dim=6, value_dim=5, dtype=torch.float64):
    shapes = ((2, heads, queries, dim), (2, key_heads, keys, dim), (2, key_heads, keys, value_dim))
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


def dense(q, k, v, kernel, scale=None, mask=None):
    """attend() by the definition: all scores at once, illegal ones −inf, weights, sum."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    view = resolve(mask, (batch, heads, queries, keys), q.device)
    scale = torch.as_tensor(1 / math.sqrt(dim) if scale is None else scale, dtype=q.dtype).expand(heads)
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    s = scale[:, None, None] * (q @ k.mT)
    position = torch.arange(keys)
    if view.bias is not None:
        s = s + view.bias
    if view.slopes is not None:
        s = s - view.slopes[:, None, None] * (view.at[:, None, :, None] - position).abs()
    illegal = (position < view.lo[:, None, :, None]) | (position >= view.hi[:, None, :, None])
    illegal = illegal if view.allowed is None else illegal | ~view.allowed
    s = s.masked_fill(illegal, -math.inf)
    flat = s.flatten(0, -2)
    kernel = parse(kernel)
    perfect = scale[:, None].expand(batch, heads, queries).reshape(-1, 1) if isinstance(kernel.rule, Fixed) else None
    return operators.weights_operator(flat, perfect, None, *encode(kernel))[0].view_as(s) @ v


def gradients(out, inputs, seed=1):
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return torch.autograd.grad(out, inputs, g, allow_unused=True)
