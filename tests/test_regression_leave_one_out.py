"""The bandwidth, or k, that the estimator chooses by leave-one-out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from compactattn import parse, regression
from compactattn.regression import CompactKernelRegressor
from regression_cases import KERNELS, assert_close, data, queries, with_duplicates


def left_out(X, y, kernel, h, outside):
    """Leave-one-out predictions, one fit per point."""
    rows = [np.arange(len(X)) != i for i in range(len(X))]
    model = CompactKernelRegressor(kernel, h, outside=outside)
    return np.stack([model.fit(X[row], y[row]).predict(X[~row])[0] for row in rows])


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if "topk" not in kernel] + ["topk_softmax(4)"])
def test_leave_one_out_scores_are_those_of_one_fit_per_point(kernel):
    X, y = with_duplicates()
    h = [0.05, 0.3, 1.0]
    model = CompactKernelRegressor(kernel, candidates=h).fit(X, y)
    want = [np.mean((left_out(X, y, kernel, own, "nearest") - y) ** 2) for own in h]
    np.testing.assert_allclose(model.loo_scores_, want, rtol=1e-12)
    assert model.bandwidth_ == h[int(np.argmin(want))]
    assert model.kernel_ == parse(kernel)


@pytest.mark.parametrize("kernel", ["topk_uniform", "topk_epanechnikov", "topk_biweight"])
def test_leave_one_out_chooses_k_where_h_has_no_effect(kernel):
    X, y = with_duplicates()
    k = [1, 2, 3, 5, 8, 23, 40]
    model = CompactKernelRegressor(f"{kernel}(1000)", candidates=k).fit(X, y)
    want = [np.mean((left_out(X, y, f"{kernel}({own})", 1.0, "nearest") - y) ** 2) for own in k]
    np.testing.assert_allclose(model.loo_scores_, want, rtol=1e-12)
    best = k[int(np.argmin(want))]
    assert 1 < best < 23
    assert model.bandwidth_ == best
    assert model.kernel_ == parse(f"{kernel}({best})")
    same = CompactKernelRegressor(f"{kernel}({best})", 1.0).fit(X, y)
    assert np.array_equal(model.predict(queries()), same.predict(queries()))


@pytest.mark.parametrize("outside", ["nearest", "mean", -3.0])
def test_leave_one_out_gives_the_answer_of_outside_where_nothing_is_in_reach(outside):
    X, y = with_duplicates()
    h = [0.02, 0.2]
    model = CompactKernelRegressor("rectified(1)", outside=outside, candidates=h).fit(X, y)
    want = [np.mean((left_out(X, y, "rectified(1)", own, outside) - y) ** 2) for own in h]
    np.testing.assert_allclose(model.loo_scores_, want, rtol=1e-12)


@pytest.mark.parametrize("outside", ["nan", math.nan])
def test_leave_one_out_charges_a_refused_answer_with_the_error_of_the_mean(outside):
    X, y = with_duplicates()
    model = CompactKernelRegressor("ball", outside=outside, candidates=[0.02, 0.2, 0.5]).fit(X, y)
    mean = CompactKernelRegressor("ball", outside="mean", candidates=[0.02, 0.2, 0.5]).fit(X, y)
    assert np.isnan(left_out(X, y, "ball", 0.02, "nan")).any()
    assert np.array_equal(model.loo_scores_, mean.loo_scores_)
    assert np.isnan(model.predict([[99.0, 99.0]])).all()


@pytest.mark.parametrize("features", [1, 3, 20])
@pytest.mark.parametrize(
    "kernel",
    [
        *("gaussian", "sparsemax", "biweight", "entmax(1.05)", "rectified(1)", "rectified(r=2, b=50)", "ball"),
        *("relumax(r=2)", "relumax(r=1, b=30)", "margin", "topk_uniform(1)", "topk_biweight(1)"),
    ],
)
def test_the_default_candidates_surround_the_best_bandwidth(kernel, features):
    X, y = data(200, features, noise=0.3)
    model = CompactKernelRegressor(kernel).fit(X, y)
    best = int(np.flatnonzero(model.loo_candidates_ == model.bandwidth_)[0])
    assert 1 < best < len(model.loo_candidates_) - 2
    assert model.loo_scores_[best] == model.loo_scores_.min()
    assert model.loo_scores_[best] < 0.95 * min(model.loo_scores_[0], model.loo_scores_[-1])
    assert np.median(model.neighbourhood(queries(features)).support) >= 2


def test_duplicates_do_not_move_the_default_candidates():
    X, y = data(outputs=2)
    once, twice = (CompactKernelRegressor("relumax(1)").fit(np.tile(X, (n, 1)), np.tile(y, (n, 1))) for n in (1, 2))
    np.testing.assert_allclose(twice.loo_candidates_, once.loo_candidates_, rtol=0.05)


def test_candidates_and_scores_can_be_plotted_against_each_other():
    X, y = data()
    model = CompactKernelRegressor("biweight", candidates=(1.0, 0.1, 0.3, 0.3)).fit(X, y)
    assert model.loo_candidates_.tolist() == [0.1, 0.3, 1.0]
    assert model.loo_scores_.shape == (3,)
    assert CompactKernelRegressor().fit(X, y).loo_scores_.shape == (regression.TRIALS,)
    model.set_params(bandwidth=0.3, candidates=None).fit(X, y)
    assert model.loo_candidates_ is model.loo_scores_ is None


def test_the_larger_bandwidth_wins_a_tie():
    X, _ = data()
    model = CompactKernelRegressor("biweight").fit(X, np.zeros(len(X)))
    assert model.bandwidth_ == model.loo_candidates_.max()


@pytest.mark.parametrize("kernel", KERNELS)
def test_leave_one_out_is_defined_for_two_points_and_for_points_that_coincide(kernel):
    pair = CompactKernelRegressor(kernel).fit([[0.0], [1.0]], [2.0, 4.0])
    assert_close(pair.loo_scores_, np.full(len(pair.loo_scores_), 4.0))  # each is predicted by the other
    same = CompactKernelRegressor(kernel).fit(np.ones((12, 2)), np.arange(12.0))
    assert np.isfinite(same.loo_scores_).all()
    k = min(getattr(same.kernel_.rule, "k", 12), 12)
    assert_close(same.predict([[1.0, 1.0]]), [np.arange(k).mean()])  # the earlier point wins a tie


def test_leave_one_out_needs_two_samples_and_says_so():
    with pytest.raises(ValueError, match=r"'loo'.* 1 sample; give bandwidth a number"):
        CompactKernelRegressor("biweight").fit([[0.0]], [1.0])
    assert CompactKernelRegressor("biweight", 1.0).fit([[0.0]], [1.0]).predict([[5.0]]).tolist() == [1.0]
