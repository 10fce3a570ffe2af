"""The estimator as scikit-learn calls it: its contract, memory, errors, and that it is an optional extra."""

from __future__ import annotations

import doctest
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

from compactattn import Kernel, Normalising, Profile, biweight, entmax, regression
from compactattn.regression import CompactKernelRegressor
from regression_cases import assert_close, data, queries, with_duplicates

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
