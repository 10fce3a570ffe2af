"""A bias, a mask of single keys and a learned alpha in the Triton kernels, with their gradients, under Triton's interpreter."""

import math

import pytest
import torch
from family import KERNELS, ONE_OF_EACH_RULE, Case, check, draw, run

from compactattn import ALiBi, Allowed, Bias, Causal, attend, entmax, operators
from compactattn.fused import launch
from compactattn.masks import resolve

pytestmark = [pytest.mark.usefixtures("poisoned"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's

BIASES = {"of a sample": (2, 1, 18, 20), "of a head": (1, 2, 1, 20), "of a row": (2, 1, 18, 1), "one number": (1, 1, 1, 1)}


def draw_bias(shape, hidden=0.2):
    """A bias that hides some keys, and from query 3 of sample 0 all of them, where it can."""
    rng = torch.Generator().manual_seed(1)
    bias = torch.randn(shape, generator=rng)
    if shape[3] > 1:
        bias[torch.rand(shape, generator=rng) < hidden] = -math.inf
        bias[..., 0] = 0.0
    if shape[2] > 1:
        bias[0, :, 3] = -math.inf
    return bias


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bias_and_its_gradient_agree_with_the_reference(kernel, cut):
    cut(16, 16)
    case = Case(1, 1, 1, 18, 20, 5, 3, (16, 16), Causal())
    check(*draw(case), kernel, case.mask, bias=draw_bias((1, 1, 18, 20)))


@pytest.mark.parametrize("shape", BIASES)
@pytest.mark.parametrize("kernel", ["gaussian", *ONE_OF_EACH_RULE])
def test_a_bias_that_many_share_agrees_with_the_reference(kernel, shape, cut):
    cut(16, 32)
    case = Case(2, 2, 1, 18, 20, 5, 3, (16, 32), None)
    check(*draw(case), kernel, case.mask, bias=draw_bias(BIASES[shape]))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mask_of_single_keys_agrees_with_the_reference(kernel, cut):
    cut(16, 16)
    case = Case(1, 2, 1, 7, 20, 5, 3, (16, 16), ALiBi())
    allowed = torch.rand((1, 2, 7, 20), generator=torch.Generator().manual_seed(2)) < 0.4
    allowed[:, :, 5] = False
    check(*draw(case), kernel, case.mask & Allowed(allowed), bias=draw_bias((1, 1, 1, 20)))


@pytest.mark.parametrize("kernel", ["gaussian", "entmax(1.7)", *ONE_OF_EACH_RULE])
def test_a_bias_and_skipped_tiles_change_nothing(kernel, cut, monkeypatch):
    cut(16, 16)
    monkeypatch.setattr(launch, "TRACK_FROM", 1)
    case = Case(1, 2, 1, 40, 40, 16, 5, (16, 16), Causal())
    (q, k, v, _), do = draw(case)
    check((q, k, v, torch.tensor([1.0, 4.0])), do, kernel, case.mask, bias=draw_bias((1, 2, 40, 40)))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_whose_keys_a_tensor_hides_is_zero_with_zero_gradient(kernel, cut):
    """What is hidden from all may hold anything."""
    cut(16, 16)
    inputs, do = draw(Case(1, 1, 1, 9, 20, 4, 4, (16, 16), None))
    allowed = torch.ones((1, 1, 9, 20), dtype=torch.bool)
    allowed[:, :, 5], allowed[..., 7] = False, False
    inputs = [x.detach().clone() for x in inputs]
    inputs[0][:, :, 5], inputs[1][:, :, 7], inputs[2][:, :, 7], do[:, :, 5] = math.nan, math.inf, math.nan, math.nan
    hidden = torch.zeros(allowed.shape).masked_fill(~allowed, -math.inf)
    for mask, learned in ((Allowed(allowed), {}), (None, {"bias": hidden})):
        found = run(inputs, do, kernel, mask, "fused", **learned)
        assert all(x.isfinite().all() for x in found.values())
        for name in ("out", "dq"):
            assert (found[name][:, :, 5] == 0).all()
        for name in ("dk", "dv"):
            assert (found[name][:, :, 7] == 0).all()
        assert not learned or (found["dbias"][~allowed] == 0).all()
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    _, readout = attend(q, k, v, kernel, mask=torch.zeros(3, 3, dtype=torch.bool), backend="fused", return_readout=True)
    assert (readout.threshold == math.inf).all()
    assert (readout.support == 0).all()


ALPHAS = [1.0, 1.0001, 1.02, 1.2, 1.5, 1.9, 2.0]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_learned_alpha_and_its_gradient_agree_with_the_reference(alpha, cut):
    cut(16, 16)
    case = Case(1, 2, 1, 18, 35, 5, 3, (16, 16), Causal())
    check(*draw(case), None, case.mask, alpha=torch.tensor([alpha, 1.35]))


def test_a_learned_alpha_with_a_bias_and_skipped_tiles(cut, monkeypatch):
    cut(16, 16)
    monkeypatch.setattr(launch, "TRACK_FROM", 1)
    for mask, learned in ((Causal(1), {}), (Causal(), {"bias": draw_bias((1, 1, 40, 40))})):
        inputs, do = draw(Case(1, 2, 1, 40, 40, 16, 5, (16, 16), mask))
        check(inputs, do, None, mask, alpha=torch.tensor([1.1, 1.7]), **learned)


@pytest.mark.parametrize("alpha", [1.001, 1.01, 1.1])
def test_many_keys_of_nearly_equal_weight_agree_with_the_reference(alpha, cut):
    """Where r is large, the two best keys of each class hold a small part of the weight."""
    cut(16, 16)
    (q, k, v, _), do = draw(Case(1, 1, 1, 3, 200, 4, 4, (16, 16), None))
    check((q, k, v, torch.tensor([0.3])), do, f"entmax({alpha})", None)
    check((q, k, v, torch.tensor([0.3])), do, None, None, alpha=torch.tensor([alpha]))


def test_only_the_bias_or_alpha_may_need_a_gradient(cut):
    cut(16, 16)
    (q, k, v, scale), do = draw(Case(1, 1, 1, 5, 6, 4, 3, (16, 16), None))
    q, k, v, scale = (x.detach() for x in (q, k, v, scale))
    for name, given in (("bias", torch.randn(5, 6)), ("alpha", torch.tensor(1.5))):
        found = []
        for backend in ("fused", "reference"):
            x = given.clone().requires_grad_()
            kernel, mask = (entmax(x), None) if name == "alpha" else ("biweight", x)
            out = attend(q, k, v, kernel, scale=scale, mask=mask, backend=backend)
            found.append(torch.autograd.grad(out, x, do)[0])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kernel", ["biweight", "epanechnikov"])
def test_rows_far_below_the_others_leave_dscale_alone(kernel, cut):
    """A bias of −1e4 on whole rows, as additive padding has it, moves no weight."""
    cut(16, 16)
    (q, k, v, scale), do = draw(Case(1, 1, 1, 40, 40, 16, 16, (16, 16), None), torch.float16)
    bias = torch.zeros(1, 1, 40, 1)
    bias[:, :, 30:] = -1e4
    exact = run((q, k, v, scale), do, kernel, None, "reference", torch.float64, bias=bias)["dscale"]
    found = run((q, k, v, scale), do, kernel, None, "fused", bias=bias)["dscale"]
    assert (found - exact).abs() < 0.05


def test_opcheck_of_the_fused_operator_with_every_tensor(cut):
    cut(16, 16)
    (q, k, v, scale), _ = draw(Case(1, 2, 1, 5, 6, 4, 3, (16, 16), None))
    view = resolve(Allowed(torch.rand(5, 6) < 0.8) & Bias(torch.randn(2, 6, 5).mT.requires_grad_()), (1, 2, 5, 6), q.device)
    orders = torch.tensor([1.5, 4.0], requires_grad=True)
    inputs = (q, k, v, scale, view.at, view.lo, view.hi, view.allowed, view.bias, None, orders, math.nan, "normalising", 0.0)
    torch.library.opcheck(operators.attend_operator, (*inputs, True, True), test_utils=("test_schema", "test_faketensor"))
    out = operators.attend_operator(*inputs, True, True)[0]
    torch.autograd.grad(out.sum(), (q, view.bias, orders))
