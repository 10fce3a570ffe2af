"""The estimator against other people's kernel regression, against attend, and against its own definition."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsRegressor, RadiusNeighborsRegressor
from statsmodels.nonparametric.kernel_regression import KernelReg

from compactattn import attend, parse
from compactattn.regression import CompactKernelRegressor
from regression_cases import FIXED, KERNELS, NORMALISING, assert_close, data, distances, queries

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
