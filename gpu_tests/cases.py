"""Random cases of the op, and how they are judged.

The *error* of a tensor is the norm of its difference from the float64 reference. Ours is held against what plain PyTorch
in the same dtype cannot avoid either, the larger of

- the error of `backend="reference"` on the same inputs in the same dtype,
- the error of rounding the exact answer once to the dtype it is returned in, and
- for dq and dk, which are sums of ds times keys or queries, the error of rounding each ds once to the dtype. It counts where
  the sum cancels, as it does in heads of one or a few dims: plain PyTorch under autocast and every kernel that multiplies
  such numbers err as much, but the reference keeps ds in fp32.

The ratio may be 2 for the output and 3 for a gradient. What is added to the denominator is fp32 rounding alone: 4 eps(fp32)
of the tensor's size, so that fp16 and bf16 have no slack from it, and where the exact gradient vanishes (a single key: size
below 1e-5 of its factors) 4 eps(fp32) of the factors' size.
dscale is one sum over all ds for each head, in which the reference can be right by luck. It may also err as much as if every
ds were rounded once, or erred by the relative error of plain dq, independently. dalpha may err eps of the dtype.

Some kernels jump: their output or gradient is not continuous where a key crosses the edge of the support or two
keys tie for best. A row with such a tie closer than fp32 can see, or with a support so narrow (ρ < 0.01) that its slope
r/ρ swamps all others, is taken out of the case: its do is 0 and its output is not compared. The summary says how many.
"""

import math
import random
from typing import NamedTuple

import torch

from compactattn import ALiBi, Allowed, Bias, Causal, Packed, Padding, attend, entmax, parse
from compactattn.fused.launch import TRACK_FROM
from compactattn.kernels import encode
from compactattn.masks import resolve
from compactattn.reference import Block, score
from gpu_tests.settings import DEVICE, HALF, LONGEST

KERNELS = (
    "gaussian", "sparsemax", "biweight", "triweight", "entmax(1.7)", "entmax(1.3)", "entmax(alpha)", "norm_relu",
    "rectified(r=2, b=1)", "rectified(r=3, b=1)", "rectified(r=1.5, b=1)", "relumax", "relumax(r=2, b=2)", "relumax(r=1.5)",
    "topk_softmax(8)",
    "topk_uniform(9)", "topk_epanechnikov(8)", "topk_biweight(40)", "topk_rectified(12, r=1.5)", "ball", "margin",
    "truncated_gaussian(1.5)",
)  # fmt: skip
DTYPES = tuple(dict.fromkeys((HALF, "float16", "float32")))
SPECIAL = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 2048, 4095, 4096, 4097)
MASKS = ("all", "causal", "strict", "ahead", "far", "started", "padding", "packed", "packed causal")
EPS = torch.finfo(torch.float32).eps


class Layout(NamedTuple):
    """What a kernel is compiled for; lengths are not."""

    dim: int
    value_dim: int
    heads: int
    key_heads: int
    extra: str = ""  # a part of the mask that is no interval


LAYOUTS = (
    Layout(64, 64, 8, 8), Layout(128, 128, 4, 4), Layout(1, 3, 2, 1), Layout(40, 24, 4, 2, "alibi"), Layout(5, 16, 3, 3),
    Layout(64, 64, 4, 4, "bias"), Layout(96, 64, 4, 1), Layout(256, 256, 2, 2), Layout(200, 136, 2, 1),
    Layout(32, 32, 8, 4, "alibi"), Layout(64, 128, 6, 3), Layout(80, 80, 4, 4, "allowed"), Layout(17, 250, 2, 2),
)  # fmt: skip


class Group(NamedTuple):
    """Cases that share their compiled kernels."""

    kernel: str
    dtype: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.kernel}-{self.dtype}-{self.layout.dim}x{self.layout.value_dim}{self.layout.extra}".replace(" ", "")


PER_PAIR = 2  # layouts for each kernel and dtype; together they go round all of them
PAIRS = [(kernel, dtype) for kernel in KERNELS for dtype in DTYPES]
GROUPS = [
    Group(*pair, LAYOUTS[(place * PER_PAIR + turn) % len(LAYOUTS)])
    for place, pair in enumerate(PAIRS)
    for turn in range(PER_PAIR)
]


class Case(NamedTuple):
    group: Group
    batch: int
    queries: int
    keys: int
    mask: str
    sharp: float
    seed: int
    near: bool = False  # neighbours attend to neighbours: many tiles hold no weight

    def __str__(self) -> str:
        near = ", near" if self.near else ""
        return f"{self.group}, batch {self.batch}, {self.queries} × {self.keys}, {self.mask}, sharpness {self.sharp}{near}"


def cases_of(group):
    """One short case, one up to 256, one up to 1,023, and one of the lengths at which tiles are skipped."""
    rng = random.Random(str(group))
    spans = [(1, 16) if rng.random() < 0.4 else (17, 64), (65, 256), (257, TRACK_FROM - 1), (TRACK_FROM, 4097)]
    for seed, (low, high) in enumerate(spans):
        keys = draw_length(rng, low, high)
        queries = keys if rng.random() < 0.6 else draw_length(rng, low, high)
        batch = rng.randint(1, 3) if queries * keys < 2**20 else 1
        near = keys >= TRACK_FROM and rng.random() < 0.7
        yield Case(group, batch, queries, keys, rng.choice(MASKS), rng.choice((1.0, 3.0)), seed, near)


def draw_length(rng, low, high):
    special = [size for size in SPECIAL if low <= size <= high]
    size = (
        rng.choice(special) if special and rng.random() < 0.3 else round(math.exp(rng.uniform(math.log(low), math.log(high))))
    )
    return min(size, LONGEST)


class Drawn(NamedTuple):
    """Everything a call needs, and the leaves that get a gradient."""

    inputs: dict  # q, k, v, scale, and bias and alpha where the case has them
    do: torch.Tensor
    mask: object  # of everything but the bias
    kernel: str
    dropout: float = 0.0


def draw(case):
    """Normal q, k, v and do in the dtype of the case; fp32 scale, one for each head."""
    rng, (kernel, dtype, layout) = random.Random(case.seed), case.group
    generator = torch.Generator(DEVICE).manual_seed(case.seed)
    queries, keys = (case.batch, layout.heads, case.queries), (case.batch, layout.key_heads, case.keys)

    def normal(*shape):
        return torch.randn(shape, device=DEVICE, generator=generator).to(getattr(torch, dtype))

    inputs = {"q": normal(*queries, layout.dim), "k": normal(*keys, layout.dim), "v": normal(*keys, layout.value_dim)}
    if case.near:
        for name in "qk":
            place(inputs[name], case.keys)
    spread = torch.rand(layout.heads, device=DEVICE, generator=generator)
    inputs["scale"] = (0.5 + spread) * case.sharp / math.sqrt(layout.dim)
    if layout.extra == "bias":
        inputs["bias"] = normal(*rng.choice(((1, 1), (case.batch, 1), (1, layout.heads))), case.queries, case.keys)
    if kernel == "entmax(alpha)":
        inputs["alpha"] = 1.1 + 0.8 * torch.rand(layout.heads, device=DEVICE, generator=generator)
    return Drawn(inputs, normal(*queries, layout.value_dim), make_mask(case, rng, generator), kernel)


def place(x, keys):
    """Has half of the features tell where a row stands, the last row at the last key: smoothly, in waves of many lengths."""
    waves = x.shape[-1] // 4
    at = torch.arange(keys - x.shape[-2], keys, device=x.device)[:, None]
    angles = at / keys * 2 * math.pi * 64 ** torch.linspace(0, 1, waves, device=x.device)
    x[..., : 2 * waves] = 2 * torch.cat((angles.cos(), angles.sin()), -1).to(x.dtype)


def make_mask(case, rng, generator):
    """The mask of a case, without its bias."""
    cut_keys, cut_queries = rng.randint(0, case.keys), rng.randint(0, case.queries)
    packed = Packed([cut_keys, case.keys - cut_keys], queries=[cut_queries, case.queries - cut_queries])
    lengths = [rng.randint(0, min(case.queries, case.keys)) for _ in range(case.batch)]
    mask = {
        "all": None, "causal": Causal(), "strict": Causal(1), "ahead": Causal(-3), "far": Causal(case.keys // 3),
        "started": Causal(1, start=rng.randint(0, case.keys)), "padding": Causal() & Padding(lengths, queries=lengths),
        "packed": packed, "packed causal": Causal(1) & packed,
    }[case.mask]  # fmt: skip
    extra = None
    if case.group.layout.extra == "alibi":
        extra = ALiBi()
    elif case.group.layout.extra == "allowed":
        shape = (case.batch, 1, case.queries, case.keys)
        extra = Allowed(torch.rand(shape, device=DEVICE, generator=generator) < 0.7)
    return mask if extra is None else extra if mask is None else mask & extra


def run(drawn, backend, dtype=None):
    """{name: output or gradient}, in the dtype it was returned in; in float64 also ds, the gradient of every score."""
    inputs = {name: x.to(dtype or x.dtype).detach().clone().requires_grad_() for name, x in drawn.inputs.items()}
    q, k, v, scale = (inputs[name] for name in ("q", "k", "v", "scale"))
    kernel, mask = whole(drawn, inputs)
    if dtype == torch.float64:
        inputs["s"] = q.new_zeros((*q.shape[:3], k.shape[2])).requires_grad_()
        mask = Bias(inputs["s"]) if mask is None else mask & Bias(inputs["s"])
    torch.manual_seed(0)  # every run drops the same weights
    out = attend(q, k, v, kernel, scale=scale, mask=mask, dropout=drawn.dropout, backend=backend)
    gradients = torch.autograd.grad(out, list(inputs.values()), drawn.do.to(out.dtype))
    return {"out": out.detach(), **{f"d{name}": x for name, x in zip(inputs, gradients, strict=True)}}


def whole(drawn, inputs):
    """The kernel with its alpha and the mask with its bias."""
    kernel = entmax(inputs["alpha"]) if "alpha" in inputs else parse(drawn.kernel)
    if "bias" not in inputs:
        return kernel, drawn.mask
    return kernel, Bias(inputs["bias"]) if drawn.mask is None else drawn.mask & Bias(inputs["bias"])


def exact_scores(q, k, scale, mask):
    """(B, H, Q, K), in the dtype of q."""
    view = resolve(mask, (*q.shape[:3], k.shape[2]), q.device)
    everything = Block(*(slice(0, size) for size in view.shape))
    return score(q, everything.of_keys(k, q.shape[1] // k.shape[1]), scale, view, everything)


def clear_rows(drawn):
    """(B, H, Q) True where no tie at an edge makes the exact answer depend on the last bits of a score."""
    inputs = {name: x.double() for name, x in drawn.inputs.items()}
    kernel, mask = whole(drawn, inputs)
    r, rule, _ = encode(kernel)
    q, k, v, scale = (inputs[name] for name in ("q", "k", "v", "scale"))
    if rule == "normalising" and r >= 2:
        return torch.ones(q.shape[:3], dtype=torch.bool, device=q.device)
    s = exact_scores(q, k, scale, mask)
    _, readout = attend(q, k, v[..., :1], kernel, scale=scale, mask=mask, backend="reference", return_readout=True)
    theta, peak = readout.threshold[..., None], s.amax(-1, keepdim=True)
    near = 3e-6 * (3 + peak.abs())
    clear = ((s - theta).abs() < near).sum(-1) <= (rule == "nearest")
    if rule == "anchored" and r != math.inf:
        clear &= ((s - peak).abs() < near).sum(-1) <= 1
    if rule in ("fixed", "nearest") and 0 < r < math.inf:
        reach = (peak - theta)[..., 0]
        clear &= (reach <= 0) | (reach > 0.01)
    return clear | (peak[..., 0] == -math.inf)


def judge(drawn, clear, ours, plain, exact):
    """{name: error / what plain PyTorch cannot avoid}."""
    once = round_once(drawn, plain, exact)
    floors = fp32_floors(drawn, exact)
    ratios = {}
    for name in ours:
        got, reference, want = (x[name].double() for x in (ours, plain, exact))
        if name == "out":
            got, reference, want = (x.where(clear[..., None], 0.0) for x in (got, reference, want))
        rounding = (want.to(ours[name].dtype).double() - want).norm()
        unavoidable = max((reference - want).norm(), rounding, once.get(name, 0.0))
        error = (got - want).norm()
        ratios[name] = float(error / (unavoidable + floors[name])) if error != 0 else 0.0
    return ratios


def round_once(drawn, plain, exact):
    """{name: expected error if each ds is rounded once}, and of dscale and dalpha as the docstring above has it."""
    dtype, ds = drawn.do.dtype, exact["ds"]
    q, k, scale = (drawn.inputs[name].double() for name in ("q", "k", "scale"))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    wrong = (ds.to(dtype).double() - ds).mul_(scale[:, None, None]).square_()
    once = {"dq": (wrong @ k.square()).sum().sqrt(), "dk": (wrong.mT @ q.square()).sum().sqrt()}
    rule = "normalising" if "dalpha" in exact else encode(parse(drawn.kernel))[1]
    terms = ds * (q @ k.mT - float(rule == "fixed"))  # what moves the score, and a fixed θ
    relative = float((plain["dq"].double() - exact["dq"]).norm() / exact["dq"].norm().clamp_min(1e-30))
    once["dscale"] = max(torch.finfo(dtype).eps / 2, relative) * terms.norm()
    if "dalpha" in exact:
        once["dalpha"] = torch.finfo(dtype).eps * exact["dalpha"].norm()
    return once


def fp32_floors(drawn, exact):
    """{name: a few roundings in fp32}, of the tensor's size, or of its factors' where that vanishes."""
    q, k, v = (drawn.inputs[name].double().norm(dim=-1).max() for name in ("q", "k", "v"))
    do, scale = drawn.do.double().norm(), drawn.inputs["scale"].max()
    factors = {"dq": scale * do * v * k, "dk": scale * do * v * q, "dbias": do * v, "dscale": do * v * q * k}
    sizes = {name: x.norm() for name, x in exact.items()}
    return {
        name: 4 * EPS * (size if size > 1e-5 * factors.get(name, 0.0) else factors.get(name, 0.0))
        for name, size in sizes.items()
        if name != "ds"
    }
