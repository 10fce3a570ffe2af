"""An independent oracle: the weights of rows of scores, and their gradient, from the equations of the paper.

Every kernel is w_i = K(s_i − θ) / Z (docs/equations.md). θ comes from sorting and closed forms (r = 1, 2, nearest k), from a
bracketed root of ln Σ K = 0 (other r), or from the definition. Nothing is shared with compactattn but the kernel objects.
Numbers are float64, or numpy.longdouble for float64 scores, so that the oracle is more exact than what it judges.

Conventions: −inf is an illegal key and weighs 0; a row without a legal key is all 0; a NaN makes its whole row NaN.
+inf is the limit of a score that grows without bound: it takes all the weight, except under the two rules that never
look at the size of a score: a ball holds every key above θ, and the uniform k nearest stay k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import Tensor, float64

from compactattn import Anchored, Fixed, Kernel, Nearest

Array = np.ndarray
WIDER = np.finfo(np.longdouble).eps < 0.01 * np.finfo(np.float64).eps  # not on every platform


class Frame:
    """Rows (N, K) of scores without NaN, and what the kernels share about them."""

    def __init__(self, s: Array, wide: type) -> None:
        self.narrow = s  # float64 holds every dtype's scores exactly
        self.s = s.astype(wide)
        self.legal = s > -math.inf
        self.empty = ~self.legal.any(-1, keepdims=True)
        self.count = self.legal.sum(-1, keepdims=True)
        self.peak = np.where(self.empty, 0, self.s.max(-1, keepdims=True))
        self.best = self.legal & (self.s == self.peak)

    @cached_property
    def x(self) -> Array:
        """(N, K) s − max s."""
        return self.s - self.peak

    @cached_property
    def order(self) -> Array:
        """(N, K) keys from the best to the worst; the earlier one first in a tie."""
        return np.argsort(-self.narrow, axis=-1, kind="stable")

    @cached_property
    def descending(self) -> Array:
        return np.take_along_axis(self.x, self.order, -1)


class Rows:
    """Rows (N, K) of any scores, read once and judged under many kernels."""

    def __init__(self, scores: Tensor) -> None:
        self.wide = np.longdouble if scores.dtype == float64 else np.float64
        s = scores.detach().double().numpy()
        self.nan = np.isnan(s).any(-1, keepdims=True)
        self.given = np.where(self.nan, 0.0, s)

    @cached_property
    def raw(self) -> Frame:
        return Frame(self.given, self.wide)

    @cached_property
    def bounded(self) -> Frame:
        """The rows with +inf replaced by its limit: the infinite keys tie and all others are out of reach."""
        infinite = self.given == math.inf
        rows = infinite.any(-1, keepdims=True)
        if not rows.any():
            return self.raw
        return Frame(np.where(rows, np.where(infinite, 0.0, -math.inf), self.given), self.wide)


@dataclass
class Truth:
    """What the equations say about rows of scores."""

    r: float
    rule: str
    frame: Frame
    nan: Array  # (N, 1)
    height: Array  # (N, K) K(s − θ), 1 at the best key, as if every legal key were inside
    inside: Array  # (N, K) keys in the support
    depth: Array  # (N, K) s − θ
    reach: Array  # (N, 1) max s − θ
    uniform: Array  # (N, 1) rows where no key has weight by the formula, so that it is shared evenly
    theta: float = 0.0  # of Fixed
    edge: Array | None = None  # (N, 1) the k-th key of Nearest

    @cached_property
    def w(self) -> Array:
        """(N, K) the weights."""
        return self.weights(self.inside)

    def weights(self, support: Array) -> Array:
        """The weights on another support, where a few keys at the threshold are in doubt."""
        height = np.where(support, self.height, 0)
        return np.where(self.nan, math.nan, height / np.maximum(self.mass(support), 1e-30))

    def mass(self, support: Array) -> Array:
        return np.where(support, self.height, 0).sum(-1, keepdims=True)

    @cached_property
    def grade(self) -> Array:
        """(N, K) ∂ ln K(s_i − θ) / ∂s_i on the support."""
        if self.r in (0.0, math.inf):
            return np.where(self.inside & (self.r > 0), self.w.dtype.type(1), 0)
        with np.errstate(all="ignore"):
            return np.where(self.inside & ~self.uniform, self.r / self.depth, 0)

    def pull(self, dw: Array) -> tuple[Array, Array]:
        """Gradients with respect to the scores (N, K) and the score of a perfect match (N, 1).

        The chain rule: dw → d ln K → (s_i, θ), and θ → whatever sets it.
        """
        log = self.w * (dw - (self.w * dw).sum(-1, keepdims=True))
        ds = log * self.grade
        dtheta = -ds.sum(-1, keepdims=True)
        return ds + dtheta * self.share, dtheta if self.rule == "fixed" else np.zeros_like(dtheta)

    @cached_property
    def share(self) -> Array:
        """(N, K) ∂θ/∂s_i."""
        if self.rule == "normalising":  # Σ K = 1 for every s
            pull = self.w * self.grade
            return pull / np.maximum(pull.sum(-1, keepdims=True), 1e-30)
        if self.rule == "anchored":
            return self.frame.best / np.maximum(self.frame.best.sum(-1, keepdims=True), 1)
        share = np.zeros_like(self.w)
        if self.edge is not None:
            np.put_along_axis(share, self.edge, 1, -1)
        return share

    @cached_property
    def alpha_slope(self) -> Array:
        """(N, K) −∂w_i/∂α at fixed θ + r, for w = [(s − θ)/r]₊^r and r = 1/(α−1)."""
        ln = np.log1p(np.where(self.inside, (self.frame.x + (self.reach - self.r)) / self.r, 0))
        return self.r**2 * self.w * (np.expm1(-ln) + ln)

    def pull_alpha(self, dw: Array) -> Array:
        """(N, 1) gradient with respect to α, by implicit differentiation of Σ w = 1."""
        return -(self.alpha_slope * (dw - (self.share * dw).sum(-1, keepdims=True))).sum(-1, keepdims=True)

    @cached_property
    def sensitivity(self) -> Array:
        """(N, K) what a relative error of 1 in each s − max s, and in the threshold, does to ln w, to first order."""
        with np.errstate(all="ignore"):
            move = self.grade * (np.abs(self.frame.x) + abs(self.theta)) if self.r else np.zeros_like(self.w)
            move = np.where(self.inside, move, 0)
        return 1 + move + (np.where(self.nan, 0, self.w) * move).sum(-1, keepdims=True)

    def gradients(self, dw: Array) -> dict[str, tuple[Array, Array]]:
        """{input: (gradient, unit)} of the scores (N, K), scale (N, 1) and alpha (N, 1).

        A unit is what a relative error of 1 in each s − max s, and in the threshold, does to it, to first order.
        """
        ds, dperfect = self.pull(dw)
        s, factor = np.where(self.frame.legal, self.frame.s, 0), self.sensitivity
        size = self.w * factor * np.abs(dw)
        centre = self.w * ((self.w * np.abs(dw)).sum(-1, keepdims=True) * factor + size.sum(-1, keepdims=True))
        direct = self.grade * (size + centre)
        unit = direct + self.share * (1 + factor) * direct.sum(-1, keepdims=True)
        dscale = (s * ds).sum(-1, keepdims=True) + dperfect
        found = {"scores": (ds, unit), "scale": (dscale, (np.abs(s) * unit + direct).sum(-1, keepdims=True))}
        if self.rule == "normalising" and self.r < math.inf:
            centred = np.abs(dw) + (self.share * (1 + factor) * np.abs(dw)).sum(-1, keepdims=True)
            found["alpha"] = self.pull_alpha(dw), (self.alpha_slope * (1 + factor) * centred).sum(-1, keepdims=True)
        return found


def order(kernel):
    """r, also of a kernel that learns it."""
    alpha = kernel.profile.alpha
    return kernel.profile.r if alpha is None else 1 / (alpha.double().item() - 1)


def judge(rows: Rows, kernel: Kernel, perfect: float = 1.0) -> Truth:
    """The truth about rows of scores under a kernel; `perfect` is the score of a perfect match."""
    r, rule = order(kernel), kernel.rule
    frame = rows.raw if r == 0 and isinstance(rule, Fixed | Nearest) else rows.bounded
    with np.errstate(all="ignore"):
        if isinstance(rule, Fixed):
            return _fixed(frame, rows.nan, r, rows.wide(perfect) - rows.wide(rule.b))
        if isinstance(rule, Nearest):
            return _nearest(frame, rows.nan, r, rule.k)
        if isinstance(rule, Anchored):
            reach = np.full_like(frame.peak, rows.wide(rule.b))
        else:
            reach = np.full_like(frame.peak, math.inf) if r == math.inf else _normalising_reach(frame, r)
        depth = np.where(frame.legal, frame.x + reach, -math.inf)
        height = _height(frame, depth, reach, r)
        name = "anchored" if isinstance(rule, Anchored) else "normalising"
        return Truth(r, name, frame, rows.nan, height, depth > 0, depth, reach, np.zeros_like(frame.empty))


def _fixed(frame: Frame, nan: Array, r: float, theta: float) -> Truth:
    depth = np.where(frame.legal, frame.s - theta, -math.inf)
    reach = np.where(frame.empty, 0, frame.peak - theta)
    inside = depth > 0
    uniform = ~inside.any(-1, keepdims=True)
    height = np.where(uniform, 1, _height(frame, depth, reach, r))
    return Truth(r, "fixed", frame, nan, height, np.where(uniform, frame.legal, inside), depth, reach, uniform, float(theta))


def _nearest(frame: Frame, nan: Array, r: float, k: int) -> Truth:
    last = np.clip(np.minimum(frame.count, k) - 1, 0, None)  # (N, 1) place of the k-th key in the order
    rank = np.empty_like(frame.order)
    np.put_along_axis(rank, frame.order, np.arange(frame.order.shape[1])[None], -1)
    chosen = (rank <= last) & frame.legal
    edge = np.take_along_axis(frame.order, last, -1)
    theta = np.take_along_axis(frame.s, edge, -1)
    depth = np.where(frame.legal, frame.s - theta, -math.inf)
    reach = np.where(frame.empty | (frame.peak == theta), 0, frame.peak - theta)
    uniform = (reach == 0) & (0 < r < math.inf)
    height = np.where(uniform, 1, _height(frame, depth, reach, r))
    inside = chosen if r in (0.0, math.inf) else chosen & (uniform | (depth > 0))
    return Truth(r, "nearest", frame, nan, height, inside, depth, reach, uniform, edge=edge)


def _height(frame: Frame, depth: Array, reach: Array, r: float) -> Array:
    """K(s − θ) / K(max s − θ)."""
    if r == 0:
        return np.ones_like(frame.s)
    if r == math.inf:
        return np.exp(frame.x)
    if r in (1.0, 2.0, 3.0):
        return np.where(depth > 0, depth / reach, 0) ** int(r)
    return np.where(depth > 0, np.exp(r * np.log1p(np.maximum(frame.x / reach, -1))), 0)


# -- ρ with Σ [(ρ + x_i)/r]₊^r = 1 -----------------------------------------------------------------


def _normalising_reach(frame: Frame, r: float) -> Array:
    if r in (1.0, 2.0):
        return _closed_reach(frame, r)
    x = np.maximum(frame.x, -2 * r)  # no key below −r can be inside
    reach = _bracketed_root(x.astype(np.float64), r).astype(x.dtype)
    if x.dtype == np.float64:
        return reach
    excess, slope = _log_mass(x, reach, r)
    return reach - excess / slope


def _closed_reach(frame: Frame, r: float) -> Array:
    """The support is a prefix of the sorted keys: the longest whose own root lies above its last key."""
    x = np.maximum(frame.descending, -2 * r)
    k = np.arange(1, x.shape[1] + 1).astype(x.dtype)
    mean = x.cumsum(-1) / k
    roots = (1 / k if r == 1 else np.sqrt(np.maximum(4 / k - (x * x).cumsum(-1) / k + mean * mean, 0))) - mean
    inside = k <= np.maximum((roots > -x).sum(-1, keepdims=True), 1)
    # once more on the support found: running sums are less exact than pairwise ones, and var = E x² − (E x)² cancels
    size = inside.sum(-1, keepdims=True).astype(x.dtype)
    mean = np.where(inside, x, 0).sum(-1, keepdims=True) / size
    if r == 1:
        return 1 / size - mean
    variance = (np.where(inside, x - mean, 0) ** 2).sum(-1, keepdims=True) / size
    return np.sqrt(4 / size - variance) - mean


def _bracketed_root(x: Array, r: float) -> Array:
    """Newton on the log of the mass; bisection where a step would leave the bracket, or not halve the step before."""
    high = np.full((len(x), 1), r)  # where the best key alone has mass 1
    low = np.full((len(x), 1), r * x.shape[1] ** (-1 / r) * (1 - 1e-14))  # where K equal keys have it
    answer = high.copy()
    todo, reach, change = np.arange(len(x)), high, high
    for _ in range(100):
        excess, slope = _log_mass(x, reach, r)
        low, high = np.where(excess <= 0, reach, low), np.where(excess >= 0, reach, high)
        better = reach - excess / slope
        good = (low <= better) & (better <= high) & (np.abs(better - reach) <= change / 2)
        better = np.where(good, better, (low + high) / 2)
        answer[todo], change = better, np.abs(better - reach)
        rough = (change > 1e-12 * reach)[:, 0]  # else the last step more than doubled the digits
        if not rough.any():
            return answer
        todo, x, reach, low, high, change = (each[rough] for each in (todo, x, better, low, high, change))
    raise AssertionError(f"the oracle found no root for r = {r}")


def _log_mass(x: Array, reach: Array, r: float) -> tuple[Array, Array]:
    """ln Σ [(ρ + x)/r]₊^r and its derivative in ρ."""
    t = np.maximum(x / reach, -1)
    if r == 3:
        y = 1 + t
        u = y * y
        mass = (u * y).sum(-1, keepdims=True)
    else:
        ln = np.log1p(t)
        u = np.where(t > -1, np.exp((r - 1) * ln), 0)
        mass = (u * (1 + t)).sum(-1, keepdims=True)
    return np.log(mass) + r * np.log(reach / r), r / reach * u.sum(-1, keepdims=True) / mass
