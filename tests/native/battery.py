"""Calls of attend() in C beside the definition, and how far apart they may be."""

import itertools
from typing import NamedTuple

import torch

from attention_cases import KERNELS, MASKS
from compactattn import ALiBi, Bias, attend
from compactattn.masks import Joined

ULP = torch.finfo(torch.float32).eps
SHAPES = {  # queries, keys, heads, heads of keys, head dim, width of the values
    "square": (33, 33, 4, 2, 6, 5),
    "one": (1, 1, 4, 4, 5, 3),
    "long": (70, 300, 4, 4, 40, 24),
    "short": (5, 63, 4, 1, 17, 64),
    "wide": (9, 1100, 4, 4, 8, 8),
}
EVERY_MASK = MASKS | {
    "alibi, both ways": lambda q, k: ALiBi(),
    "bias of a sample": lambda q, k: Bias(torch.randn(2, 1, 1, k).expand(2, 4, q, k)),
    "boolean of a head": lambda q, k: torch.rand(1, 4, q, k) > 0.4,
}


class Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: torch.Tensor
    do: torch.Tensor


def draw(shape, seed=0, sharp=3.0, dtype=torch.float32):
    """Unit queries and keys, so that fixed bandwidths reach some of them, with a scale for each head."""
    queries, keys, heads, key_heads, dim, width = shape
    random = torch.Generator().manual_seed(seed)
    q, k, v, do = (
        torch.randn(2, *size, generator=random)
        for size in ((heads, queries, dim), (key_heads, keys, dim), (key_heads, keys, width), (heads, queries, width))
    )
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    scale = sharp * torch.linspace(0.3, 1.7, heads)
    return Inputs(*(x.to(dtype) for x in (q, k, v)), scale, do.to(dtype))


def cast(mask, dtype):
    """A mask whose bias is in another dtype."""
    if isinstance(mask, Joined):
        return Joined(tuple(cast(part, dtype) for part in mask.parts))
    return Bias(mask.tensor.to(dtype)) if isinstance(mask, Bias) else mask


def run(inputs, kernel, mask, dropout=0.0, backend="native", readout=True):
    """The output, the readout and every gradient of a call."""
    q, k, v, scale = (x.detach().clone().requires_grad_() for x in inputs[:4])
    torch.manual_seed(5)
    out, told = attend(q, k, v, kernel, scale=scale, mask=mask, dropout=dropout, backend=backend, return_readout=True)
    out.backward(inputs.do)
    found = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad, "dscale": scale.grad}
    return found | ({"threshold": told.threshold, "support": told.support.double()} if readout else {})


def define(inputs, kernel, mask, dropout=0.0, dtype=torch.float64):
    """The same by the reference, in fp64 unless another dtype is given."""
    return run(Inputs(*(x.to(dtype) for x in inputs)), kernel, cast(mask, dtype), dropout, "reference")


def error(found, truth, inputs, name):
    """How far a result is off, relative to its size; ∞ where one of the two is finite and the other not."""
    a, b = found[name].double(), truth[name].double()
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(7.0), b[~finite].nan_to_num(7.0)):
        return float("inf")
    # dscale is a sum of terms of either sign, which are what rounding sees
    size = (truth["dq"].double() * inputs.q.double()).abs().sum() if name == "dscale" else b[finite].norm()
    return float((a - b)[finite].norm() / (size + 1e-3))


def worst_excess(inputs, kernel, mask, dropout=0.0):
    """(excess, name) of the result that is furthest beyond what it may be off.

    Outputs may be off by twice, gradients by three times as much as those of the reference in fp32, and 4 ulp: at most
    0.50 of that is needed, by the support of the Gaussian under ALiBi, where weights underflow.
    """
    truth, plain = define(inputs, kernel, mask, dropout), define(inputs, kernel, mask, dropout, torch.float32)
    found = run(inputs, kernel, mask, dropout)
    return max(
        (error(found, truth, inputs, name) / ((3 if name[0] == "d" else 2) * error(plain, truth, inputs, name) + 4 * ULP), name)
        for name in found
    )


def cases():
    """(kernel, shape, mask, dropout) of everything that is held against the definition."""
    for kernel, shape, mask in itertools.product(KERNELS, SHAPES, EVERY_MASK):
        if mask != "packed" or SHAPES[shape][1] >= 3:
            yield kernel, shape, mask, 0.3 if (len(kernel) + len(mask)) % 2 else 0.0


def check(kernel, shape, mask, dropout):
    torch.manual_seed(1)
    queries, keys, *_ = SHAPES[shape]
    return worst_excess(draw(SHAPES[shape]), kernel, cast(EVERY_MASK[mask](queries, keys), torch.float32), dropout)
