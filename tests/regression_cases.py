"""Kernels and data for the tests of the estimator."""

from __future__ import annotations

import numpy as np

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


def with_duplicates(n: int = 24):
    X, y = data(n, outputs=2)
    X[1] = X[0]
    X[5] = X[4] = X[3]
    return X, y
