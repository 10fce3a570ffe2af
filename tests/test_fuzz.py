"""10,000 fuzzed rows per kernel and dtype against the oracle, and the closed-form gradients against the chain rule.

An error is counted in *units*: what one ulp of the working dtype (fp32 for half precision) in each distance s − max s
and in the threshold does to the weight, or to the gradient, to first order. Half precision may round the result as well.
"""

import math
from decimal import Decimal, localcontext
from functools import cache
from itertools import compress
from typing import NamedTuple

import numpy as np
import pytest
import torch

from compactattn import Kernel, Normalising, entmax, parse, weights
from oracle import WIDER, Rows, Truth, judge, order

TEXTS = (
    "gaussian", "epanechnikov", "biweight", "triweight",
    "entmax(1.0000001)", "entmax(1.0001)", "entmax(1.1)", "entmax(1.33)", "entmax(1.7)", "entmax(1.99)",
    "norm_relu", "rectified(r=2)", "rectified(r=1, b=1)", "rectified(r=3, b=0.3)", "rectified(r=1.5, b=2)",
    "ball", "ball(b=1)", "ball(b=2)",
    "relumax(r=1)", "relumax(r=2)", "relumax(r=3)", "relumax(r=1, b=0.7)", "relumax(r=2, b=5)", "relumax(r=1.5, b=0.1)",
    "margin", "margin(b=0.7)", "margin(b=2.5)", "truncated_gaussian", "truncated_gaussian(b=5)",
    "topk_softmax(1)", "topk_softmax(3)", "topk_softmax(64)", "topk_uniform(1)", "topk_uniform(3)", "topk_uniform(64)",
    "topk_epanechnikov(1)", "topk_epanechnikov(3)", "topk_epanechnikov(64)", "topk_biweight(3)", "topk_triweight(64)",
    "topk_rectified(64, r=1.5)",
)  # fmt: skip
KERNELS = {text: parse(text) for text in TEXTS}
ALPHAS = (1 + 2.0**-23, 1.0001, 1.25, 1.5, 1.9, 2.0)
LEARNED = {f"entmax(learned {alpha})": entmax(torch.tensor(alpha, dtype=torch.float64)) for alpha in ALPHAS}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LENGTHS = {
    1: 400, 2: 1200, 3: 1200, 4: 900, 5: 900, 7: 800, 8: 800, 13: 700, 16: 600, 17: 500, 31: 400, 32: 400, 33: 300,
    63: 200, 64: 200, 65: 200, 127: 100, 129: 100, 257: 50, 1000: 30, 1024: 30, 4096: 30, 65536: 16,
}  # fmt: skip
GRADIENT_LENGTHS = {1: 100, 2: 200, 3: 200, 5: 200, 8: 200, 17: 200, 33: 100, 64: 100, 129: 60, 257: 40, 1000: 20}

BAND = 8  # ulp of the working dtype around the threshold within which the support is in doubt
# Most units measured: 1.5, 2.1, 4.6, 6.1. Normalising kernels stop at 4 ulp of the reach; the rest is in the sums.
UNITS = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 10, torch.float64: 10 if WIDER else 20}
# Most ulp of 1 measured in a sum: 1.9, 0.5, 3.6, 6.1; torch.softmax has 4.1 and 6.4 in fp32 and fp64 at 65,536 keys.
SUM_ULP = {torch.float16: 2.5, torch.bfloat16: 1, torch.float32: 8, torch.float64: 10}
GRADIENT_UNITS = 5 if WIDER else 10  # most measured, fp32 and fp64: scores 2.6, 2.3; scale 0.7, 0.7; alpha 1.3, 1.6

every_kernel = pytest.mark.parametrize("kernel", [pytest.param(k, id=name) for name, k in (KERNELS | LEARNED).items()])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# -- the rows ------------------------------------------------------------------------------------


def normal(rng, shape, dtype):
    return rng.normal(size=shape) * rng.choice([1e-3, 0.1, 1, 3, 10, 100], size=(shape[0], 1))


def narrow(rng, shape, dtype):
    """Long rows with every key inside a small reach."""
    reach = shape[1] ** rng.choice([-1, -1 / 2, -1 / 3], size=(shape[0], 1))
    return rng.normal(size=shape) * reach * rng.choice([0.03, 0.1, 0.3, 1], size=(shape[0], 1))


def cosine(rng, shape, dtype):
    return rng.uniform(-1, 1, size=shape)


def quantised(rng, shape, dtype):
    """Many ties, and keys exactly at the thresholds max − 1 and ½."""
    return np.round(rng.normal(size=shape) * rng.choice([0.5, 1, 2], size=(shape[0], 1)) * 4) / 4


def equal(rng, shape, dtype):
    return np.tile(rng.normal(size=(shape[0], 1)) * 3, shape[1])


def signed_zeros(rng, shape, dtype):
    return rng.choice([0.0, -0.0], size=shape)


def huge(rng, shape, dtype):
    return rng.uniform(-1, 1, size=shape) * min(1e30, torch.finfo(dtype).max)


def huge_and_small(rng, shape, dtype):
    big = min(1e30, torch.finfo(dtype).max)
    return np.where(rng.random(shape) < 0.3, rng.choice([-big, big, -big / 3], size=shape), rng.normal(size=shape))


def denormal(rng, shape, dtype):
    return rng.integers(-999, 999, size=shape) * torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def nearly_equal(rng, shape, dtype):
    return nudge(rng, np.tile(rng.uniform(0.1, 30, size=(shape[0], 1)), shape[1]), dtype)


def at_the_edge(rng, shape, dtype):
    """Keys a few ulp from a threshold: at the best score less b, or at a fixed one."""
    best = rng.choice([0.5, 1.0, 1.7, 3.0, 40.0], size=(shape[0], 1))
    anchored = best - rng.choice([0.1, 0.5, 0.7, 1, 2, 2.5, 3, 5], size=shape)
    keys = np.where(rng.random(shape) < 0.5, anchored, rng.choice([0.5, 0.7, -1.0], size=shape))
    keys = nudge(rng, np.where(keys == 0, 0.5, keys), dtype).double().numpy()
    return np.where(np.arange(shape[1]) == rng.integers(shape[1], size=(shape[0], 1)), best, keys)


def geometric(rng, shape, dtype):
    first, ratio = (rng.choice(choices, size=(shape[0], 1)) for choices in ([-20, -1, 1, 20], [0.3, 0.5, 0.9, 0.99]))
    return first * ratio ** rng.permuted(np.tile(np.arange(shape[1]), (shape[0], 1)), axis=1)


def dominated(rng, shape, dtype):
    best = np.arange(shape[1]) == rng.integers(shape[1], size=(shape[0], 1))
    return rng.normal(size=shape) + best * rng.choice([2, 5, 20, 1000], size=(shape[0], 1))


def heavy_tailed(rng, shape, dtype):
    return np.clip(rng.standard_cauchy(size=shape), -6e4, 6e4)


def nudge(rng, values, dtype):
    """Values moved by up to 4 ulp."""
    s = torch.tensor(values).to(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[s.itemsize]
    return (s.view(bits) + torch.tensor(rng.integers(-4, 5, size=values.shape)).to(bits)).view(dtype)


GENERATORS = (
    normal, narrow, cosine, quantised, equal, signed_zeros, huge, huge_and_small, denormal, nearly_equal,
    at_the_edge, geometric, dominated, heavy_tailed,
)  # fmt: skip


def mask(rng, s):
    """Illegal keys in half of the rows: a prefix, a suffix, at random, or all."""
    rows, keys = s.shape
    kind = rng.choice(8, p=[0.5, 0.14, 0.14, 0.14, 0.02, 0.02, 0.02, 0.02], size=(rows, 1))
    place, cut = np.arange(keys), rng.integers(keys + 1, size=(rows, 1))
    scattered = rng.random((rows, keys))
    s[(kind == 1) & (place < cut)] = -math.inf
    s[(kind == 2) & (place >= cut)] = -math.inf
    s[(kind == 3) & (scattered < cut / keys)] = -math.inf
    s[(kind == 4) & (place >= 0)] = -math.inf
    s[(kind == 5) & (scattered < 3 / keys)] = math.inf
    s[(kind == 6) & (scattered < 90 / keys)] = math.inf
    s[(kind == 7) & (scattered <= np.minimum(scattered.min(-1, keepdims=True), 2 / keys))] = math.nan
    return s


class Batch(NamedTuple):
    """Rows of equal length, every kind among its neighbours."""

    s: torch.Tensor  # (N, K)
    rows: Rows
    kinds: list[str]


def draw(rng, dtype, lengths, generators):
    batches = []
    for place, (keys, count) in enumerate(lengths.items()):
        kinds = (np.arange(count) + place) % len(generators)
        s = torch.empty(count, keys, dtype=dtype)
        for kind, generate in enumerate(generators):
            chosen = np.flatnonzero(kinds == kind)
            s[chosen] = torch.as_tensor(generate(rng, (len(chosen), keys), dtype)).to(dtype)
        s = torch.tensor(mask(rng, s.double().numpy())).to(dtype)
        batches.append(Batch(s, Rows(s), [generators[kind].__name__ for kind in kinds]))
    return batches


@cache
def fuzzed(dtype):
    """More than 10,000 rows, every kind at every length."""
    return draw(np.random.default_rng(DTYPES.index(dtype)), dtype, LENGTHS, GENERATORS)


@cache
def smooth(dtype):
    """Rows on which a gradient is defined: no infinite score."""
    rng = np.random.default_rng(100 + DTYPES.index(dtype))
    batches = draw(rng, dtype, GRADIENT_LENGTHS, (normal, narrow, cosine, quantised, equal, dominated))
    finite = [(s < math.inf).all(-1) | s.isnan().any(-1) for s, _, _ in batches]
    return [
        Batch(s[some], Rows(s[some]), list(compress(kinds, some))) for (s, _, kinds), some in zip(batches, finite, strict=True)
    ]


# -- the judgement -------------------------------------------------------------------------------


def working(dtype):
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32)


def wide(x, rows):
    return x.detach().double().numpy().astype(rows.wide)


def holds(dtype, *values):
    """Whether the working dtype has exactly these numbers."""
    return all(torch.tensor(value, dtype=getattr(torch, working(dtype).dtype)).item() == value for value in values)


def doubt(truth: Truth, kernel: Kernel, dtype):
    """(N, K) keys within a few ulp of the threshold, and how far that is (N, 1).

    Not in doubt: a key exactly at an exactly known threshold, which is outside, and which keys are the k nearest.
    """
    ulp = BAND * working(dtype).eps
    step = ulp * (truth.reach + abs(truth.theta))
    cliff = truth.r in (0, math.inf)
    if cliff and truth.rule in ("normalising", "nearest"):
        return np.zeros_like(truth.inside), np.zeros_like(step)
    if cliff and truth.rule == "fixed":  # this threshold does not depend on the best score
        step = np.full_like(step, ulp * abs(truth.theta))
    exact = truth.rule != "normalising" and holds(dtype, truth.theta, getattr(kernel.rule, "b", 0))
    return (np.abs(truth.depth) <= step) & ~(exact & (truth.depth == 0)), step


@np.errstate(all="ignore")
def compare(got, truth: Truth, kernel: Kernel, dtype):
    """Errors of weights in units (N, K), of their sums in ulp of 1 (N, 1), and the keys wrongly in or out (N, K)."""
    work, out = working(dtype), torch.finfo(dtype)
    floor = max(work.tiny, out.tiny * out.eps)  # below it a weight may vanish
    stored = out.eps / 2 if out.bits < 32 else 0
    unsure, step = doubt(truth, kernel, dtype)
    w, across = truth.w, 0
    if truth.r in (0, math.inf):  # a cliff: take the side that was taken
        w = truth.weights(np.where(unsure & ~truth.uniform, got > 0, truth.inside))
    else:  # a slope: as much as it rises across the band
        rise = (2 * step / truth.reach) ** truth.r / truth.mass(truth.inside)
        across = np.where(unsure & ~truth.uniform, rise, 0)
    error = np.abs(got - w) - w * stored - across - floor
    error = np.maximum(error, 0) / np.maximum(work.eps * w * truth.sensitivity, work.tiny)
    sums = np.abs(got.sum(-1, keepdims=True) - ~truth.frame.empty) / out.eps
    wrong = ((w > 4 * floor) & (got == 0)) | (~truth.inside & (got != 0))
    # nothing, or just about the best key, is within reach: either is right
    either = (truth.rule == "fixed") & (np.abs(truth.reach) <= step) & unsure.any(-1, keepdims=True)
    skip = either | truth.nan
    return np.where(skip, 0, error), np.where(truth.nan, 0, sums), wrong & ~unsure & ~skip


def first(claim, batch, bad, got, want):
    """A line on the first row that breaks a claim, or nothing."""
    rows = np.flatnonzero(np.broadcast_to(bad, got.shape).any(-1))
    if not len(rows):
        return []
    row = rows[0]
    keys = np.flatnonzero(np.broadcast_to(bad, got.shape)[row])[:3]
    best = batch.s[row].max().item()
    return [
        f"{claim}: {len(rows)} of {len(got)} rows with {got.shape[1]} keys; the first is row {row} ({batch.kinds[row]}), "
        f"keys {keys.tolist()}: scores {batch.s[row, keys].tolist()}, best {best!r}, "
        f"got {got[row, keys].tolist()}, not {want[row, keys].tolist()}"
    ]


# -- the claims ----------------------------------------------------------------------------------


@every_dtype
@every_kernel
def test_weights_agree_with_the_oracle_on_every_fuzzed_row(kernel, dtype):
    assert sum(len(batch.s) for batch in fuzzed(dtype)) >= 10_000
    faults = []
    for batch in fuzzed(dtype):
        truth = judge(batch.rows, kernel)
        w = weights(batch.s, kernel)
        assert w.dtype == dtype
        got, want = wide(w, batch.rows), truth.w
        faults += first("NaN in gives NaN in that row only", batch, np.isnan(got) != truth.nan, got, want)
        got = np.where(np.isnan(got), np.where(truth.nan, 0, -1), got)
        error, sums, support = compare(got, truth, kernel, dtype)
        faults += first("weights are not negative", batch, got < 0, got, want)
        faults += first(f"within {UNITS[dtype]} units", batch, error > UNITS[dtype], got, want)
        faults += first(f"the sum is 1, or 0, to {SUM_ULP[dtype]} ulp", batch, sums > SUM_ULP[dtype], got, want)
        faults += first("the support is right", batch, support, got, want)
    assert not faults, "\n".join(faults[:9])


@every_kernel
def test_no_keys_give_no_weights(kernel):
    assert weights(torch.zeros(3, 0), kernel).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@every_kernel
def test_scale_multiplies_the_scores_and_is_the_score_of_a_perfect_match(kernel, dtype):
    faults = []
    for batch in smooth(dtype):
        scaled = Rows(batch.s.float() * 2.5)
        truth = judge(scaled, kernel, perfect=2.5)
        got = np.where(truth.nan, 0, wide(weights(batch.s, kernel, scale=2.5), scaled))
        error, _, support = compare(got, truth, kernel, dtype)
        faults += first("scaled weights", batch, (error > UNITS[dtype]) | support, got, truth.w)
    assert not faults, "\n".join(faults[:9])


# -- the gradients -------------------------------------------------------------------------------


@np.errstate(all="ignore")
def kinks(truth: Truth, kernel: Kernel, dtype):
    """(N, 1) rows with a key so close to the threshold, or to the best of Anchored, that its side is in doubt."""
    unsure, step = doubt(truth, kernel, dtype)
    if truth.rule == "anchored":
        unsure = unsure | (~truth.frame.best & (truth.frame.x >= -step))
    return unsure.any(-1, keepdims=True) | truth.nan


def given_gradients(s, kernel, alpha, dw):
    """{input: gradient}, each row with its own scale and, where it is learned, its own alpha."""
    given = {"scores": s[:, None], "scale": torch.ones(len(s), dtype=s.dtype)}
    if alpha is not None:
        given["alpha"] = torch.full((len(s),), alpha, dtype=torch.float64)
    given = {name: x.clone().requires_grad_() for name, x in given.items()}
    w = weights(given["scores"], kernel if alpha is None else entmax(given["alpha"]), scale=given["scale"])
    found = torch.autograd.grad(w, list(given.values()), dw[:, None])
    return {name: x.reshape(len(s), -1) for name, x in zip(given, found, strict=True)}


# with alpha one fp32 ulp above 1, r is 8e6: the oracle's own alpha gradient then has lost the digits that fp64 asks for
GRADIENTS = [
    (name, dtype)
    for name, kernel in (KERNELS | LEARNED).items()
    for dtype in (torch.float32, torch.float64)
    if not (kernel.learned and dtype == torch.float64 and order(kernel) > 1e6)
]


@pytest.mark.parametrize(("name", "dtype"), GRADIENTS, ids=str)
def test_gradients_agree_with_the_chain_rule(name, dtype):
    kernel = (KERNELS | LEARNED)[name]
    alpha = dict(zip(LEARNED, ALPHAS, strict=True)).get(name)
    rng, eps, faults, skipped = np.random.default_rng(7), torch.finfo(dtype).eps, [], 0
    for batch in smooth(dtype):
        dw = torch.tensor(rng.normal(size=batch.s.shape)).to(dtype)
        truth = judge(batch.rows, kernel)
        found = given_gradients(batch.s, kernel, alpha, dw)
        want = truth.gradients(wide(dw, batch.rows))
        kink = kinks(truth, kernel, dtype)
        skipped += kink.sum()
        for given, gradient in found.items():
            true, unit = want[given]
            got = wide(gradient, batch.rows)
            right = np.abs(got - true) <= GRADIENT_UNITS * eps * unit + 1e-30  # False where got is NaN
            shown = (np.broadcast_to(each, batch.s.shape) for each in (~right & ~kink, got, true))
            faults += first(f"gradient of {given} within {GRADIENT_UNITS} units", batch, *shown)
    assert not faults, "\n".join(faults[:9])
    assert skipped < 0.1 * sum(len(batch.s) for batch in smooth(dtype))


# -- the oracle itself ---------------------------------------------------------------------------

NORMALISING = [name for name, kernel in KERNELS.items() if isinstance(kernel.rule, Normalising) and order(kernel) < math.inf]


def exactly(x):
    """A long double as a decimal."""
    return Decimal(float(x)) + Decimal(float(x - np.longdouble(float(x))))


@pytest.mark.parametrize("name", NORMALISING)
def test_the_oracle_is_more_exact_than_what_it_judges(name):
    """Σ [(ρ + x)/r]₊^r passes 1 within a few ulp of the oracle's ρ, in 50 digits, and the weights follow."""
    kernel = KERNELS[name]
    r, slack = Decimal(order(kernel)), Decimal(2) ** (-60 if WIDER else -49)
    for s, rows, kinds in fuzzed(torch.float64):
        truth = judge(rows, kernel)
        plain = ~(truth.frame.empty | truth.nan)[:, 0] & (s < math.inf).all(-1).numpy()
        for row in np.flatnonzero(plain)[: {5: 8, 13: 8, 33: 3, 257: 1}.get(s.shape[1], 0)]:
            with localcontext(prec=50):
                keys = [Decimal(key) for key in s[row].tolist()]
                x = [key - max(keys) for key in keys]

                def heights(rho, x=x):
                    return [((rho + each) / r) ** r if rho + each > 0 else Decimal(0) for each in x]

                rho = exactly(truth.reach[row, 0])
                assert sum(heights(rho * (1 - slack))) <= 1 <= sum(heights(rho * (1 + slack))), (kinds[row], row)
                want = heights(rho)
                error = max(abs(exactly(w) - each / sum(want)) for w, each in zip(truth.w[row], want, strict=True))
                assert error < slack, (kinds[row], row)


@pytest.mark.parametrize("name", KERNELS | LEARNED)
def test_the_chain_rule_of_the_oracle_is_the_derivative_of_its_weights(name):
    kernel, step = (KERNELS | LEARNED)[name], 1e-5
    rng = np.random.default_rng(1)
    s, direction, dw = (rng.normal(size=(200, 12)) for _ in range(3))
    ends = [torch.tensor(s + sign * step * direction) for sign in (1, -1)]
    moved = (wide(ends[0], Rows(ends[0])) - wide(ends[1], Rows(ends[1]))) / 2
    rows = Rows(torch.tensor(s))
    truth = judge(rows, kernel)
    ds, dperfect = truth.pull(dw)
    alpha = 1 + 1 / order(kernel) if truth.r else 0.0
    changes = {"scores": ([judge(Rows(end), kernel) for end in ends], (ds * moved).sum(-1))}
    if truth.rule == "fixed":
        changes["perfect"] = [judge(rows, kernel, 1 + sign * step) for sign in (1, -1)], dperfect[:, 0] * step
    if truth.rule == "normalising" and 1 + 2 * step < alpha < 2:
        near = [judge(rows, entmax(alpha + sign * step)) for sign in (1, -1)]
        changes["alpha"] = near, truth.pull_alpha(dw)[:, 0] * step
    for given, ((up, down), want) in changes.items():
        far = ((truth.depth == 0) | (np.abs(truth.depth) > 100 * step)).all(-1)  # from a kink
        smooth = far & (up.inside == down.inside).all(-1) & (up.frame.order == down.frame.order).all(-1)
        got = (dw * (up.w - down.w)).sum(-1) / 2
        assert smooth.sum() > 150
        assert np.abs(got - want)[smooth].max() < 1e-5 * step, given
