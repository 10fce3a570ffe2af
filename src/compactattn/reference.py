"""The definition: scores → weights → estimate, in plain PyTorch, with closed-form gradients.

Every kernel of the family is evaluated in one form. With x_i = s_i − max s ≤ 0,

    w_i = K(1 + x_i / ρ) / Z,    Z = Σ K,    K(y) = y₊^r     (or exp(x_i) for the Gaussian),

where the *reach* ρ = max s − θ is how far below the best score the support extends. A support rule
only has to give ρ. Z ≥ 1 because the best key contributes 1, so nothing over- or underflows, and
r → ∞ at ρ = r is exp(x): α-entmax runs into softmax with no special case.

Shapes: B batch, H heads, Q queries, K keys, D head dim; rows are scores along the last dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard, overload

import torch
from torch import Tensor

from compactattn.kernels import Anchored, Fixed, Nearest, Normalising, Rule
from compactattn.masks import View

WHOLE = (1.0, 2.0, 3.0)  # powers that need no logarithm
MOST_TURNS = 64  # of Newton; the hardest row of 65,536 scores has needed 14
BLOCK = 2**19  # scores held at once: a few blocks of fp32 stay inside a CPU's cache


Order = float | Tensor  # r of the profile: 0 step, ∞ Gaussian; a tensor that broadcasts to the rows is learned


class Row(NamedTuple):
    """What a rule found out about each row of scores; every field is (..., 1)."""

    peak: Tensor  # max s; −inf where no key is legal
    reach: Tensor  # ρ = max s − θ; not positive where nothing was in reach and the weights are uniform
    norm: Tensor  # ‖(ρ + x)₊‖_r, by which the slope of the weights is divided; ∞ where they have none
    edge: Tensor | None = None  # index of the key that sets θ, where that is one key below the best


# -- scores → weights ----------------------------------------------------------------------------


def weigh(s: Tensor, rule: Rule, r: Order, perfect: Tensor | float = 1.0) -> tuple[Tensor, Row]:
    """Weights of each row of scores, and what the rule found.

    −inf is an illegal key. A row of nothing else gets zeros; NaN stays in its row; +inf takes
    all the weight. `perfect` is the score of a perfect match, from which Fixed measures.
    """
    if s.shape[-1] == 0:
        none = s.new_zeros((*s.shape[:-1], 1))
        return s.clone(), Row(none - math.inf, none, none)
    peak = s.amax(-1, keepdim=True)
    x = s - peak
    finite = bool(peak.isfinite().all())
    if not finite:
        x = torch.where(s == peak, 0.0, x)  # ±inf − ±inf
    found = _RULES[type(rule)](Scores(s, x, peak, perfect), rule, r)
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


class Found(NamedTuple):
    """What a rule makes of them."""

    k: Tensor  # (..., K) the weights but for a factor
    reach: Tensor  # (..., 1)
    norm: Tensor | None = None  # (..., 1), where the rule knows it
    edge: Tensor | None = None  # (..., 1)


def _powers(x: Tensor, reach: Tensor, r: Order) -> tuple[Tensor, Tensor]:
    """(y^r, y^(r−1)) with y = (1 + x/ρ)₊; the second is 0 off the support also for r = 1."""
    y = (x / reach).clamp_min_(-1.0)
    if _is_whole(r):
        return _whole_powers(y.add_(1.0), r)
    # log1p keeps its digits when r is large and y near 1; exp2 is fast where exp, which may underflow, is not
    slope = y.log1p().mul_(_positive(r - 1.0) / math.log(2)).exp2_()
    return torch.addcmul(slope, y, slope), slope


def _is_whole(r: Order) -> TypeGuard[float]:
    return isinstance(r, float) and r in WHOLE


def _whole_powers(y: Tensor, r: float) -> tuple[Tensor, Tensor]:
    return (y, y.sign()) if r == 1 else (y * y, y) if r == 2 else (y * y * y, y * y)


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
    reach = torch.zeros_like(scores.peak) + r
    # only below 2 are turns so many and the keys within r so few that packing them pays
    near = _near(scores.x, reach) if isinstance(r, float) and 1 < r < 2 else scores.x
    for turn in range(1, MOST_TURNS + 1):
        k, slope, step = _newton(near, reach, r)
        moving = step.abs() > 4 * torch.finfo(reach.dtype).eps * reach  # rounding can carry a step past a small root
        if turn == MOST_TURNS or not bool(moving.any()):
            break
        reach = torch.where(moving, _shorten(reach, step), reach)
    if near is not scores.x:
        k, slope, step = _newton(scores.x, reach, r)
    unit = 1.0 if _is_whole(r) else reach
    k = k.addcmul(slope, step * (-r / unit)).clamp_min_(0.0)
    return Found(k, reach - step, torch.zeros_like(reach) + r)


def _newton(x: Tensor, reach: Tensor, r: Order) -> tuple[Tensor, Tensor, Tensor]:
    """(k, its slope, the step to take off ρ) with k = [(ρ + x)/unit]₊^r; unit is 1 for a whole r, else ρ."""
    if _is_whole(r):
        k, slope = _whole_powers((x + reach).clamp_min_(0.0), r)
    else:
        k, slope = _powers(x, reach, r)
    unit = 1.0 if _is_whole(r) else reach
    mass = k.sum(-1, keepdim=True)
    return k, slope, mass * (unit - r * mass ** (-1 / r)) / slope.sum(-1, keepdim=True)


def _near(x: Tensor, reach: Tensor) -> Tensor:
    """The keys with x > −ρ, packed to the left of shorter rows, if that at least halves them: no other has weight."""
    inside = x > -reach
    counts = inside.sum(-1, keepdim=True)
    most = int(counts.max()) if counts.numel() else 0
    if 2 * most > x.shape[-1]:
        return x
    place = inside.flatten().nonzero()[:, 0]
    row = place.div(x.shape[-1], rounding_mode="floor")
    counts = counts.flatten()
    column = torch.arange(len(place), device=x.device) - (counts.cumsum(0) - counts)[row]
    near = x.new_full((counts.numel(), most), -math.inf)
    near[row, column] = x.flatten()[place]
    return near.view(*x.shape[:-1], most)


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
    return _powers(x, torch.where(reach > 0, reach, 1.0), r)[0]


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
        centre = (a * dw).sum(-1, keepdim=True) / a.sum(-1, keepdim=True).clamp_min(torch.finfo(w.dtype).tiny)
        dr = (_order_slope(w, r) * (dw - centre)).sum(-1, keepdim=True) if isinstance(r, Tensor) else None
        return Pull(a.mul_(dw - centre), None, dr)
    centre = (w * dw).sum(-1, keepdim=True)
    ds = a.mul_(dw - centre)
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
        return w.clone()
    a = _root_of(w, r)
    return a if isinstance(rule, Normalising) else a.mul_(r / norm)  # the norm is r where Σ w = 1


def _root_of(w: Tensor, r: Order) -> Tensor:
    """w^(1−1/r), and 0 at 0 also for r = 1. Logarithms and roots of 0 are slow on a CPU: none is taken."""
    v = w.clamp_min(torch.finfo(w.dtype).tiny)
    if isinstance(r, float) and r in (1.0, 2.0):
        return w / v if r == 1 else v.rsqrt_().mul_(w)
    return v.log2_().mul_(-1 / r).exp2_().mul_(w)


def _order_slope(w: Tensor, r: Tensor) -> Tensor:
    """∂w_i/∂r at fixed c = θ + r: w_i (L + e^−L − 1) with L = ln(w_i)/r."""
    log = (w.clamp_min(torch.finfo(w.dtype).tiny)).log() / r
    tail = 1 - log / 5 * (1 - log / 6 * (1 - log / 7 * (1 - log / 8)))
    near = log * log * (0.5 - log / 6 * (1 - log / 4 * tail))  # the sum cancels for large r
    return w * torch.where(log > -0.05, near, log + torch.expm1(-log))


# -- weights → estimate --------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A set of scores small enough to hold: samples × heads × queries, against keys."""

    b: slice
    h: slice
    q: slice
    k: slice

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.b, self.h, self.q]

    def of_keys(self, x: Tensor, group: int) -> Tensor:
        """(b, h, k, D): the keys or values of each query head."""
        if group == 1:
            return x[self.b, self.h, self.k]
        heads = torch.arange(self.h.start, self.h.stop, device=x.device) // group
        return x[self.b, heads, self.k]

    @overload
    def of_heads(self, x: Tensor) -> Tensor: ...
    @overload
    def of_heads(self, x: Order) -> Order: ...
    def of_heads(self, x: Order) -> Order:
        """(h, 1, 1) of an (H,) tensor; a number is the same for every head."""
        return x[self.h, None, None] if isinstance(x, Tensor) else x

    def of_scores(self, x: Tensor) -> Tensor:
        """The part of a tensor that broadcasts to (B, H, Q, K)."""
        spans = zip((self.b, self.h, self.q, self.k), x.shape, strict=True)
        return x[tuple(slice(0, 1) if size == 1 else span for span, size in spans)]

    def of_rows(self, x: Tensor) -> Tensor:
        """(b, 1, q, 1) of a (1 | B, Q) tensor."""
        return (x if len(x) == 1 else x[self.b])[:, None, self.q, None]


def blocks(view: View) -> Iterator[Block]:
    """Cuts the scores into blocks of about BLOCK numbers, each over the keys that its queries can see."""
    batch, heads, queries, keys = view.shape
    row = max(keys, 1)
    q_step = max(1, min(queries, BLOCK // row))
    h_step = max(1, min(heads, BLOCK // (q_step * row))) if q_step >= queries else 1
    b_step = max(1, min(batch, BLOCK // (h_step * q_step * row))) if h_step >= heads else 1
    for b, q in ((b, q) for b in range(0, batch, b_step) for q in range(0, queries, q_step)):
        span_b, span_q = slice(b, min(b + b_step, batch)), slice(q, min(q + q_step, queries))
        first, last = _span(view, span_b, span_q)
        for h in range(0, heads, h_step):
            yield Block(span_b, slice(h, min(h + h_step, heads)), span_q, slice(first, last))


def _span(view: View, b: slice, q: slice) -> tuple[int, int]:
    """The first and last + 1 key that any of these queries can see; (0, 0) if there is none."""
    lo, hi = ((x if len(x) == 1 else x[b])[:, q] for x in (view.lo, view.hi))
    some = lo < hi
    if not bool(some.any()):
        return 0, 0
    keys = view.shape[3]
    return int(torch.where(some, lo, keys).min()), int(torch.where(some, hi, 0).max())


def score(q: Tensor, k: Tensor, scale: Tensor, view: View, block: Block) -> Tensor:
    """s = scale · q·k + bias − slope · |distance|, with −inf at illegal keys. q, k are already of the block."""
    s = (q @ k.mT).mul_(block.of_heads(scale))
    position = torch.arange(block.k.start, block.k.stop, device=s.device)
    if view.bias is not None:
        s = s.add_(block.of_scores(view.bias))
    if view.slopes is not None:
        s = s - block.of_heads(view.slopes).to(s.dtype) * (block.of_rows(view.at) - position).abs()
    lo, hi = block.of_rows(view.lo), block.of_rows(view.hi)
    if bool((lo > block.k.start).any()) or bool((hi < block.k.stop).any()):
        s = s.masked_fill_((position < lo) | (position >= hi), -math.inf)
    if view.allowed is not None:
        s = s.masked_fill_(~block.of_scores(view.allowed), -math.inf)
    return s


class Estimate(NamedTuple):
    """What one pass over the blocks returns."""

    out: Tensor  # (B, H, Q, Dv)
    threshold: Tensor  # (B, H, Q) θ
    support: Tensor  # (B, H, Q) keys with a non-zero weight


def estimate(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, rule: Rule, r: Order, readout: bool) -> Estimate:
    """Nadaraya-Watson estimate of the values at each query (paper Eq. 2): o = Σ_i w_i v_i."""
    group = q.shape[1] // k.shape[1]
    work = accumulator(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    rows = q.shape[:3] if readout else (0, 0, 0)
    threshold = q.new_full(rows, math.inf, dtype=work)
    support = q.new_zeros(rows, dtype=torch.int32)
    for block in blocks(view):
        s = score(block.of_queries(q).to(work), block.of_keys(k, group).to(work), scale, view, block)
        w, row = weigh(s, rule, block.of_heads(r), block.of_heads(scale))
        block.of_queries(out).copy_(w @ block.of_keys(v, group).to(work))
        if readout:
            empty = row.peak == -math.inf
            block.of_queries(threshold).copy_(torch.where(empty, math.inf, row.peak - row.reach)[..., 0])
            block.of_queries(support).copy_((w > 0).sum(-1))
    return Estimate(out, threshold, support)


class Gradients(NamedTuple):
    """Gradients of a scalar loss with respect to every input of `estimate`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor  # (H,)
    bias: Tensor | None
    r: Tensor | None  # (H,)


def estimate_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, rule: Rule, r: Order, bias_grad: bool
) -> Gradients:
    """Gradients of `estimate`, one block of recomputed weights at a time."""
    batch, heads, _, _ = view.shape
    group = heads // k.shape[1]
    work = accumulator(q.dtype)
    dq = torch.zeros_like(q, dtype=work)
    dk = q.new_zeros((batch, heads, *k.shape[2:]), dtype=work)
    dv = q.new_zeros((batch, heads, *v.shape[2:]), dtype=work)
    dscale, dr = (scale.new_zeros(heads) for _ in range(2))
    dbias = torch.zeros_like(view.bias, dtype=work) if bias_grad and view.bias is not None else None
    for block in blocks(view):
        qb, dob = (block.of_queries(x).to(work) for x in (q, do))
        kb, vb = (block.of_keys(x, group).to(work) for x in (k, v))
        factor, order = block.of_heads(scale), block.of_heads(r)
        s = score(qb, kb, scale, view, block)
        w, row = weigh(s, rule, order, factor)
        dv[block.b, block.h, block.k] += w.mT @ dob
        ds, dperfect, dorder = pull(w, dob @ vb.mT, row.norm, row.edge, rule, order)
        if dbias is not None:
            part = block.of_scores(dbias)
            part += ds.sum_to_size(part.shape)
        block.of_queries(dq).copy_(ds @ kb)
        dk[block.b, block.h, block.k] += (ds.mT @ qb).mul_(factor)
        dscale[block.h] += (block.of_queries(dq) * qb).sum((0, 2, 3))
        if dperfect is not None:
            dscale[block.h] += dperfect.sum((0, 2, 3))
        if dorder is not None:
            dr[block.h] += dorder.sum((0, 2, 3))
    dq.mul_(scale[:, None, None])
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) if group > 1 else x for x in (dk, dv))
    return Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dscale, dbias, dr if isinstance(r, Tensor) else None)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that thresholds and sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    rows, keys = s.shape
    step = max(1, BLOCK // max(keys, 1))
    return (slice(start, start + step) for start in range(0, rows, step))
