"""The fused scan of Mamba agrees with the plain one in float64, under Triton's interpreter.

Tolerances are measured: an output may err twice, a gradient three times as much as the plain scan in fp32, and one ulp.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import softplus

from compactattn.mixers import selective_scan
from compactattn.mixers.mamba import Mamba
from compactattn.mixers.selective_scan import _scan, _scan_backward

NAMES = ("y", "last", "du", "dstep", "drates", "db", "dc", "dstate")
#         B, T, E, N: lengths beside multiples of the chunks, of both versions; channels that fill no block, or two and a part
SHAPES = [(1, 1, 1, 1), (2, 31, 5, 5), (1, 32, 16, 16), (1, 33, 40, 1), (2, 70, 20, 16), (1, 9, 5, 33)]


@pytest.fixture
def everywhere(monkeypatch):
    """The kernels also on the CPU; fp64 stays plain."""
    monkeypatch.setattr(selective_scan, "fused", lambda u, rates: u.dtype == torch.float32)


def draw(shape, seed=0):
    """Inputs as Mamba makes them, and gradients of y and of the last state."""
    b, t, e, n = shape
    rng = torch.Generator().manual_seed(seed)
    u, step, dy, rates, b_, c, state, dlast = (
        torch.randn(size, generator=rng) for size in (*[(b, t, e)] * 3, (n, e), *[(b, t, n)] * 2, *[(b, n, e)] * 2)
    )
    return (u, softplus(2 * step - 2), -n * rates.sigmoid(), b_, c, state), (dy, dlast)


def outputs_and_gradients(inputs, slopes, dtype):
    inputs = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = selective_scan.selective_scan(*inputs)
    gradients = torch.autograd.grad(out, inputs, [x.to(dtype) for x in slopes])
    return [x.detach().double() for x in (*out, *gradients)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_the_kernels_agree_with_the_definition_in_output_state_and_every_gradient(shape, monkeypatch):
    inputs, slopes = draw(shape)
    exact, plain = (outputs_and_gradients(inputs, slopes, dtype) for dtype in (torch.float64, torch.float32))
    monkeypatch.setattr(selective_scan, "fused", lambda u, rates: True)
    ours = outputs_and_gradients(inputs, slopes, torch.float32)
    for name, mine, theirs, want in zip(NAMES, ours, plain, exact, strict=True):
        error, allowed = (mine - want).norm(), (theirs - want).norm()
        assert error <= (2 if name in ("y", "last") else 3) * allowed + torch.finfo(torch.float32).eps * want.norm(), (
            f"{name}: {error:.1e}, plain {allowed:.1e}, size {want.norm():.1e}"
        )


@pytest.mark.usefixtures("everywhere")
def test_inputs_may_lie_in_memory_in_any_way():
    inputs, (dy, dlast) = draw((2, 10, 5, 3))
    turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in inputs]
    y, last, entering = _scan(*inputs)
    assert all(torch.equal(x, z) for x, z in zip(_scan(*turned), (y, last, entering), strict=True))
    both = (_scan_backward(dy, dlast, entering, *given[:5]) for given in (inputs, turned))
    assert all(torch.equal(x, z) for x, z in zip(*both, strict=True))


@pytest.mark.usefixtures("everywhere")
def test_what_is_made_has_the_shapes_that_the_operators_promise():
    inputs, (dy, dlast) = draw((2, 10, 5, 3))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_scan, tuple(x.requires_grad_() for x in inputs), test_utils=tests)
    inputs = [x.detach() for x in inputs]
    torch.library.opcheck(_scan_backward, (dy, dlast, _scan(*inputs)[2], *inputs[:5]), test_utils=tests)


@pytest.mark.usefixtures("everywhere")
def test_mamba_on_the_kernels_is_its_recurrence_and_goes_on_where_it_ended():
    mixer, x = Mamba(4), torch.randn(2, 20, 4)
    whole, end = mixer.recur(x)
    first, past = mixer.advance(x[:, :7], None)
    second, last = mixer.advance(x[:, 7:], past)
    torch.testing.assert_close(torch.cat((first, second), 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.state, end.state, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cuda", "new", "dtype", "states", "taken"),
    [
        (True, True, torch.float32, 64, True),
        (False, True, torch.float32, 16, False),
        (True, False, torch.float32, 16, False),
        (True, True, torch.float64, 16, False),
        (True, True, torch.float32, 65, False),
    ],
)
def test_the_kernels_take_fp32_on_a_new_gpu_with_up_to_64_states(cuda, new, dtype, states, taken, monkeypatch):
    monkeypatch.setattr(selective_scan, "is_new", lambda index: new)
    u = SimpleNamespace(is_cuda=cuda, dtype=dtype, device=SimpleNamespace(index=None))
    assert selective_scan.fused(u, torch.empty(states, 3)) is taken
