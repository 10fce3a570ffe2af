"""attend() and weights() are their definition, in output and every gradient."""

import copy
import math

import pytest
import torch

from attention_cases import KERNELS, MASKS, SHIFT_INVARIANT, dense, draw, gradients
from compactattn import Bias, Causal, attend, entmax, rows, weights


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 9), (9, 9), (13, 6)])
def test_attend_is_its_definition_in_output_and_every_gradient(kernel, mask, queries, keys, monkeypatch):
    monkeypatch.setattr(rows, "CPU_BLOCK", 20)  # many blocks: samples, heads and queries are all cut
    q, k, v = draw(queries, keys)
    scale = torch.tensor([0.2, 0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    seen = MASKS[mask](queries, keys)
    ours = attend(q, k, v, kernel, scale=scale, mask=seen)
    theirs = dense(q, k, v, kernel, scale, seen)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    for mine, other in zip(gradients(ours, (q, k, v, scale)), gradients(theirs, (q, k, v, scale)), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck_of_q_k_v_scale_and_bias(kernel):
    q, k, v = draw(4, 5, dim=3, value_dim=2)
    scale = torch.tensor([0.2, 0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for shape in ((1, 4, 4, 5), (2, 1, 1, 5), (4, 1)):
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradcheck(
            lambda q, k, v, scale, bias: attend(q, k, v, kernel, scale=scale, mask=Causal(0) & Bias(bias)),
            (q, k, v, scale, bias),
        )


@pytest.mark.parametrize("alpha", [[1.5, 2.0, 1.9, 1.05], [1.001, 1.2, 4 / 3, 1.7], [1.5]])
def test_gradcheck_of_a_learned_alpha_per_head(alpha):
    q, k, v = draw(4, 5, dim=3, value_dim=2)
    a = torch.tensor(alpha, dtype=torch.float64)
    inside = a.clamp(max=2 - 1e-4).requires_grad_()  # finite differences must stay inside (1, 2]
    torch.autograd.gradcheck(lambda q, a: attend(q, k, v, entmax(a), mask=Causal(1)), (q, inside))
    s = torch.randn(4, 3, 7, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda s, a: weights(s, entmax(a)), (s, inside))
    for head, value in enumerate(a.expand(4).tolist()):
        learned = attend(q, k, v, entmax(a))[:, head]
        torch.testing.assert_close(learned, attend(q, k, v, entmax(value))[:, head], rtol=1e-10, atol=1e-11)


def test_the_gradient_of_alpha_is_right_at_both_ends():
    s = torch.randn(3, 20, dtype=torch.float64) * 2
    g = torch.randn(3, 20, dtype=torch.float64)
    for value, step in ((2.0, -1e-5), (1 + 1e-4, 1e-6), (1 + 1e-8, 1e-9)):
        alpha = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        (exact,) = torch.autograd.grad(weights(s, entmax(alpha)), alpha, g)
        moved = (weights(s, entmax(r=1 / (value - 1 + step))) - weights(s, entmax(r=1 / (value - 1)))) / step
        assert abs(float((moved * g).sum()) / float(exact) - 1) < 1e-3, value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_gradient_of_alpha_at_one_is_the_limit_from_above(dtype):
    s = (torch.randn(3, 20, dtype=torch.float64) * 2).to(dtype)
    g = torch.randn(3, 20, dtype=torch.float64).to(dtype)
    alpha = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    (at_one,) = torch.autograd.grad(weights(s, entmax(alpha)), alpha, g)
    w, g = torch.softmax(s.double(), -1), g.double()
    limit = -0.5 * (w * w.log() ** 2 * (g - (w * g).sum(-1, keepdim=True))).sum()
    assert abs(float(at_one) / float(limit) - 1) < 100 * torch.finfo(dtype).eps
    moved = (weights(s.double(), entmax(1 + 1e-6)) - w) / 1e-6
    assert abs(float((moved * g).sum()) / float(limit) - 1) < 1e-3


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("need", range(3))
def test_one_gradient_alone_is_the_same_gradient(kernel, need):
    tensors = draw(7, 7)
    whole = gradients(attend(*tensors, kernel), tensors)[need]
    alone = tuple(x.detach().requires_grad_(i == need) for i, x in enumerate(tensors))
    assert torch.equal(gradients(attend(*alone, kernel), (alone[need],))[0], whole)


@pytest.mark.parametrize("kernel", SHIFT_INVARIANT)
def test_adding_a_constant_to_the_scores_changes_nothing(kernel):
    s = torch.randn(20, 30, dtype=torch.float64).mul(64).round().div(64).requires_grad_()  # so that shifts are exact
    for shift in (-1000.0, 0.5, 4096.0):
        assert torch.equal(weights(s + shift, kernel), weights(s, kernel))
    (ds,) = gradients(weights(s, kernel), (s,))
    torch.testing.assert_close(ds.sum(-1), torch.zeros(20, dtype=torch.float64), rtol=0, atol=1e-11)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fixed_kernels_read_the_scale_as_their_bandwidth(kernel):
    s = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor([0.3, 1.0, 2.5], dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda s, scale: weights(s, kernel, scale=scale), (s, scale))
    for head in range(3):
        alone = weights(s[:, head], kernel, scale=scale[head].item())
        torch.testing.assert_close(weights(s, kernel, scale=scale)[:, head], alone)


def test_softmax_is_scaled_dot_product_attention():
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for queries, keys in ((9, 9), (5, 12)):
        q, k, v = draw(queries, keys)
        bias = torch.randn(2, 4, queries, keys, dtype=torch.float64)
        pairs = [
            (attend(q, k, v, "softmax"), sdpa(q, k, v, enable_gqa=True)),
            (attend(q, k, v, "softmax", mask=Causal(start=0)), sdpa(q, k, v, is_causal=True, enable_gqa=True)),
            (attend(q, k, v, "softmax", scale=0.3, mask=bias), sdpa(q, k, v, attn_mask=bias, scale=0.3, enable_gqa=True)),
        ]
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs)
            for a, b in zip(gradients(ours, (q, k, v)), gradients(theirs, (q, k, v)), strict=True):
                torch.testing.assert_close(a, b)


def test_a_learned_kernel_built_once_follows_its_parameter():
    alpha = torch.nn.Parameter(torch.tensor([1.2, 1.5, 1.7, 2.0]))
    kernel = entmax(alpha)
    q, k, v = (x.detach().float() for x in draw(6, 6))
    for _ in range(2):
        attend(q, k, v, kernel).sum().backward()  # a second step has its own graph
    with torch.no_grad():
        alpha.fill_(1.3)
    assert torch.equal(attend(q, k, v, kernel), attend(q, k, v, entmax(torch.full((4,), 1.3))))
    twin = copy.deepcopy(kernel)
    assert torch.equal(attend(q, k, v, twin), attend(q, k, v, kernel))


def test_readout_tells_the_threshold_the_bandwidth_and_the_support():
    q, k, v = (torch.nn.functional.normalize(x.detach(), dim=-1) for x in draw(7, 7))
    w = weights(q @ k.repeat_interleave(2, 1).mT, "sparsemax", scale=3.0)
    _, readout = attend(q, k, v, "sparsemax", scale=3.0, return_readout=True)
    assert torch.equal(readout.support.long(), (w > 0).sum(-1))
    s = 3.0 * (q @ k.repeat_interleave(2, 1).mT)
    assert torch.equal(s > readout.threshold[..., None], w > 0)
    assert not any(x.requires_grad for x in readout)
    _, lonely = attend(q, -q, q, "norm_relu", scale=4.0, mask=Causal(1), return_readout=True)  # nothing within h = 1/2
    assert torch.equal(lonely.support[0, 0], torch.arange(7).int())
    torch.testing.assert_close(lonely.bandwidth[:, :, 1:], torch.full((2, 4, 6), 0.5, dtype=torch.float64))
    _, dense_readout = attend(q, k, v, "softmax", scale=4.0, return_readout=True)
    assert (dense_readout.bandwidth == 0.5).all()
    assert (dense_readout.threshold == -math.inf).all()
