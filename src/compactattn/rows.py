"""The definition, first half: scores → weights, in plain PyTorch, with closed-form gradients.

Every kernel of the family is evaluated in one form. With x_i = s_i − max s ≤ 0,

    w_i = K(1 + x_i / ρ) / Z,    Z = Σ K,    K(y) = y₊^r     (or exp(x_i) for the Gaussian),

where the *reach* ρ = max s − θ is how far below the best score the support extends. A support rule
only has to give ρ. Z ≥ 1 because the best key contributes 1, so nothing over- or underflows, and
r → ∞ at ρ = r is exp(x): α-entmax runs into softmax with no special case.

Shapes: (..., K) scores of K keys, a row each along the last dimension; (..., 1) what belongs to a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from compactattn.kernels import Anchored, Fixed, Nearest, Normalising, Rule

WHOLE = (1.0, 2.0, 3.0)  # powers that need no logarithm
MOST_TURNS = 64  # of Newton; the hardest row of 65,536 scores has needed 14
CPU_BLOCK = 2**20  # a few blocks of fp32 stay inside a CPU's cache
GPU_BLOCK = 2**25  # one block fills a GPU


Order = float | Tensor  # r of the profile: 0 step, ∞ Gaussian; a tensor that broadcasts to the rows is learned


class Row(NamedTuple):
    """What a rule found out about each row of scores; every field is (..., 1)."""

    peak: Tensor  # max s; −inf where no key is legal
    reach: Tensor  # ρ = max s − θ; not positive where nothing was in reach and the weights are uniform
    norm: Tensor  # ‖(ρ + x)₊‖_r, by which the slope of the weights is divided; ∞ where they have none
    edge: Tensor | None = None  # index of the key that sets θ, where that is one key below the best


# -- scores → weights ----------------------------------------------------------------------------


def weigh(s: Tensor, rule: Rule, r: Order, perfect: Tensor | float = 1.0, start: Tensor | None = None) -> tuple[Tensor, Row]:
    """Weights of each row of scores, and what the rule found.

    −inf is an illegal key. A row of nothing else gets zeros; NaN stays in its row; +inf takes
    all the weight. `perfect` is the score of a perfect match, from which Fixed measures.
    `start` (..., 1) is the reach of each row, if it has been found before.
    """
    if s.shape[-1] == 0:
        none = s.new_zeros((*s.shape[:-1], 1))
        return s.clone(), Row(none - math.inf, none, none)
    peak = s.amax(-1, keepdim=True)
    x = s - peak
    finite = bool(peak.isfinite().all())
    if not finite:
        x = torch.where(s == peak, 0.0, x)  # ±inf − ±inf
    found = _RULES[type(rule)](Scores(s, x, peak, perfect, start), rule, r)
    w = found.k
    if not finite:
        w = torch.where(peak.isnan(), peak, w).masked_fill(peak == -math.inf, 0.0)
    mass = w.sum(-1, keepdim=True)
    w = w.div_(mass.clamp_min(torch.finfo(w.dtype).tiny))
    norm = found.norm
    if norm is None:
        sloped = (found.reach > 0) & (mass > 0) & (r > 0)
        norm = torch.where(sloped, found.reach * mass ** (1 / _positive(r)), math.inf)
    return w, Row(peak, found.reach, norm, found.edge)


class Scores(NamedTuple):
    """A set of rows as the rules look at it."""

    s: Tensor  # (..., K)
    x: Tensor  # (..., K) s − max s
    peak: Tensor  # (..., 1)
    perfect: Tensor | float
    start: Tensor | None  # (..., 1)


class Found(NamedTuple):
    """What a rule makes of them."""

    k: Tensor  # (..., K) the weights but for a factor
    reach: Tensor  # (..., 1)
    norm: Tensor | None = None  # (..., 1), where the rule knows it
    edge: Tensor | None = None  # (..., 1)


def _powers(k: Tensor, slope: Tensor, x: Tensor, reach: Tensor, r: Order) -> None:
    """Fills k = y^r and slope = y^(r−1) with y = (1 + x/ρ)₊; the slope is 0 off the support also for r = 1."""
    torch.div(x, reach, out=k).clamp_min_(-1.0)
    if _is_whole(r):
        return _whole_powers(k.add_(1.0), slope, r)
    # log1p keeps its digits when r is large and y near 1; exp2 is fast where exp, which may underflow, is not
    torch.log1p(k, out=slope).mul_(_positive(r - 1.0) / math.log(2)).exp2_()
    torch.addcmul(slope, k, slope, out=k)


def _is_whole(r: Order) -> TypeGuard[float]:
    return isinstance(r, float) and r in WHOLE


def _whole_powers(y: Tensor, slope: Tensor, r: float) -> None:
    """Fills slope = y^(r−1) and makes y its own r-th power."""
    if r == 1:
        torch.sign(y, out=slope)
    else:
        torch.pow(y, r - 1, out=slope)
        y.mul_(slope)


def _positive(x: Order) -> Order:
    """x ≥ 0 kept from being 0, so that x · ∞ is ∞."""
    return x.clamp_min(1e-30) if isinstance(x, Tensor) else max(x, 1e-30)


def _exp(x: Tensor) -> Tensor:
    """e^x, in place. A CPU's exp takes ten times as long where it underflows; exp2 does not."""
    return x.mul_(1 / math.log(2)).exp2_()


def _normalising(scores: Scores, rule: Rule, r: Order) -> Found:
    """ρ with Σ [(ρ + x_i)/r]₊^r = 1 (paper Eqs. 1 and 9), to working precision.

    Newton on φ(ρ) = ‖(ρ + x)₊‖_r = r. φ is convex and increasing, so from ρ = r (where the best
    key alone has weight 1) the iterates fall monotonically on the root. φ is nearly linear, so a
    handful is enough; for r = 1 it is piecewise linear and the last iterate is exact. Rows stop
    one by one, so that an answer does not hang on how hard the neighbouring rows are. The last
    step, of a few ulp, is made on the weights.
    """
    if isinstance(r, float) and r == math.inf:
        return Found(_exp(scores.x), torch.full_like(scores.peak, math.inf), scores.peak)
    k, slope = torch.empty_like(scores.x), torch.empty_like(scores.x)
    reach = _head_start(k, slope, scores.x, r) if scores.start is None else scores.start
    for turn in range(1, MOST_TURNS + 1):
        step = _newton(k, slope, scores.x, reach, r)
        moving = step.abs() > 4 * torch.finfo(reach.dtype).eps * reach  # rounding can carry a step past a small root
        if turn == MOST_TURNS or not bool(moving.any()):
            break
        reach = torch.where(moving, _shorten(reach, step), reach)
    unit = 1.0 if _is_whole(r) else reach
    last = (step * (-r / unit)).clamp(-0.5, 0.5)  # for a huge r it is but a factor common to all keys
    return Found(k.addcmul_(slope, last).clamp_min_(0.0), reach - step, torch.zeros_like(reach) + r)


def _head_start(k: Tensor, slope: Tensor, x: Tensor, r: Order) -> Tensor:
    """ρ = r, or where turns of Newton are many and dear a smaller one, still at or above the root.

    Over any n keys Σ t^r ≥ n (Σ t / n)^r, where t = ρ + x. Overwrites k and slope. Costs one turn in all.
    """
    reach = torch.zeros_like(x[..., :1]) + r
    for _ in range(3 if isinstance(r, float) and 1 < r < 1.5 else 0):
        total = torch.add(x, reach, out=k).clamp_min_(0.0).sum(-1, keepdim=True)
        count = torch.sign(k, out=slope).sum(-1, keepdim=True)
        reach = _shorten(reach, (total / count - r * count ** (-1 / r)).clamp_min(0.0))
    return reach


def _newton(k: Tensor, slope: Tensor, x: Tensor, reach: Tensor, r: Order) -> Tensor:
    """The step to take off ρ; fills k = [(ρ + x)/unit]₊^r and its slope, where unit is 1 for a whole r and else ρ."""
    if _is_whole(r):
        _whole_powers(torch.add(x, reach, out=k).clamp_min_(0.0), slope, r)
    else:
        _powers(k, slope, x, reach, r)
    unit = 1.0 if _is_whole(r) else reach
    mass = k.sum(-1, keepdim=True)
    return mass * (unit - r * mass ** (-1 / r)) / slope.sum(-1, keepdim=True)


def _shorten(reach: Tensor, step: Tensor) -> Tensor:
    """ρ − step, kept positive where the root is smaller than the rounding of ρ."""
    return torch.maximum(reach - step, reach * torch.finfo(reach.dtype).eps)


def _anchored(scores: Scores, rule: Rule, r: Order) -> Found:
    """ρ = b (paper Eq. 11)."""
    assert isinstance(rule, Anchored)
    reach = torch.full_like(scores.peak, rule.b)
    return Found(_above(scores.x, reach, r), reach)


def _fixed(scores: Scores, rule: Rule, r: Order) -> Found:
    """ρ = max s − (perfect − b), where perfect = 1/h² (paper Eq. 6); nothing in reach is uniform."""
    assert isinstance(rule, Fixed)
    theta = scores.perfect - rule.b
    reach = (scores.peak - theta).clamp_max(torch.finfo(scores.x.dtype).max)
    w = (scores.s > theta).to(reach.dtype) if r == 0 else _above(scores.x, reach, r)
    w = torch.where(reach > 0, w, (scores.s > -math.inf).to(reach.dtype))
    return Found(w, reach)


def _above(x: Tensor, reach: Tensor, r: Order) -> Tensor:
    """K of the keys above θ, 0 elsewhere."""
    if r == 0:
        return (x > -reach).to(x.dtype)
    if r == math.inf:
        return _exp(torch.where(x > -reach, x, -math.inf))
    k, slope = torch.empty_like(x), torch.empty_like(x)
    _powers(k, slope, x, torch.where(reach > 0, reach, 1.0), r)
    return k


def _nearest(scores: Scores, rule: Rule, r: Order) -> Found:
    """ρ = max s − s_(k), with exactly min(k, legal keys) keys inside: the earlier key wins a tie (paper Eq. 4)."""
    assert isinstance(rule, Nearest)
    s, peak = scores.s, scores.peak
    k = min(rule.k, s.shape[-1])
    legal = s > -math.inf
    theta = s.topk(k, dim=-1).values[..., -1:]
    few = theta == -math.inf
    if bool(few.any()):
        theta = torch.where(few, torch.where(legal, s, math.inf).amin(-1, keepdim=True), theta)
    above, tie = s > theta, s == theta
    inside = legal & (above | (tie & (tie.cumsum(-1) <= k - above.sum(-1, keepdim=True))))
    position = torch.arange(s.shape[-1], device=s.device)
    edge = torch.where(tie & inside, position, -1).amax(-1, keepdim=True).clamp_min(0)
    reach = torch.where(peak == theta, 0.0, (peak - theta).clamp_max(torch.finfo(s.dtype).max))
    w = torch.ones_like(s) if r == 0 else _exp(scores.x) if r == math.inf else _above(scores.x, reach, r)
    return Found(w.mul_(inside), reach, edge=edge)


_RULES: dict[type[Rule], Callable[[Scores, Rule, Order], Found]] = {
    Normalising: _normalising,
    Anchored: _anchored,
    Fixed: _fixed,
    Nearest: _nearest,
}


# -- gradient of the weights ---------------------------------------------------------------------


class Pull(NamedTuple):
    """Gradients of a scalar loss through one set of rows."""

    s: Tensor  # (..., K)
    perfect: Tensor | None  # (..., 1), for Fixed
    r: Tensor | None  # (..., 1), used for a learned order


def pull(w: Tensor, dw: Tensor, norm: Tensor, edge: Tensor | None, rule: Rule, r: Order) -> Pull:
    """Gradient with respect to the scores, from the weights alone.

    ds = a ⊙ (dw − c) with a_i = K'(s_i − θ)/Z, and c = Σ a dw / Σ a where the rule keeps Σ w = 1
    by moving θ, else c = Σ w dw. What θ itself receives, −Σ ds, goes to whatever sets it: the
    best key(s), the k-th key, or the score of a perfect match.
    """
    if w.shape[-1] == 0 or (isinstance(r, float) and r == 0):
        zero = torch.zeros_like(norm) if isinstance(rule, Fixed) else None
        return Pull(torch.zeros_like(w), zero, torch.zeros_like(norm))  # a step has no slope
    a = _slope(w, norm, rule, r)
    if isinstance(rule, Normalising):
        ds = a * dw
        centre = ds.sum(-1, keepdim=True) / a.sum(-1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
        torch.sub(dw, centre, out=ds)
        dr = (_order_slope(w, r) * ds).sum(-1, keepdim=True) if isinstance(r, Tensor) else None
        return Pull(ds.mul_(a), None, dr)
    ds = w * dw
    torch.sub(dw, ds.sum(-1, keepdim=True), out=ds).mul_(a)
    dtheta = -ds.sum(-1, keepdim=True)
    if isinstance(rule, Fixed):
        return Pull(ds, dtheta, None)
    if edge is not None:
        return Pull(ds.scatter_add(-1, edge, dtheta), None, None)
    best = (w == w.amax(-1, keepdim=True)) & (w > 0)
    return Pull(ds + best * (dtheta / best.sum(-1, keepdim=True).clamp_min(1)), None, None)


def _slope(w: Tensor, norm: Tensor, rule: Rule, r: Order) -> Tensor:
    """a_i = ∂w_i/∂s_i at fixed θ and Z: (r / ‖(ρ + x)₊‖_r) w_i^(1−1/r); for the Gaussian w_i itself."""
    if isinstance(r, float) and r == math.inf:
        return w
    a = _root_of(w, r)
    return a if isinstance(rule, Normalising) else a.mul_(r / norm)  # the norm is r where Σ w = 1


def _root_of(w: Tensor, r: Order) -> Tensor:
    """w^(1−1/r), and 0 at 0 also for r = 1. Logarithms and roots of 0 are slow on a CPU: none is taken."""
    v = w.clamp_min(torch.finfo(w.dtype).tiny)
    if isinstance(r, float) and r in (1.0, 2.0):
        return torch.div(w, v, out=v) if r == 1 else v.rsqrt_().mul_(w)
    return v.log2_().mul_(-1 / r).exp2_().mul_(w)


def _order_slope(w: Tensor, r: Tensor) -> Tensor:
    """∂w_i/∂r at fixed c = θ + r: w_i (L + e^−L − 1) with L = ln(w_i)/r."""
    log = (w.clamp_min(torch.finfo(w.dtype).tiny)).log() / r
    tail = 1 - log / 5 * (1 - log / 6 * (1 - log / 7 * (1 - log / 8)))
    near = log * log * (0.5 - log / 6 * (1 - log / 4 * tail))  # the sum cancels for large r
    return w * torch.where(log > -0.05, near, log + torch.expm1(-log))


# -- weights of a whole tensor of scores ---------------------------------------------------------


def weigh_all(s: Tensor, rule: Rule, r: Order, perfect: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`weigh` over (N, K) scores, a block of rows at a time; r and perfect are numbers or (N, 1).

    Returns the weights, and the norm and edge of each row, which are all that `pull` needs.
    """
    w = torch.empty_like(s)
    norm = s.new_empty((len(s), 1))
    edge = s.new_zeros((len(s), 1), dtype=torch.long) if isinstance(rule, Nearest) else None
    for part in row_blocks(s):
        given = 1.0 if perfect is None else perfect[part]
        w[part], row = weigh(s[part], rule, r[part] if isinstance(r, Tensor) else r, given)
        norm[part] = row.norm
        if edge is not None and row.edge is not None:
            edge[part] = row.edge
    return w, norm, edge


def pull_all(w: Tensor, dw: Tensor, norm: Tensor, edge: Tensor | None, rule: Rule, r: Order) -> Pull:
    """`pull` over (N, K) weights, a block of rows at a time."""
    ds = torch.empty_like(w)
    dperfect = torch.zeros_like(norm) if isinstance(rule, Fixed) else None
    dr = torch.zeros_like(norm) if isinstance(r, Tensor) else None
    for part in row_blocks(w):
        own = None if edge is None else edge[part]
        got = pull(w[part], dw[part], norm[part], own, rule, r[part] if isinstance(r, Tensor) else r)
        ds[part] = got.s
        for whole, value in ((dperfect, got.perfect), (dr, got.r)):
            if whole is not None and value is not None:
                whole[part] = value
    return Pull(ds, dperfect, dr)


def row_blocks(s: Tensor) -> Iterator[slice]:
    """Cuts (N, K) scores into runs of rows that are held at once."""
    rows, keys = s.shape
    step = max(1, block_size(s.device) // max(keys, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def block_size(device: torch.device) -> int:
    """How many scores are held at once."""
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that thresholds and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
