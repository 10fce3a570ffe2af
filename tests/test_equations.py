"""Every numbered equation of the paper and Proposition 1, in float64. docs/equations.md is the index."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn.functional import normalize

from compactattn import (
    Causal,
    attend,
    entmax,
    epanechnikov,
    gaussian,
    norm_relu,
    parse,
    rectified,
    relumax,
    topk_softmax,
    topk_uniform,
    weights,
)

EXACT = {"rtol": 1e-11, "atol": 1e-12}
ORDERS = (1.0, 2.0, 3.0, 1.5, 7.0, 40.0)


@pytest.fixture
def sample():
    """Unit-norm keys and queries, values: (B, H, T, D) = (2, 3, 23, 6)."""
    torch.manual_seed(0)
    q, k = (normalize(torch.randn(2, 3, 23, 6, dtype=torch.float64), dim=-1) for _ in range(2))
    return q, k, torch.randn(2, 3, 23, 5, dtype=torch.float64)


def squared_distances(q, k):
    return (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)  # (B, H, Q, K)


def nadaraya_watson(kernel_values, v):
    """Eq. 2: Σ K v / Σ K."""
    return (kernel_values @ v) / kernel_values.sum(-1, keepdim=True)


@pytest.mark.parametrize("r", ORDERS)
def test_eq_1_entmax_is_the_rectified_power_with_unit_mass(r):
    z = 3 * torch.randn(50, 31, dtype=torch.float64)
    alpha = 1 + 1 / r
    p = weights(z, entmax(alpha))
    one = torch.ones(50, dtype=torch.float64)
    torch.testing.assert_close(p.sum(-1), one, **EXACT)
    inside = p > 0
    tau = torch.where(inside, (alpha - 1) * z - p ** (alpha - 1), torch.nan)  # one τ explains the whole row
    spread = tau.nan_to_num(-math.inf).amax(-1) - tau.nan_to_num(math.inf).amin(-1)
    torch.testing.assert_close(spread, torch.zeros_like(spread), rtol=0, atol=1e-11)
    edge = tau.nanmean(-1, keepdim=True)
    torch.testing.assert_close(((alpha - 1) * z - edge).clamp_min(0) ** (1 / (alpha - 1)), p, **EXACT)


@pytest.mark.parametrize("alpha", [1.1, 4 / 3, 1.5, 1.8, 2.0])
def test_eq_1_entmax_maximises_the_tsallis_regularised_score(alpha):
    z = torch.randn(12, dtype=torch.float64)

    def objective(p):
        return (z * p).sum(-1) + (1 - p.pow(alpha).sum(-1)) / (alpha * (alpha - 1))

    best = weights(z, entmax(alpha))
    others = torch.distributions.Dirichlet(torch.ones(12, dtype=torch.float64)).sample((500,))
    for step in (1.0, 1e-2, 1e-4):
        assert (objective(best + step * (others - best)) <= objective(best) + 1e-14).all()


def test_eq_2_and_3_softmax_attention_is_gaussian_nadaraya_watson(sample):
    q, k, v = sample
    for h in (0.3, 1.0, 2.0):
        kernel = torch.exp(-squared_distances(q, k) / (2 * h * h))
        torch.testing.assert_close(attend(q, k, v, gaussian(), scale=1 / h**2), nadaraya_watson(kernel, v), **EXACT)
        expected = torch.softmax(q @ k.mT / h**2, -1) @ v
        torch.testing.assert_close(attend(q, k, v, "softmax", scale=1 / h**2), expected, **EXACT)


def test_eq_2_the_sum_runs_over_the_strict_past(sample):
    q, _, v = sample
    out = attend(q, q, v, gaussian(), scale=2.0, mask=Causal(offset=1))  # q ≡ k, as in the paper
    kernel = torch.exp(-squared_distances(q, q)).tril(-1)
    torch.testing.assert_close(out[..., 1:, :], nadaraya_watson(kernel[..., 1:, :], v), **EXACT)
    assert (out[..., 0, :] == 0).all()


@pytest.mark.parametrize("k_nearest", [1, 4, 23, 100])
def test_eq_4_and_10_top_k_is_the_kernel_cut_at_the_kth_neighbour(sample, k_nearest):
    q, k, v = sample
    d2, h = squared_distances(q, k), 0.7
    farthest = d2.sort(-1).values[..., min(k_nearest, 23) - 1, None]
    inside = (d2 <= farthest + 1e-12).double()
    gauss = torch.exp(-d2 / (2 * h * h)) * inside
    torch.testing.assert_close(attend(q, k, v, topk_softmax(k_nearest), scale=1 / h**2), nadaraya_watson(gauss, v), **EXACT)
    mean = (inside @ v) / min(k_nearest, 23)  # (1/k) Σ over the neighbours
    torch.testing.assert_close(attend(q, k, v, topk_uniform(k_nearest), scale=1 / h**2), mean, **EXACT)


@pytest.mark.parametrize("h", [0.9, 1.3, 2.5])
def test_eq_6_normalised_relu_is_fixed_epanechnikov(sample, h):
    q, k, v = sample
    out = attend(q, k, v, norm_relu(), scale=1 / h**2)
    kernel = (1 - squared_distances(q, k) / h**2).clamp_min(0)
    reached = kernel.sum(-1) > 0
    assert reached.any()
    torch.testing.assert_close(out[reached], nadaraya_watson(kernel, v)[reached], **EXACT)
    gamma, b = h * h / 2, 1 - 2 / h**2
    relu = (q @ k.mT / gamma + b).clamp_min(0)
    torch.testing.assert_close(out[reached], nadaraya_watson(relu, v)[reached], **EXACT)


def test_eq_6_departure_an_empty_support_is_uniform_over_the_legal_keys(sample):
    q, k, v = sample
    out, readout = attend(q, k, v, norm_relu(), scale=1e4, mask=Causal(), return_readout=True)
    lonely = readout.support == torch.arange(1, 24)
    assert lonely[..., 1:].all()
    mean = v.cumsum(2) / torch.arange(1, 24, dtype=torch.float64)[:, None]
    torch.testing.assert_close(out, mean, **EXACT)


@pytest.mark.parametrize("r", ORDERS)
def test_eq_7_13_to_16_the_kernel_is_a_rectified_power_of_the_score(sample, r):
    q, k, _ = sample
    d2, gamma, h = squared_distances(q, k), 0.4, 1.2
    left = (1 - d2 / h**2).clamp_min(0) ** r
    middle = ((h**2 - 2 + 2 * (q @ k.mT)) / h**2).clamp_min(0) ** r
    torch.testing.assert_close(left, middle, rtol=1e-9, atol=1e-12)
    right = (h**2 / (2 * r * gamma) - 1 / (r * gamma) + (q @ k.mT) / (r * gamma)).clamp_min(0) ** r
    torch.testing.assert_close(left, (2 * r * gamma / h**2) ** r * right, rtol=1e-9, atol=1e-12)
    w = weights(q @ k.mT, rectified(r), scale=1 / h**2)  # and its normalised form is ours
    reached = left.sum(-1) > 0
    torch.testing.assert_close(w[reached], (left / left.sum(-1, keepdim=True))[reached], rtol=1e-9, atol=1e-12)


def test_eq_8_sparsemax_is_epanechnikov_with_unit_mass(sample):
    q, k, v = sample
    gamma = 0.25
    out, readout = attend(q, k, v, epanechnikov(), scale=1 / gamma, return_readout=True)
    tau = readout.threshold[..., None]
    rectified_sum = (q @ k.mT / gamma - tau).clamp_min(0).sum(-1)
    torch.testing.assert_close(rectified_sum, torch.ones_like(rectified_sum), **EXACT)
    torch.testing.assert_close(readout.bandwidth, (2 - 2 * gamma * tau[..., 0]).sqrt(), **EXACT)
    kernel = (1 - squared_distances(q, k) / readout.bandwidth[..., None] ** 2).clamp_min(0)
    torch.testing.assert_close(out, nadaraya_watson(kernel, v), **EXACT)


@pytest.mark.parametrize("r", ORDERS)
@pytest.mark.parametrize("gamma", [0.05, 0.5, 3.0])
def test_proposition_1_entmax_is_the_rectified_polynomial_kernel_at_the_bandwidth_read_back(sample, r, gamma):
    q, k, v = sample
    out, readout = attend(q, k, v, entmax(1 + 1 / r), scale=1 / gamma, mask=Causal(offset=1), return_readout=True)
    tau = readout.threshold / r  # w = [s/r − τ]₊^r
    h = readout.bandwidth[..., 1:]
    torch.testing.assert_close(h, (2 - 2 * r * gamma * tau[..., 1:]).sqrt(), **EXACT)
    kernel = (1 - squared_distances(q, k)[..., 1:, :] / h[..., None] ** 2).clamp_min(0) ** r
    kernel = kernel.tril(0)
    torch.testing.assert_close(out[..., 1:, :], nadaraya_watson(kernel, v), rtol=1e-9, atol=1e-10)
    inside = (squared_distances(q, k)[..., 1:, :] < h[..., None] ** 2).tril(0)
    assert torch.equal(inside.sum(-1), readout.support[..., 1:].long())


@pytest.mark.parametrize("r", ORDERS)
def test_eq_17_and_18_the_threshold_makes_the_rectified_responses_sum_to_one(sample, r):
    q, k, v = sample
    gamma = 0.3
    out, readout = attend(q, k, v, entmax(1 + 1 / r), scale=1 / gamma, return_readout=True)
    h = readout.bandwidth[..., None]
    responses = (q @ k.mT / (r * gamma) - (1 / (r * gamma) - h**2 / (2 * r * gamma))).clamp_min(0) ** r
    torch.testing.assert_close(responses.sum(-1), torch.ones_like(readout.bandwidth), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out, weights(q @ k.mT, entmax(1 + 1 / r), scale=1 / gamma) @ v, **EXACT)


@pytest.mark.parametrize(("r", "b"), [(1, 1.0), (2, 1.0), (3, 1.0), (2.5, 0.4), (1, 5.0)])
def test_eq_11_and_12_relumax_is_anchored_at_the_best_key(sample, r, b):
    q, k, v = sample
    h = 0.6
    out, readout = attend(q, k, v, relumax(r, b), scale=1 / h**2, return_readout=True)
    cosine = q @ k.mT
    best = cosine.amax(-1, keepdim=True)
    kernel = (b + (cosine - best) / h**2).clamp_min(0) ** r
    torch.testing.assert_close(out, nadaraya_watson(kernel, v), **EXACT)
    margin = cosine > best - b * h**2  # Eq. 12
    assert torch.equal(margin.sum(-1), readout.support.long())
    assert torch.equal(weights(cosine, relumax(r, b), scale=1 / h**2) > 0, margin)


def test_r_to_infinity_is_softmax():
    z = 3 * torch.randn(40, 60, dtype=torch.float64)
    soft = torch.softmax(z, -1)
    errors = [float((weights(z, entmax(1 + 1 / r)) - soft).abs().max()) for r in (1e1, 1e2, 1e3, 1e5, 1e7)]
    assert all(late < early / 5 for early, late in pairwise(errors)), errors
    assert errors[-1] < 1e-6
    for r in (1e5, 1e6, 2e6, 5e6, 1e7, 3e7, 1e8, 1e12):  # and the way there is smooth in fp32 too
        single = weights(z.float(), entmax(r=r))
        assert (single - soft).abs().max() < max(20 / r, 1e-6)


def test_a_learned_alpha_of_one_is_softmax():
    z = 3 * torch.randn(40, 60)
    for alpha in (1.0, 1 + 2.0**-23, 1 + 1e-6):
        a = torch.tensor(alpha, requires_grad=True)
        w = weights(z, entmax(a))
        torch.testing.assert_close(w, torch.softmax(z, -1), rtol=1e-3, atol=1e-6)
        w.square().sum().backward()
        assert a.grad.isfinite()


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax43", "entmax(1.2)"])
def test_agrees_with_the_entmax_package_where_that_is_right(name):
    import entmax as package

    z = torch.randn(64, 40, dtype=torch.float64, requires_grad=True)
    alpha = {"sparsemax": 2.0, "entmax15": 1.5, "entmax43": 4 / 3, "entmax(1.2)": 1.2}[name]
    theirs = package.entmax_bisect(z, alpha, dim=-1, n_iter=100)
    if name in ("sparsemax", "entmax15"):
        theirs = getattr(package, name)(z, dim=-1)
    g = torch.randn_like(z)
    (their_grad,) = torch.autograd.grad(theirs, z, g)
    ours = weights(z, parse(name))
    (our_grad,) = torch.autograd.grad(ours, z, g)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-7, atol=1e-8)
