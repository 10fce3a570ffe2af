"""Derivatives under torch.func, and those that are refused: in forward mode, and of second order."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from attention_cases import KERNELS, draw
from compactattn import Bias, Causal, attend, decode, entmax, weights

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap calls the operator once a sample


def draw_all():
    """q, k, v, scale, bias and alpha, each of which can have a gradient."""
    heads = (torch.rand(2, 4, dtype=torch.float64) * 0.8 + torch.tensor([[0.5], [1.1]])).unbind()
    return *(x.detach() for x in draw(5, 7)), heads[0], torch.randn(1, 4, 5, 7, dtype=torch.float64), heads[1]


def call(q, k, v, scale, bias, alpha, kernel="learned"):
    kernel = entmax(alpha) if kernel == "learned" else kernel
    return attend(q, k, v, kernel, scale=scale, mask=Causal() & Bias(bias))


CALLS = {
    "attend": call,
    "weights": lambda q, k, v, scale, bias, alpha: weights(bias, entmax(alpha), scale=scale),
    "decode": lambda q, k, v, scale, bias, alpha: decode(q, k, v, entmax(alpha), scale=scale, mask=Bias(bias)),
}


@pytest.mark.parametrize("kernel", [*KERNELS, "learned"])
def test_torch_func_finds_the_gradients_of_autograd(kernel):
    inputs = draw_all()
    leaves = tuple(x.clone().requires_grad_() for x in inputs)

    def loss(*given):
        return call(*given, kernel).square().sum()

    def of_sample(q, k, v, *shared):
        return loss(*(x[None] for x in (q, k, v)), *shared)

    wanted = torch.autograd.grad(loss(*leaves), leaves, allow_unused=True, materialize_grads=True)
    every = tuple(range(6))
    torch.testing.assert_close(grad(loss, every)(*inputs), wanted)
    samples = (0, 0, 0, None, None, None)
    torch.testing.assert_close(vmap(grad(of_sample, (0, 1, 2)), samples)(*inputs), wanted[:3])
    torch.testing.assert_close(grad(lambda *given: vmap(of_sample, samples)(*given).sum(), every)(*inputs), wanted)


@pytest.mark.parametrize("name", ["attend", "weights"])
def test_jacrev_finds_the_jacobian_of_autograd(name):
    inputs = draw_all()
    wanted = torch.autograd.functional.jacobian(CALLS[name], inputs)
    torch.testing.assert_close(jacrev(CALLS[name], tuple(range(6)))(*inputs), wanted)


@pytest.mark.parametrize(("name", "given"), [(n, i) for n in CALLS for i in range(6) if n != "weights" or i > 2])
def test_a_forward_derivative_is_refused_whatever_has_a_tangent(name, given):
    inputs = draw_all()

    def of_one(x):
        return CALLS[name](*inputs[:given], x, *inputs[given + 1 :])

    x = inputs[given]
    refused = pytest.raises(NotImplementedError, match=r"have no forward-mode derivative .*; differentiate .* backwards")
    with refused:
        jvp(of_one, (x,), (x,))
    with refused:
        jacfwd(of_one)(x)
    with refused, forward_ad.dual_level():
        of_one(forward_ad.make_dual(x, x))
    with refused, torch.no_grad():
        jvp(of_one, (x,), (x,))


def test_a_tangent_that_passes_by_is_left_alone():
    inputs = draw_all()
    out, tangent = jvp(lambda x: CALLS["attend"](*inputs).sum() * x, (torch.tensor(2.0),), (torch.tensor(3.0),))
    torch.testing.assert_close(tangent, 1.5 * out)


def test_a_forward_derivative_of_a_compiled_call_is_refused():
    q, k, v, *_ = draw_all()
    compiled = torch.compile(lambda q: attend(q, k, v), backend="eager")
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(compiled, (q,), (q,))


def test_a_graph_holds_a_call_under_vmap():
    q, k, v, *_ = draw_all()
    call = vmap(lambda *sample: attend(*(x[None] for x in sample)))
    torch.testing.assert_close(torch.compile(call, fullgraph=True, backend="eager")(q, k, v), attend(q, k, v)[:, None])


@pytest.mark.parametrize("name", ["attend", "weights"])
def test_second_derivatives_of_torch_func_are_refused_in_our_own_words(name):
    *others, alpha = draw_all()
    loss = lambda alpha: CALLS[name](*others, alpha).square().sum()  # noqa: E731
    with pytest.raises(RuntimeError, match="attend and weights have no second derivative; detach"):
        grad(lambda alpha: grad(loss)(alpha).sum())(alpha)
    with pytest.raises(NotImplementedError, match="forward-mode"):  # jacfwd of jacrev
        hessian(loss)(alpha)
