"""The fused keys and values agree with their definition in float64, under Triton's interpreter.

Tolerances are measured: an output may err twice, a gradient three times as much as plain PyTorch in the same dtype.
"""

import pytest
import torch

from compactattn import parse
from compactattn.memory import contextual, features
from compactattn.memory.contextual import ContextualMemory
from compactattn.memory.features import context_keys, leaky_average, peek_values
from compactattn.memory.operators import _keys_backward, _values_backward, fused_keys, fused_values
from compactattn.memory.persistent import PersistentMemory

LEAKS = (0.0, 0.05, 1.3, 400.0)
SHAPES = [(1, 1, 1, 1), (1, 2, 2, 5), (2, 3, 63, 16), (1, 4, 64, 64), (2, 1, 130, 40), (1, 1, 70, 200), (1, 1, 33, 256)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def plain_keys(x, leak, state):
    """The T×T definition; a state is one more input that came before."""
    if state is None:
        y = leaky_average(x, leak)
    else:
        y = leaky_average(torch.cat((state[:, :, None].to(x.dtype), x), 2), leak)[:, :, 1:]
    return features.unit(y), y[:, :, -1]


def fused_pair(x, leak, state):
    keys, _, last = fused_keys(x, leak, state)
    return keys, last


def draw(shape, dtype, seed=0):
    """x as a projection holds it, (B, T, H, D) in memory, and a gradient that lies as (B, H, T, D)."""
    b, h, t, d = shape
    rng = torch.Generator().manual_seed(seed)
    x, dout = torch.randn((b, t, h, d), generator=rng).to(dtype).transpose(1, 2), torch.randn(shape, generator=rng).to(dtype)
    leak, mix, gain = torch.tensor(LEAKS)[:h], torch.rand(h, generator=rng), 0.2 + torch.rand(h, generator=rng)
    return x, leak, torch.randn((b, h, d), generator=rng), mix, gain, dout, torch.randn((b, h, d), generator=rng)


def outputs_and_gradients(function, inputs, slopes, dtype):
    """Everything in float64, for inputs moved to a dtype: what is per head stays fp32 at least."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [None if x is None else x.detach().to(dtype if x.ndim == 4 else work).requires_grad_() for x in inputs]
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    given = [x for x in inputs if x is not None]
    gradients = torch.autograd.grad(out, given, [s.to(o.dtype) for o, s in zip(out, slopes, strict=True)])
    return [x.detach().double() for x in (*out, *gradients)], len(out)


def check(fused, plain, inputs, slopes, dtype, multiplied):
    """`multiplied` is what dx is multiplied with in the gradient of a number per head."""
    exact, outputs = outputs_and_gradients(plain, inputs, slopes, torch.float64)
    rough, _ = outputs_and_gradients(plain, inputs, slopes, dtype)
    ours, _ = outputs_and_gradients(fused, inputs, slopes, dtype)
    eps = torch.finfo(dtype).eps
    for i, (mine, theirs, want) in enumerate(zip(ours, rough, exact, strict=True)):
        error, allowed = (mine - want).norm(), (theirs - want).norm()
        size = want.norm() if want.ndim > 1 else exact[outputs].norm() * multiplied.double().norm()
        assert error <= (2 if i < outputs else 3) * allowed + 4 * eps * size, (
            f"{i}: {error:.1e}, plain {allowed:.1e}, {size:.1e}"
        )


@each_dtype
@each_shape
@pytest.mark.parametrize("carried", [False, True])
def test_fused_keys_agree_with_the_definition_in_output_and_every_gradient(shape, dtype, carried):
    x, leak, state, _, _, dkeys, dlast = draw(shape, dtype)
    check(fused_pair, plain_keys, (x, leak, state if carried else None), (dkeys, dlast), dtype, leaky_average(x.double(), leak))


@each_dtype
@each_shape
def test_fused_values_agree_with_the_definition_in_output_and_every_gradient(shape, dtype):
    x, _, _, mix, gain, dv, _ = draw(shape, dtype)
    check(fused_values, peek_values, (x, mix, gain), (dv,), dtype, x)


@pytest.mark.parametrize("needed", [0, 1, 2])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_only_one_input_needs_a_gradient(what, needed):
    x, leak, state, mix, gain, dout, dlast = draw((2, 2, 20, 8), torch.float32)
    fused, plain = (fused_pair, plain_keys) if what == "keys" else (fused_values, peek_values)
    inputs, slopes = ([x, leak, state], (dout, dlast)) if what == "keys" else ([x, mix, gain], dout)
    inputs[needed] = inputs[needed].clone().requires_grad_()
    mine, want = (torch.autograd.grad(call(*inputs), inputs[needed], slopes) for call in (fused, plain))
    torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cut", [1, 40, 64, 99])
def test_fused_keys_go_on_from_where_they_ended(cut):
    x, leak, *_ = draw((1, 3, 100, 8), torch.float32)
    whole, end = fused_pair(x, leak, None)
    _, middle = fused_pair(x[:, :, :cut], leak, None)
    rest, last = fused_pair(x[:, :, cut:], leak, middle)
    torch.testing.assert_close(rest, whole[:, :, cut:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-6)


def test_a_row_of_zeros_stays_zero_and_its_neighbours_stay_finite():
    x = torch.zeros(1, 1, 20, 4)
    x[:, :, 10] = 1.0
    leak, one = torch.full((1,), 400.0), torch.ones(1)
    keys, _, _ = fused_keys(x, leak, None)
    values = fused_values(x, one, one)
    for out in (keys, values):
        assert torch.equal(out[:, :, 10], torch.full((1, 1, 4), 0.5))
        assert out.count_nonzero() == 4


def test_what_is_made_lies_in_memory_as_the_operators_promise():
    x, leak, state, mix, gain, dout, dlast = draw((2, 2, 20, 8), torch.bfloat16)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    keys, norms, _ = fused_keys(x, leak, None)
    assert keys.is_contiguous()
    assert fused_keys(x, leak, None, by_time=True)[0].transpose(1, 2).is_contiguous()
    for operator, inputs in (
        (fused_keys, (x.clone().requires_grad_(), leak.clone().requires_grad_(), None)),
        (fused_keys, (x.clone().requires_grad_(), leak, state, True)),
        (_keys_backward, (dout, dlast, keys, norms, leak, state)),
        (_keys_backward, (dout, dlast, fused_keys(x, leak, None, by_time=True)[0], norms, leak, None)),
        (fused_values, (x.clone().requires_grad_(), mix, gain.clone().requires_grad_())),
        (_values_backward, (dout, x, mix, gain)),
    ):
        torch.library.opcheck(operator, inputs, test_utils=tests)


@pytest.fixture
def everywhere(monkeypatch):
    """The fused operators also on the CPU."""
    monkeypatch.setattr(features, "usable", lambda x: True)


@pytest.mark.parametrize("make", [lambda: ContextualMemory(24, 3, parse("biweight")), lambda: PersistentMemory(24, 3, slots=7)])
def test_a_memory_is_the_same_with_fused_features_and_goes_on_from_its_cache(make, monkeypatch):
    torch.manual_seed(0)
    memory, x = make(), torch.randn(2, 70, 24, requires_grad=True)
    inputs, dy = [x, *memory.parameters()], torch.randn(2, 70, 24)
    y = memory(x)
    plain = y, *torch.autograd.grad(y, inputs, dy)
    monkeypatch.setattr(features, "usable", lambda x: True)
    y = memory(x)
    for mine, want in zip((y, *torch.autograd.grad(y, inputs, dy)), plain, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-4)
    first, past = memory.advance(x[:, :33], None)
    second, past = memory.advance(x[:, 33:34], past)
    third, _ = memory.advance(x[:, 34:], past)
    torch.testing.assert_close(torch.cat((first, second, third), 1), y, rtol=1e-4, atol=1e-5)


def test_under_autocast_attention_receives_what_the_kernels_wrote(monkeypatch, everywhere):
    memory, x, seen = ContextualMemory(16, 2, parse("sparsemax")), torch.randn(1, 9, 16), []
    real = contextual.attend

    def watch(q, k, v, *arguments, **options):
        seen.extend((q.dtype, k.dtype, v.dtype, k is q))
        return real(q, k, v, *arguments, **options)

    monkeypatch.setattr(contextual, "attend", watch)
    with torch.autocast("cpu", torch.bfloat16):
        memory(x)
    assert seen == [torch.bfloat16] * 3 + [True]


def test_fused_features_compile_without_a_graph_break(everywhere):
    for memory in (ContextualMemory(16, 2, parse("sparsemax")), PersistentMemory(16, 2, slots=5)):
        x = torch.randn(2, 9, 16, requires_grad=True)
        compiled = torch.compile(memory, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), memory(x))
        torch.testing.assert_close(*(torch.autograd.grad(call(x).square().sum(), x) for call in (compiled, memory)))


def test_the_definition_does_the_work_where_there_is_no_gpu():
    x, leak, *_ = draw((1, 1, 5, 4), torch.float32)
    assert not features.usable(x)
    torch.testing.assert_close(context_keys(x, leak)[0], plain_keys(x, leak, None)[0])
