"""What the tests of the fused paths share: the kernels they go through, how a case is drawn, and how it is judged.

Tolerances are measured: an output may err twice, a gradient three times as much as the reference in the same dtype, and a few
ulp. The reference may add up q·k in the given order of the head dim or in some others: in one it can be right by luck.
"""

import math
from itertools import product
from typing import NamedTuple

import torch

from compactattn import Bias, Mask, attend, entmax, parse
from compactattn.kernels import FAMILY, RULES, encode

ULPS = 4  # 0.26 were needed
ORDERS = 4
KERNELS = [
    "gaussian",
    "epanechnikov",
    "biweight",
    "triweight",
    "entmax(1.7)",
    "norm_relu",
    "rectified(r=2, b=1)",
    "rectified(r=3, b=1)",
    "rectified(r=1.5, b=1)",
    "relumax",
    "relumax(r=1.5)",
    "relumax(r=2, b=2)",
    "topk_softmax(3)",
    "topk_uniform(3)",
    "topk_epanechnikov(4)",
    "topk_biweight(4)",
    "topk_triweight(5)",
    "topk_rectified(4, r=1.5)",
    "ball",
    "margin",
    "truncated_gaussian(1.5)",
]
ONE_OF_EACH_RULE = ["biweight", "norm_relu", "relumax", "topk_epanechnikov(9)"]
assert {member.name for member in FAMILY} == {name.partition("(")[0] for name in KERNELS}
assert {encode(parse(name))[1] for name in ONE_OF_EACH_RULE} == set(RULES)


def kind_of(r):
    """How the kernels compute y^r."""
    return {0: "step", math.inf: "exponential"}.get(r, "whole" if r in (1, 2, 3) else "any")


COMBINATIONS = set(product(RULES, ("step", "whole", "any", "exponential")))
COMBINATIONS -= {("normalising", "step"), ("fixed", "exponential")}  # there is no θ with Σ w = 1; every θ is the same
assert {(rule, kind_of(r)) for r, rule, _ in (encode(parse(name)) for name in KERNELS)} == COMBINATIONS


class Case(NamedTuple):
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int
    blocks: tuple[int, int]  # queries × keys; one tile if that holds all keys
    mask: Mask | None


def draw(case, dtype=torch.float32, seed=0):
    """q, k, v, scale, all with gradients, and do."""
    rng = torch.Generator().manual_seed(seed)
    b, h, hk, t, n, d, dv, *_ = case
    shapes = ((b, h, t, d), (b, hk, n, d), (b, hk, n, dv), (b, h, t, dv))
    q, k, v, do = (torch.randn(shape, generator=rng).to(dtype) for shape in shapes)
    scale = 0.3 + torch.rand(h, generator=rng)
    return tuple(x.requires_grad_() for x in (q, k, v, scale)), do


def run(inputs, do, kernel, mask, backend, dtype=None, dropout=0.0, **learned):
    """{name: output or gradient} in float64; what is learned is a bias or an alpha. Every run drops the same weights."""
    inputs = dict(zip(("q", "k", "v", "scale"), inputs, strict=True)) | learned
    inputs = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    q, k, v, scale = (inputs[name] for name in ("q", "k", "v", "scale"))
    if "bias" in inputs:
        mask = Bias(inputs["bias"]) if mask is None else mask & Bias(inputs["bias"])
    kernel = entmax(inputs["alpha"]) if "alpha" in inputs else kernel
    torch.manual_seed(0)
    out = attend(q, k, v, kernel, scale=scale, mask=mask, dropout=dropout, backend=backend)
    found = (out, *torch.autograd.grad(out, list(inputs.values()), do.to(out.dtype)))
    return dict(zip(("out", *(f"d{name}" for name in inputs)), (x.detach().double() for x in found), strict=True))


def run_plain(inputs, do, kernel, mask, **options):
    """The reference in the dtype of the inputs, with the head dim in the given order and in some others."""
    q, k, v, scale = inputs
    yield run(inputs, do, kernel, mask, "reference", **options)
    for seed in range(ORDERS):
        order = torch.randperm(q.shape[3], generator=torch.Generator().manual_seed(seed))
        turned = run((q.detach()[..., order], k.detach()[..., order], v, scale), do, kernel, mask, "reference", **options)
        yield turned | {name: turned[name][..., order.argsort()] for name in ("dq", "dk")}


def check(inputs, do, kernel, mask, **options):
    exact = run(inputs, do, kernel, mask, "reference", torch.float64, **options)
    plain = list(run_plain(inputs, do, kernel, mask, **options))
    ours = run(inputs, do, kernel, mask, "fused", **options)
    eps = torch.finfo(inputs[0].dtype).eps
    for name, want in exact.items():
        error, *others = ((x[name] - want).norm() for x in (ours, *plain))
        allowed = max(others)
        size = want.norm() if name != "dscale" else exact["dq"].norm() * inputs[0].detach().double().norm()
        if name == "dbias" and want.numel() < do[..., 0].numel() * inputs[1].shape[2]:
            # the sums cancel: a number added to a whole row changes nothing
            size = do.double().norm() * inputs[2].detach().double().norm(dim=-1).max()
        factor = 2 if name == "out" else 3
        assert error <= factor * allowed + ULPS * eps * size, f"{name}: {error:.2e}, allowed {allowed:.2e}, size {size:.2e}"
