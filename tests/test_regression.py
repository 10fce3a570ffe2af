"""The estimator against other people's kernel regression, against attend, and against its own definition."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsRegressor, RadiusNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator
from statsmodels.nonparametric.kernel_regression import KernelReg

from compactattn import Kernel, Normalising, Profile, attend, biweight, entmax, parse, regression
from compactattn.regression import CompactKernelRegressor

EPS = np.finfo(np.float64).eps
NORMALISING = ["sparsemax", "biweight", "triweight", "entmax(1.33)", "entmax(1.05)"]
FIXED = ["norm_relu", "rectified(2)", "rectified(r=1.5, b=2)", "ball"]
ANCHORED = ["relumax(r=1)", "relumax(r=2, b=0.5)", "margin", "truncated_gaussian"]
NEAREST = ["topk_uniform(5)", "topk_epanechnikov(7)", "topk_biweight(10)", "topk_softmax(8)"]
KERNELS = ["gaussian", *NORMALISING, *FIXED, *ANCHORED, *NEAREST]


def data(n: int = 80, features: int = 2, seed: int = 0, outputs: int | None = None, noise: float = 0.1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, features))
    clean = np.sin(2 * X[:, 0]) + X[:, -1]
    if outputs is None:
        return X, clean + noise * rng.normal(size=n)
    return X, clean[:, None] * np.arange(1, outputs + 1) + noise * rng.normal(size=(n, outputs))


def queries(features: int = 2, n: int = 40, seed: int = 1):
    return np.random.default_rng(seed).normal(size=(n, features))


def distances(a, b):
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(-1))


def assert_close(got, want, ulps: float = 16):
    """Equal to within the rounding of float64 in numbers of the size of `want`; measured: 2 ulps where none are given."""
    want = np.asarray(want)
    np.testing.assert_allclose(got, want, rtol=0, atol=ulps * EPS * max(1.0, np.nanmax(np.abs(want))))


# -- scikit-learn's contract ---------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["biweight", "gaussian", "rectified(1)", "ball", "topk_biweight(10)", "relumax(r=2)"])
def test_check_estimator_passes_with_the_bandwidth_chosen(kernel):
    check_estimator(CompactKernelRegressor(kernel), on_skip=None)


@pytest.mark.parametrize("kernel", ["sparsemax", "topk_softmax(8)", "topk_uniform(5)", "margin", biweight()], ids=str)
def test_check_estimator_passes_with_the_bandwidth_given(kernel):
    check_estimator(CompactKernelRegressor(kernel, bandwidth=0.5), on_skip=None)


def test_works_in_a_pipeline_and_a_grid_search_over_kernels():
    X, y = data()
    search = GridSearchCV(
        make_pipeline(StandardScaler(), CompactKernelRegressor(bandwidth=0.3)),
        {"compactkernelregressor__kernel": ["biweight", "topk_uniform(5)", biweight()]},
        cv=3,
    ).fit(X, y)
    assert search.score(X, y) > 0.8


def test_declares_that_it_takes_many_outputs():
    assert get_tags(CompactKernelRegressor()).target_tags.multi_output


def test_a_kernel_object_survives_clone_and_means_the_same_as_its_text():
    X, y = data()
    model = clone(CompactKernelRegressor(biweight(), 0.5))
    want = CompactKernelRegressor("entmax(1.5)", 0.5).fit(X, y).predict(queries())
    assert np.array_equal(model.fit(X, y).predict(queries()), want)


def test_the_example_of_the_docstring_runs():
    assert doctest.testmod(regression).failed == 0
    assert doctest.testmod(regression).attempted > 0


# -- other people's kernel regression ------------------------------------------------------------


@pytest.mark.parametrize("features", [1, 3])
def test_gaussian_agrees_with_statsmodels_local_constant_regression(features):
    X, y = data(features=features)
    Q, h = queries(features), 0.4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its random numbers, which a given bandwidth does not need
        peer = KernelReg(y, X, var_type="c" * features, reg_type="lc", bw=[h] * features)
    assert_close(CompactKernelRegressor("gaussian", h).fit(X, y).predict(Q), peer.fit(Q)[0])


@pytest.mark.parametrize("r", [1, 2, 3])
def test_fixed_bandwidth_agrees_with_radius_neighbours_under_the_same_weights(r):
    X, y = data(outputs=2)
    Q, h = queries(), 0.5

    def polynomial(rows):
        # scikit-learn hands over one array of distances per query
        return np.array([(1 - (d / h) ** 2) ** r for d in rows] + [None], dtype=object)[:-1]

    peer = RadiusNeighborsRegressor(radius=h, weights=polynomial, algorithm="brute").fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it warns that some queries have no neighbour
        want = peer.predict(Q)
    assert np.isnan(want).any()
    assert not np.isnan(want).all()
    got = CompactKernelRegressor(f"rectified({r})", h, outside="nan").fit(X, y).predict(Q)
    assert_close(got, want, ulps=64)  # measured: 8; its distances come from a matrix product


def test_ball_agrees_with_radius_neighbours():
    X, y = data()
    got = CompactKernelRegressor("ball", 1.5, outside="nan").fit(X, y).predict(queries() / 2)
    assert_close(got, RadiusNeighborsRegressor(radius=1.5).fit(X, y).predict(queries() / 2))


@pytest.mark.parametrize("k", [1, 5, 80])
def test_topk_uniform_agrees_with_k_neighbours(k):
    X, y = data(outputs=2)
    got = CompactKernelRegressor(f"topk_uniform({k})", 1.0).fit(X, y).predict(queries())
    assert_close(got, KNeighborsRegressor(k).fit(X, y).predict(queries()))


def test_topk_biweight_agrees_with_k_neighbours_under_the_same_weights():
    X, y = data()

    def polynomial(d):
        return (1 - d**2 / d[:, -1:] ** 2) ** 2  # [s − s_(k)]₊² up to a factor

    got = CompactKernelRegressor("topk_biweight(10)", 1.0).fit(X, y).predict(queries())
    assert_close(got, KNeighborsRegressor(10, weights=polynomial).fit(X, y).predict(queries()))


# -- attend --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_agrees_with_attend_on_unit_vectors(kernel):
    rng = np.random.default_rng(0)
    X, Q = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (rng.normal(size=(60, 3)), rng.normal(size=(30, 3))))
    y, h = rng.normal(size=(60, 2)), 0.35
    q, k, v = (torch.from_numpy(x)[None, None] for x in (Q, X, y))
    out, readout = attend(q, k, v, kernel, scale=1 / h**2, return_readout=True)
    model = CompactKernelRegressor(kernel, h, outside="mean").fit(X, y)  # attend's answer out of reach
    assert_close(model.predict(Q), out[0, 0].numpy(), ulps=64)  # measured: 8; scale · q·k rounds at 1/h²
    bandwidth, support = model.neighbourhood(Q)
    found = support > 0
    assert found.sum() >= 20
    assert np.array_equal(support[found], readout.support[0, 0].numpy()[found])
    np.testing.assert_allclose(bandwidth[found], readout.bandwidth[0, 0].numpy()[found], rtol=1e-12)


# -- its own definition --------------------------------------------------------------------------


@pytest.mark.parametrize(("kernel", "b", "r"), [("rectified(1)", 0.5, 1), ("rectified(r=2.5, b=2)", 2.0, 2.5)])
def test_fixed_kernel_is_the_polynomial_of_distance_with_radius_h_root_2b(kernel, b, r):
    X, y = data()
    h = 0.8
    K = np.maximum(0, 1 - distances(queries(), X) ** 2 / (2 * b * h**2)) ** r
    reached = K.sum(1) > 0
    model = CompactKernelRegressor(kernel, h).fit(X, y)
    want = (K @ y)[reached] / K.sum(1)[reached]
    assert_close(model.predict(queries())[reached], want)
    bandwidth, support = model.neighbourhood(queries())
    assert_close(bandwidth, np.full(40, h * math.sqrt(2 * b)))
    assert np.array_equal(support, (K > 0).sum(1))


@pytest.mark.parametrize("kernel", NORMALISING)
def test_effective_bandwidth_of_a_normalising_kernel_is_where_the_weights_have_unit_mass(kernel):
    X, y = data()
    r, h = parse(kernel).r, 0.6
    model = CompactKernelRegressor(kernel, h).fit(X, y)
    bandwidth, support = model.neighbourhood(queries())
    gap = np.maximum(0, bandwidth[:, None] ** 2 - distances(queries(), X) ** 2)
    w = (gap / (2 * r * h**2)) ** r  # [s/r − τ]₊^r with rτ = θ = −bandwidth²/2h²
    np.testing.assert_allclose(w.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(model.predict(queries()), w @ y, rtol=0, atol=1e-12)
    assert np.array_equal((w > 0).sum(1), support)


@pytest.mark.parametrize("kernel", ["relumax(r=1)", "relumax(r=2, b=0.5)", "margin", "truncated_gaussian"])
def test_effective_bandwidth_of_an_anchored_kernel_grows_with_the_nearest_distance(kernel):
    X, y = data()
    d = distances(queries() * 3, X)
    bandwidth, support = CompactKernelRegressor(kernel, 0.3).fit(X, y).neighbourhood(queries() * 3)
    np.testing.assert_allclose(bandwidth, np.sqrt(d.min(1) ** 2 + 2 * parse(kernel).rule.b * 0.3**2), rtol=1e-14)
    assert np.array_equal(support, (d < bandwidth[:, None]).sum(1))


@pytest.mark.parametrize(("kernel", "neighbours"), [("topk_uniform(5)", 5), ("topk_biweight(5)", 4), ("topk_softmax(5)", 5)])
def test_effective_bandwidth_of_a_nearest_kernel_is_the_distance_of_the_kth(kernel, neighbours):
    X, y = data()
    bandwidth, support = CompactKernelRegressor(kernel, 2.0).fit(X, y).neighbourhood(queries())
    np.testing.assert_allclose(bandwidth, np.sort(distances(queries(), X))[:, 4], rtol=1e-14)
    assert (support == neighbours).all()


def test_the_dense_gaussian_reports_h_and_every_point():
    X, y = data()
    bandwidth, support = CompactKernelRegressor("gaussian", 0.7).fit(X, y).neighbourhood(queries())
    assert (bandwidth == 0.7).all()
    assert (support == len(X)).all()


@pytest.mark.parametrize("kernel", KERNELS)
def test_predictions_are_averages_of_the_values(kernel):
    X, y = data()
    got = CompactKernelRegressor(kernel, 0.3).fit(X, y).predict(queries() * 5)
    assert (got >= y.min() - 1e-12).all()
    assert (got <= y.max() + 1e-12).all()
    constant = CompactKernelRegressor(kernel, 0.3).fit(X, np.full(len(X), 3.0)).predict(queries() * 5)
    assert_close(constant, np.full(40, 3.0))


@pytest.mark.parametrize("kernel", KERNELS)
def test_outputs_are_predicted_as_if_each_were_alone(kernel):
    X, y = data(outputs=3)
    both = CompactKernelRegressor(kernel, 0.4).fit(X, y).predict(queries())
    assert both.shape == (40, 3)
    for column in range(3):
        alone = CompactKernelRegressor(kernel, 0.4).fit(X, y[:, column]).predict(queries())
        assert alone.shape == (40,)
        assert_close(both[:, column], alone)


def test_h_has_no_effect_where_the_kth_neighbour_sets_the_scale():
    X, y = data()
    for kernel in ("topk_biweight(9)", "topk_uniform(9)"):
        small, large = (CompactKernelRegressor(kernel, h).fit(X, y) for h in (1e-3, 1e3))
        assert np.array_equal(small.predict(queries()), large.predict(queries()))
        assert small.bandwidth_ == large.bandwidth_ == 9
    small, large = (CompactKernelRegressor("topk_softmax(9)", h).fit(X, y) for h in (0.1, 1.0))
    assert not np.allclose(small.predict(queries()), large.predict(queries()))
    assert (small.bandwidth_, large.bandwidth_) == (0.1, 1.0)


# -- distances -----------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0.0, 1e8])
def test_a_training_point_is_at_distance_zero_from_itself_however_far_from_the_origin(offset):
    X, y = data(features=5)
    X = X + offset
    assert (np.sort(distances(X, X))[:, 1] > 0.1).all()
    model = CompactKernelRegressor("rectified(1)", 1e-6, outside="nan").fit(X, y)
    assert np.array_equal(model.predict(X), y)
    assert (model.neighbourhood(X).support == 1).all()


def test_distances_do_not_cancel_far_from_the_origin():
    rng = np.random.default_rng(0)
    X, Q = rng.integers(0, 50, (60, 3)) / 8, rng.integers(0, 50, (30, 3)) / 8  # exact after any shift
    y = rng.normal(size=60)
    for kernel in ("biweight", "gaussian", "topk_uniform(3)"):
        near = CompactKernelRegressor(kernel, 1.0).fit(X, y).predict(Q)
        far = CompactKernelRegressor(kernel, 1.0).fit(X + 2**30, y).predict(Q + 2**30)
        assert np.array_equal(near, far)


@pytest.mark.parametrize("scale", [2.0**-200, 2.0**200])
@pytest.mark.parametrize("kernel", ["biweight", "rectified(1)", "topk_epanechnikov(5)", "relumax(1)", "gaussian"])
def test_units_do_not_matter(kernel, scale):
    X, y = data()
    want = CompactKernelRegressor(kernel, 0.5).fit(X, y)
    got = CompactKernelRegressor(kernel, 0.5 * scale).fit(X * scale, y)
    assert_close(got.predict(queries() * scale), want.predict(queries()))
    np.testing.assert_allclose(got.neighbourhood(queries() * scale)[0] / scale, want.neighbourhood(queries())[0], rtol=1e-12)
    chosen = [CompactKernelRegressor(kernel).fit(X * unit, y) for unit in (1.0, scale)]
    assert_close(chosen[1].predict(queries() * scale), chosen[0].predict(queries()), ulps=200)  # measured: 20


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel not in FIXED])
def test_an_adaptive_kernel_answers_however_far_the_query(kernel):
    X, y = data()
    model = CompactKernelRegressor(kernel, 1e-3, outside="nan").fit(X, y)
    for far in (1e3, 1e70):
        assert np.isfinite(model.predict([[far, far]])).all()
        assert model.neighbourhood([[far, far]]).support[0] >= 1


# -- where nothing is in reach -------------------------------------------------------------------

TIED_X = np.array([[0.0], [2.0], [10.0]])
TIED_Y = np.array([[1.0, 10.0], [2.0, 20.0], [6.0, 60.0]])


@pytest.mark.parametrize("kernel", ["rectified(1)", "rectified(2)", "ball"])
@pytest.mark.parametrize(
    ("outside", "lone", "tied"),
    [
        ("nearest", [6.0, 60.0], [1.5, 15.0]),
        ("mean", [3.0, 30.0], [3.0, 30.0]),
        ("nan", [math.nan] * 2, [math.nan] * 2),
        (-7, [-7.0, -7.0], [-7.0, -7.0]),
        (np.float32(0.5), [0.5, 0.5], [0.5, 0.5]),
    ],
)
def test_outside_defines_the_answer_where_nothing_is_in_reach(kernel, outside, lone, tied):
    model = CompactKernelRegressor(kernel, 1.0, outside=outside).fit(TIED_X, TIED_Y)
    got = model.predict([[8.0], [1.0], [9.5]])  # d = 1 is out of a ball of radius 1
    np.testing.assert_array_equal(got, [lone, tied, [6.0, 60.0]])
    assert model.neighbourhood([[8.0], [1.0], [9.5]]).support.tolist() == [0, 0, 1]
    assert model.neighbourhood([[8.0], [1.0], [9.5]]).bandwidth.tolist() == [1.0, 1.0, 1.0]


def test_a_tie_at_the_edge_of_a_nearest_kernel_is_not_out_of_reach():
    model = CompactKernelRegressor("topk_epanechnikov(2)", 1.0, outside="nan").fit(TIED_X, TIED_Y)
    np.testing.assert_array_equal(model.predict([[1.0]]), [[1.5, 15.0]])  # ρ = 0: both weigh the same
    assert model.neighbourhood([[1.0]]).support.tolist() == [2]


# -- leave-one-out -------------------------------------------------------------------------------


def left_out(X, y, kernel, h, outside):
    """Leave-one-out predictions, one fit per point."""
    rows = [np.arange(len(X)) != i for i in range(len(X))]
    model = CompactKernelRegressor(kernel, h, outside=outside)
    return np.stack([model.fit(X[row], y[row]).predict(X[~row])[0] for row in rows])


def with_duplicates(n: int = 24):
    X, y = data(n, outputs=2)
    X[1] = X[0]
    X[5] = X[4] = X[3]
    return X, y


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


# -- blocks and storage --------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["biweight", "rectified(1)", "topk_biweight(4)", "topk_softmax(4)"])
def test_blocks_bound_the_memory_and_leave_the_answer(kernel, monkeypatch):
    X, y = with_duplicates(50)
    whole = CompactKernelRegressor(kernel).fit(X, y)
    largest, cdist = 0, regression.cdist

    def watched(a, b, metric):
        nonlocal largest
        largest = max(largest, len(a) * len(b))
        return cdist(a, b, metric)

    monkeypatch.setattr(regression, "cdist", watched)
    monkeypatch.setattr(regression, "CPU_BLOCK", 350)
    parts = CompactKernelRegressor(kernel).fit(X, y)
    np.testing.assert_allclose(parts.loo_scores_, whole.loo_scores_, rtol=1e-13)
    assert parts.bandwidth_ == whole.bandwidth_
    assert_close(parts.predict(queries()), whole.predict(queries()))
    for got, want in zip(parts.neighbourhood(queries()), whole.neighbourhood(queries()), strict=True):
        np.testing.assert_array_equal(got, want)
    assert largest == 350
    monkeypatch.setattr(regression, "CPU_BLOCK", 1)  # one row is the least
    assert_close(whole.predict(queries()), parts.predict(queries()))


def test_the_training_data_are_copied():
    X, y = data()
    model = CompactKernelRegressor("biweight", 0.5).fit(X, y)
    before = model.predict(queries())
    X[:], y[:] = 0, 0
    assert np.array_equal(model.predict(queries()), before)
    assert model.n_features_in_ == 2


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kernel": "biweigt"}, ValueError, "did you mean 'biweight'"),
        ({"kernel": "topk_uniform(0)"}, ValueError, "whole number ≥ 1"),
        ({"kernel": 3}, TypeError, "got int"),
        ({"kernel": biweight}, TypeError, "call it, as in biweight"),
        ({"kernel": entmax(torch.tensor(1.5))}, ValueError, "learned order.*give a number, as in 'entmax"),
        ({"kernel": Kernel(Profile(0, torch.tensor([1.5, 2.0])), Normalising())}, ValueError, "learned order"),
        ({"bandwidth": 0.0}, ValueError, r"bandwidth=0.0 must be a positive number from 1e-75 to 1e\+75, or 'loo'"),
        ({"bandwidth": -1}, ValueError, "bandwidth=-1 must be"),
        ({"bandwidth": math.nan}, ValueError, "bandwidth=nan must be"),
        ({"bandwidth": math.inf}, ValueError, "bandwidth=inf must be"),
        ({"bandwidth": 1e-200}, ValueError, "bandwidth=1e-200 must be"),
        ({"bandwidth": True}, ValueError, "bandwidth=True must be"),
        ({"bandwidth": "silverman"}, ValueError, "bandwidth='silverman' must be"),
        ({"bandwidth": None}, ValueError, "bandwidth=None must be"),
        ({"bandwidth": [1.0, 2.0]}, ValueError, "bandwidth=.* must be"),
        ({"outside": "zero"}, ValueError, "outside='zero' is not an answer; use 'nearest', 'mean', 'nan' or a number"),
        ({"outside": None}, ValueError, "outside=None"),
        ({"outside": math.inf}, ValueError, "outside=inf"),
        ({"outside": True}, ValueError, "outside=True"),
        ({"bandwidth": "loo", "candidates": []}, ValueError, "candidates is empty"),
        ({"bandwidth": "loo", "candidates": [1.0, -1.0]}, ValueError, "bandwidth=-1.0 must be"),
        ({"bandwidth": "loo", "candidates": [2.5], "kernel": "topk_uniform(3)"}, ValueError, "k = 2.5 neighbours"),
        ({"bandwidth": 1.0, "candidates": [1.0]}, ValueError, "candidates are tried by bandwidth='loo' only"),
    ],
)
def test_fit_refuses_what_it_cannot_use_and_says_what_it_can(options, error, message):
    X, y = data()
    model = CompactKernelRegressor(**{"bandwidth": 1.0, **options})  # as in scikit-learn, construction checks nothing
    with pytest.raises(error, match=message):
        model.fit(X, y)
    assert not hasattr(model, "X_")


def test_numbers_whose_squares_overflow_are_refused():
    X, y = data()
    with pytest.raises(ValueError, match=r"X holds 1e\+200, whose square overflows; scale it to at most 1e\+75"):
        CompactKernelRegressor("biweight", 1.0).fit([[1e200], [0.0]], [1.0, 2.0])
    with pytest.raises(ValueError, match="square overflows"):
        CompactKernelRegressor("biweight", 1.0).fit(X, y).predict([[0.0, -1e90]])


# -- an optional extra ---------------------------------------------------------------------------


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_the_package_leaves_scikit_learn_alone():
    assert run("import sys, compactattn; print('sklearn' in sys.modules, 'scipy' in sys.modules)") == "False False"


def test_without_scikit_learn_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "try: import compactattn.regression\n"
        "except ImportError as error: print(error)"
    )
    assert "pip install scikit-learn" in run(code)
