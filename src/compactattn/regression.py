"""Kernel regression on ordinary data: the family of `attend` as a scikit-learn estimator.

With d_i = ‖x_i − x‖ a training point scores s_i = −d_i² / 2h², so a perfect match scores 0. On unit
vectors this is attend's scale · k·q at scale = 1/h², less 1/h² in every score, and the weights are
the same. Nothing here asks for unit vectors: Fixed(b=½) is [1 − d²/h²]₊^r and the Gaussian exp(−d²/2h²).

Shapes: Q queries, K training points, Y outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple, Self, TypeGuard

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from compactattn.kernels import Fixed, Kernel, Nearest, Normalising, parse
from compactattn.rows import CPU_BLOCK, Row, weigh

try:
    from scipy.spatial.distance import cdist  # type: ignore[import-untyped]
    from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:
    raise ImportError("compactattn.regression needs scikit-learn 1.6 or later: pip install scikit-learn") from error

TRIALS = 30  # bandwidths that "loo" tries
LARGEST = 1e75  # of |X|, h and 1/h: squares and their ratios then stay finite

Array = NDArray[np.float64]


class Neighbourhood(NamedTuple):
    """How far each query looks and what it finds there; both are (Q,)."""

    bandwidth: Array  # distance beyond which nothing has weight; for the dense Gaussian h
    support: NDArray[np.int64]  # training points with a non-zero weight; 0 where none is in reach


class CompactKernelRegressor(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Nadaraya-Watson regression with a compact kernel (paper Eq. 2): ŷ(x) = Σ_i w_i y_i.

    w = kernel(s) with s_i = −‖x_i − x‖² / 2h². All features count alike, so bring them to one
    scale first, for example with StandardScaler. Time is O(QK), for "loo" O(K²) per candidate; memory
    is O(Q + K), a block of rows at a time.

    Args:
        kernel: a Kernel or its text, as in `attend`: "biweight", "entmax(4/3)" and the other normalising
            kernels adapt their reach to the query, "rectified(2)" and "ball" have a fixed radius h,
            "topk_biweight(10)" takes the nearest points, "relumax(2)" those about as near as the best.
        bandwidth: h > 0, or "loo": the candidate of least leave-one-out mean squared error, averaged over
            outputs; the larger wins a tie. A nearest-k kernel with a step or compact profile does not
            depend on h: its bandwidth is k, a number given here has no effect, and "loo" chooses k anew.
        outside: the answer where no training point is in reach, which only a fixed radius can bring about:
            "nearest" (the mean over the nearest point and its ties), "mean" (of all y), "nan", or a number.
            Where it is "nan", "loo" charges such a point with the error of the mean.
        candidates: the bandwidths (or k) that "loo" tries. Default: 30, evenly spaced in log h (or log k),
            from about one neighbour up to where all points weigh about the same.

    Attributes:
        bandwidth_: the bandwidth in use: h, or k where the kernel does not depend on h.
        kernel_: the Kernel in use; with its chosen k, if "loo" chose one.
        loo_candidates_, loo_scores_: what "loo" tried and its mean squared errors; None without "loo".
        X_, y_: the training data. n_features_in_: their number of features.

    Example:
        >>> import numpy as np
        >>> rng = np.random.default_rng(0)
        >>> X = rng.uniform(0, 6, (200, 1))
        >>> y = np.sin(X[:, 0]) + rng.normal(0, 0.1, 200)
        >>> model = CompactKernelRegressor("biweight").fit(X, y)
        >>> model.predict([[1.5], [3.1]]).round(1)
        array([1., 0.])
        >>> bandwidth, support = model.neighbourhood([[1.5]])
        >>> bool(support[0] == np.sum(abs(X[:, 0] - 1.5) < bandwidth[0]))
        True
    """

    def __init__(
        self,
        kernel: Kernel | str = "biweight",
        bandwidth: float | str = "loo",
        *,
        outside: float | str = "nearest",
        candidates: Sequence[float] | None = None,
    ) -> None:
        self.kernel = kernel
        self.bandwidth = bandwidth
        self.outside = outside
        self.candidates = candidates

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """This estimator, with the data stored and the bandwidth chosen."""
        checked = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, order="C", copy=True)
        points, values = checked[0], np.array(checked[1], dtype=np.float64)
        _check_range(points)
        kernel = _check_kernel(self.kernel)
        outside = _check_outside(self.outside)
        candidates = scores = None
        if isinstance(self.bandwidth, str) and self.bandwidth == "loo":
            candidates = _check_candidates(self.candidates, points, kernel)
            scores = _leave_one_out(points, _columns(values), kernel, candidates, outside)
            best = len(scores) - 1 - int(np.argmin(scores[::-1]))  # the larger bandwidth wins a tie
            kernel, h = _tune(kernel, candidates[best])
        else:
            h = _check_bandwidth(self.bandwidth)
            if self.candidates is not None:
                raise ValueError(f"candidates are tried by bandwidth='loo' only, got bandwidth={h!r}; drop one of the two")
        self.X_, self.y_ = points, values
        self.kernel_ = kernel
        self.bandwidth_ = kernel.rule.k if isinstance(kernel.rule, Nearest) and _ignores_h(kernel) else h
        self.loo_candidates_, self.loo_scores_ = candidates, scores
        return self

    def predict(self, X: ArrayLike) -> Array:
        """ŷ = Σ_i w_i y_i at each query, (Q,) or (Q, Y) as y was; `outside` where nothing is in reach."""
        x = self._check_queries(X)
        y = _columns(self.y_)
        away = _answers(_check_outside(self.outside), y)
        out = np.empty((len(x), y.shape[1]))
        for part in _row_blocks(len(x), len(y)):
            out[part] = _estimate(_square_distances(x[part], self.X_), y, self.kernel_, self._h, away)
        return out.reshape(len(x), *self.y_.shape[1:])

    def neighbourhood(self, X: ArrayLike) -> Neighbourhood:
        """Effective bandwidth and number of neighbours of each query.

        Points with s > θ have weight, that is d² < −2h²θ, so the bandwidth is h √(−2θ) (paper Prop. 1).
        """
        x = self._check_queries(X)
        found = Neighbourhood(np.empty(len(x)), np.empty(len(x), dtype=np.int64))
        for part in _row_blocks(len(x), len(self.X_)):
            w, row = _weigh(_square_distances(x[part], self.X_), self.kernel_, self._h)
            support = torch.where(_out_of_reach(self.kernel_, row), 0.0, w).count_nonzero(-1)
            found.bandwidth[part] = _radius(self.kernel_, row, self._h)[:, 0].numpy()
            found.support[part] = support.numpy()
        return found

    @property
    def _h(self) -> float:
        return 1.0 if _ignores_h(self.kernel_) else self.bandwidth_

    def _check_queries(self, X: ArrayLike) -> Array:
        check_is_fitted(self)
        x: Array = validate_data(self, X, dtype=np.float64, reset=False)
        _check_range(x)
        return x


# -- distances → weights → estimate --------------------------------------------------------------


def _square_distances(a: Array, b: Array) -> Tensor:
    """(Q, K) squared distances from differences, not products: they do not cancel, and equal points are at 0."""
    return torch.from_numpy(cdist(a, b, "sqeuclidean"))


def _weigh(d2: Tensor, kernel: Kernel, h: float) -> tuple[Tensor, Row]:
    return weigh(d2 / (-2 * h * h), kernel.rule, kernel.r, perfect=0.0)


def _out_of_reach(kernel: Kernel, row: Row) -> Tensor:
    """(Q, 1) True where no training point has weight and `weigh` fell back on uniform weights."""
    return row.reach <= 0 if isinstance(kernel.rule, Fixed) else torch.zeros_like(row.reach, dtype=torch.bool)


def _radius(kernel: Kernel, row: Row, h: float) -> Tensor:
    """(Q, 1) h √(−2θ), beyond which nothing has weight; h itself for the dense Gaussian, which has no edge."""
    if not kernel.compact:
        return torch.full_like(row.reach, h)
    theta = torch.full_like(row.reach, -kernel.rule.b) if isinstance(kernel.rule, Fixed) else row.peak - row.reach
    return h * (-2 * theta).sqrt()


def _estimate(d2: Tensor, y: Array, kernel: Kernel, h: float, away: Array | None) -> Array:
    """(Q, Y) Σ_i w_i y_i; out of reach `away`, (1 | Q, Y), or for None the mean over the nearest point(s)."""
    w, row = _weigh(d2, kernel, h)
    lost = _out_of_reach(kernel, row)
    if away is None and bool(lost.any()):
        nearest = (d2 == d2.amin(-1, keepdim=True)).to(w.dtype)
        w = torch.where(lost, nearest / nearest.sum(-1, keepdim=True), w)
    out: Array = w.numpy() @ y
    if away is not None:
        np.copyto(out, away, where=lost.numpy())
    return out


def _answers(outside: float | str, y: Array) -> Array | None:
    """(1, Y) the answer out of reach; None is the nearest point's."""
    if outside == "nearest":
        return None
    return y.mean(0, keepdims=True) if outside == "mean" else np.full((1, y.shape[1]), outside)


# -- the choice of a bandwidth -------------------------------------------------------------------


def _ignores_h(kernel: Kernel) -> bool:
    """Whether w does not depend on h: w ∝ [s − s_(k)]₊^r, in which h cancels; then k is the bandwidth."""
    return isinstance(kernel.rule, Nearest) and bool(kernel.r != math.inf)


def _tune(kernel: Kernel, candidate: float) -> tuple[Kernel, float]:
    """The kernel and h that a candidate stands for."""
    if _ignores_h(kernel):
        return Kernel(kernel.profile, Nearest(int(candidate))), 1.0
    return kernel, float(candidate)


def _leave_one_out(X: Array, y: Array, kernel: Kernel, candidates: NDArray[Any], outside: float | str) -> Array:
    """Mean over i of (ŷ_{−i}(x_i) − y_i)² for each candidate, where ŷ_{−i} has not seen point i: s_ii = −∞."""
    tuned = [_tune(kernel, candidate) for candidate in candidates]
    away = _answers_left_out(outside, y)
    errors = np.zeros(len(tuned))
    for part, d2 in _distances_to_others(X):
        answers = None if away is None else away[part]
        for trial, (own, h) in enumerate(tuned):
            errors[trial] += np.square(_estimate(d2, y, own, h, answers) - y[part]).mean(1).sum()
    return errors / len(X)


def _answers_left_out(outside: float | str, y: Array) -> Array | None:
    """(K, Y) the answer out of reach at each training point that has been left out."""
    if outside == "mean" or (isinstance(outside, float) and math.isnan(outside)):
        mean = y.mean(0)
        return mean - (y - mean) / (len(y) - 1)
    away = _answers(outside, y)
    return None if away is None else np.broadcast_to(away, y.shape)


def _distances_to_others(X: Array) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the squared distances between training points, each infinitely far from itself."""
    for part in _row_blocks(len(X), len(X)):
        d2 = _square_distances(X[part], X)
        d2[:, part].fill_diagonal_(math.inf)
        yield part, d2


def _default_candidates(X: Array, kernel: Kernel) -> NDArray[Any]:
    """Bandwidths from about one neighbour up to about equal weights, evenly spaced in log h (or log k)."""
    others = len(X) - 1
    if _ignores_h(kernel):
        fewest = 1 if kernel.r == 0 else min(2, others)  # of a compact profile the k-th neighbour weighs nothing
        return np.unique(np.geomspace(fewest, others, TRIALS).round().astype(np.int64))
    nearest, typical = _length_scales(X)
    if not math.isfinite(nearest):
        return np.ones(1)  # all points coincide: every h is the same
    assert not isinstance(kernel.r, Tensor)
    b = getattr(kernel.rule, "b", 0.5)
    # a radius below the nearest point finds nothing; other rules see differences of d², small in many dimensions
    low = nearest / (2 if isinstance(kernel.rule, Fixed) else 10)
    # all K points share Σ w = 1, so a normalising kernel evens out only at a larger h
    high = 3 * typical * (len(X) ** (0.5 / kernel.r) if isinstance(kernel.rule, Normalising) else 1.0)
    low, high = np.clip([low, high] / np.sqrt(2 * b), 1 / LARGEST, LARGEST)
    return np.geomspace(low, high, TRIALS)


def _length_scales(X: Array) -> tuple[float, float]:
    """Medians over the points of the distance to the nearest distinct point, and of the median distance."""
    columns: list[tuple[Tensor, Tensor]] = []
    for _, d2 in _distances_to_others(X):
        distinct = torch.where((d2 > 0) & d2.isfinite(), d2.sqrt(), math.nan)
        columns.append((distinct.nan_to_num(nan=math.inf).amin(-1), distinct.nanmedian(-1).values))
    nearest, typical = (torch.cat(column) for column in zip(*columns, strict=True))
    return float(nearest.median()), float(typical.nanmedian())


def _row_blocks(rows: int, keys: int) -> Iterator[slice]:
    step = max(1, CPU_BLOCK // keys)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _columns(y: Array) -> Array:
    return y.reshape(len(y), -1)


# -- the edge: checks ----------------------------------------------------------------------------


def _check_kernel(kernel: Kernel | str) -> Kernel:
    kernel = kernel if isinstance(kernel, Kernel) else parse(kernel)
    if kernel.learned:
        raise ValueError(f"kernel {kernel} has a learned order, and fit has no gradient; give a number, as in 'entmax(1.5)'")
    return kernel


def _check_outside(outside: float | str) -> float | str:
    """The text "nearest" or "mean", or a float; NaN for the text "nan"."""
    if isinstance(outside, str) and outside in ("nearest", "mean", "nan"):
        return math.nan if outside == "nan" else outside
    if _is_number(outside) and not math.isinf(outside):
        return float(outside)
    raise ValueError(f"outside={outside!r} is not an answer; use 'nearest', 'mean', 'nan' or a number")


def _check_bandwidth(bandwidth: float | str) -> float:
    if _is_number(bandwidth) and 1 / LARGEST <= float(bandwidth) <= LARGEST:
        return float(bandwidth)
    raise ValueError(
        f"bandwidth={bandwidth!r} must be a positive number from {1 / LARGEST:g} to {LARGEST:g}, "
        "or 'loo' to choose it by leave-one-out"
    )


def _check_candidates(candidates: Sequence[float] | None, X: Array, kernel: Kernel) -> NDArray[Any]:
    """(C,) in ascending order."""
    if len(X) < 2:
        raise ValueError("bandwidth='loo' leaves one point out and got 1 sample; give bandwidth a number, or more samples")
    if candidates is None:
        return _default_candidates(X, kernel)
    given = list(candidates)
    if not given:
        raise ValueError("candidates is empty; give the bandwidths to try, as in [0.1, 0.3, 1.0], or None")
    check = (lambda k: Nearest(k).k) if _ignores_h(kernel) else _check_bandwidth
    return np.unique([check(candidate) for candidate in given])


def _check_range(X: Array) -> None:
    if not np.abs(X).max(initial=0.0) <= LARGEST:
        raise ValueError(f"X holds {np.abs(X).max():g}, whose square overflows; scale it to at most {LARGEST:g}")


def _is_number(x: object) -> TypeGuard[float]:
    return isinstance(x, Real) and not isinstance(x, bool)
