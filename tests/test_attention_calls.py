"""attend() as it is called: sizes, dtypes, strides, blocks, memory, compilation, errors."""

import logging
import math
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention_cases import KERNELS, dense, draw, gradients
from compactattn import (
    ALiBi,
    Allowed,
    Bias,
    Causal,
    Packed,
    Padding,
    attend,
    attention,
    decode,
    entmax,
    gaussian,
    operators,
    parse,
    reference,
    rows,
    topk_softmax,
    weights,
)
from compactattn.fused import launch
from compactattn.kernels import encode
from compactattn.masks import resolve
from compactattn.native import build


@pytest.mark.parametrize("length", [1, 63, 1000])
@pytest.mark.parametrize("dim", [1, 7, 65, 256])
def test_odd_lengths_and_head_dims(length, dim):
    q, k, v = (torch.randn(1, 1, length, dim, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask=Causal())
    expected = dense(*(x.double() for x in (q, k, v)), "biweight", mask=Causal())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("empty", [{"batch": 0}, {"queries": 0}, {"keys": 0}, {"batch": 0, "queries": 0, "keys": 0}], ids=str)
def test_no_samples_no_queries_or_no_keys(empty, key_heads):
    batch, queries, keys = ({"batch": 2, "queries": 5, "keys": 7} | empty).values()
    shapes = (batch, 4, queries, 6), (batch, key_heads, keys, 6), (batch, key_heads, keys, 3), (4,), (batch, 1, queries, keys)
    inputs = tuple(torch.ones(shape, requires_grad=True) for shape in shapes)
    q, k, v, scale, bias = inputs
    out, readout = attend(q, k, v, scale=scale, mask=Causal() & Bias(bias), dropout=0.5, return_readout=True)
    assert torch.equal(out, torch.zeros(batch, 4, queries, 3))
    assert readout.support.shape == (batch, 4, queries)
    for x, dx in zip(inputs, gradients(out, inputs), strict=True):
        assert torch.equal(dx, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_meta_tensors_give_shapes_and_dtypes(dtype):
    inputs = tuple(x.detach().to("meta", dtype).requires_grad_() for x in draw(5, 7))
    out, readout = attend(*inputs, mask=Causal() & Padding([3, 7]) & ALiBi(), return_readout=True)
    assert (out.device.type, out.shape, out.dtype) == ("meta", (2, 4, 5, 5), dtype)
    assert readout.threshold.shape == (2, 4, 5)
    assert [x.shape for x in torch.autograd.grad(out.sum(), inputs)] == [x.shape for x in inputs]
    w = weights(inputs[0], "topk_softmax(3)", scale=2.0)
    assert (w.device.type, w.shape, w.dtype) == ("meta", inputs[0].shape, dtype)
    assert decode(*inputs, lengths=[3, 7]).shape == (2, 4, 5, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", KERNELS)
def test_low_precision_errs_at_most_twice_as_much_as_plain_pytorch(kernel, dtype):
    """Plain PyTorch: float64 weights of exact scores, rounded to the dtype, times values in the dtype."""
    q, k, v = (x.detach().requires_grad_() for x in draw(33, 47, dim=16, dtype=dtype))
    scale = 0.25  # a power of two, so that scaling is exact
    exact = dense(*(x.double() for x in (q, k, v)), kernel, scale)
    ours = attend(q, k, v, kernel, scale=scale)
    assert ours.dtype == dtype
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    if kernel.startswith(("topk", "ball", "margin", "trunc")):  # a key may cross a jump when scores are rounded
        plain = weights((q.float() @ keys.float().mT), kernel, scale=scale).to(dtype) @ values
    else:
        plain = weights((q @ keys.mT), kernel, scale=scale) @ values
    error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (ours, plain))
    assert error <= 2 * allowed + torch.finfo(dtype).eps


def test_autocast_runs_in_its_dtype_and_keeps_gradients_in_ours():
    q, k, v = (x.detach().float().requires_grad_() for x in draw(9, 9))
    scale = torch.full((4,), 0.5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(q, k, v, "sparsemax", scale=scale)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), "sparsemax", scale=scale))
    assert [x.dtype for x in gradients(out, (q, k, v, scale))] == [torch.float32] * 4


@pytest.mark.parametrize("kernel", ["sparsemax", "relumax", "topk_softmax(3)"])
def test_strides_do_not_matter(kernel):
    q, k, v = (torch.randn(2, 9, 4, 6) for _ in range(3))  # (B, T, H, D), as most models hold them
    views = tuple(x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    copies = tuple(x.detach().contiguous().requires_grad_() for x in views)
    ours, theirs = attend(*views, kernel), attend(*copies, kernel)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(gradients(ours, views), gradients(theirs, copies), strict=True):
        torch.testing.assert_close(a, b)
    s = torch.randn(4, 7, 5)
    torch.testing.assert_close(weights(s, kernel, dim=1), weights(s.mT.contiguous(), kernel).mT)


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_answer_does_not_depend_on_the_blocks(kernel, monkeypatch):
    q, k, v = draw(23, 23)
    s = torch.randn(40, 23, dtype=torch.float64)
    whole, all_weights = attend(q, k, v, kernel, mask=Causal(1)), weights(s, kernel)
    monkeypatch.setattr(rows, "CPU_BLOCK", 30)
    torch.testing.assert_close(attend(q, k, v, kernel, mask=Causal(1)), whole, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(weights(s, kernel), all_weights, rtol=1e-14, atol=1e-15)


def test_memory_grows_with_the_block_and_not_with_the_square(monkeypatch):
    """The largest tensor made inside is one block, forward and backward."""
    monkeypatch.setattr(rows, "CPU_BLOCK", 2**14)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor):
                    largest = max(largest, x.numel())
            return out

    q, k, v = (torch.randn(1, 1, 2048, 4, requires_grad=True) for _ in range(3))
    view = resolve(Causal(), (1, 1, 2048, 2048), q.device)
    kernel, scale = parse("biweight"), torch.ones(1)
    with torch.no_grad(), Watch():
        reference.estimate(q, k, v, scale, view, kernel.rule, kernel.r, True)
        reference.estimate_backward(q, q, k, v, scale, view, kernel.rule, kernel.r, False)
    assert 2**13 <= largest <= 2**14


@pytest.mark.parametrize("kernel", [*KERNELS, "learned"])
def test_opcheck(kernel):
    q, k, v = (x.detach().float().requires_grad_() for x in draw(5, 6))
    orders = torch.tensor([1.0, 2.0, 3.5, 9.0], requires_grad=True) if kernel == "learned" else None
    code = encode(entmax(torch.tensor([1.5]))) if kernel == "learned" else encode(parse(kernel))
    bias = torch.randn(1, 4, 5, 6, requires_grad=True)
    view = resolve(Causal(1) & ALiBi() & Allowed(torch.rand(5, 6) > 0.2), (2, 4, 5, 6), q.device)
    scale = torch.rand(4, requires_grad=True)
    for readout in (True, False):
        inputs = (q, k, v, scale, view.at, view.lo, view.hi, view.allowed, bias, view.slopes, orders, *code, readout)
        torch.library.opcheck(operators.attend_operator, inputs)
    s = torch.randn(6, 9, requires_grad=True)
    perfect = torch.ones(6, 1, requires_grad=True) if code[1] == "fixed" else None
    row_orders = None if orders is None else (1 + torch.rand(6, 1)).requires_grad_()
    torch.library.opcheck(operators.weights_operator, (s, perfect, row_orders, *code))


def test_torch_compile_sees_one_graph_at_any_length():
    def model(q, k, v, scale, alpha, bias, lengths):
        past = attend(q, k, v, "sparsemax", scale=scale, mask=Causal(offset=1) & Bias(bias))
        near, readout = attend(q, k, v, entmax(alpha), mask=Causal() & ALiBi() & Padding(lengths), return_readout=True)
        packed = attend(q, k, v, gaussian(), mask=Packed(torch.stack((lengths[0], q.shape[2] - lengths[0]))))
        fixed = weights(q @ k.repeat_interleave(2, 1).mT, "norm_relu", scale=scale)
        return (past * near * packed).sum() + fixed.square().sum() + readout.bandwidth.sum()

    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 9, 33):
        q, k, v = (x.detach().float() for x in draw(length, length))
        inputs = (q, k, v, torch.rand(4) + 0.5, torch.rand(4) * 0.9 + 1.05, torch.randn(1, 4, length, length))
        eager, graph = (tuple(x.clone().requires_grad_() for x in inputs) for _ in range(2))
        lengths = torch.tensor([2, 3])
        a, b = model(*eager, lengths), compiled(*graph, lengths)
        torch.testing.assert_close(a, b)
        for x, y in zip(torch.autograd.grad(a, eager), torch.autograd.grad(b, graph), strict=True):
            torch.testing.assert_close(x, y)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_torch_compile_runs_with_its_default_backend():
    def model(q, k, v, scale):
        return attend(q, k, v, "sparsemax", scale=scale, mask=Causal(1)).square().sum() + weights(q @ k.mT, "relumax").sum()

    inputs = tuple(x.detach().float().requires_grad_() for x in (*draw(9, 9, key_heads=4), torch.rand(4) + 0.5))
    eager, compiled = model(*inputs), torch.compile(model, fullgraph=True, dynamic=True)(*inputs)
    torch.testing.assert_close(compiled, eager)
    for a, b in zip(torch.autograd.grad(eager, inputs), torch.autograd.grad(compiled, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_values_that_cannot_be_checked_in_a_graph_still_give_no_nan():
    graph = torch.compile(lambda s, a: weights(s, entmax(a)), fullgraph=True, backend="aot_eager")
    s = torch.tensor([2.0, 1.0, 0.0])
    torch.testing.assert_close(graph(s, torch.tensor(1.0)), torch.softmax(s, 0))
    torch.testing.assert_close(graph(s, torch.tensor(3.0)), weights(s, "sparsemax"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.ones(2, 4, 5)}, ["q must be a tensor (batch, heads, time, head_dim)", "(2, 4, 5)"]),
        ({"k": [1.0]}, ["k must be a tensor", "list"]),
        ({"k": torch.ones(2, 2, 6, 9)}, ["share the head dim", "(2, 2, 6, 9)"]),
        ({"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 8)}, ["multiple of the heads of k"]),
        ({"k": torch.ones(2, 0, 6, 8), "v": torch.ones(2, 0, 6, 8)}, ["positive multiple of the heads of k", "(2, 0, 6, 8)"]),
        ({"q": torch.ones(2, 0, 5, 8)}, ["positive multiple of the heads of k", "(2, 0, 5, 8)"]),
        ({"k": torch.ones(1, 2, 6, 8)}, ["share the batch size"]),
        ({"v": torch.ones(2, 2, 7, 8)}, ["k and v must share heads and time"]),
        ({"q": torch.ones(2, 4, 5, 320)}, ["head dim 320", "256"]),
        ({"q": torch.ones(2, 4, 5, 8).double()}, ["share a dtype", "torch.float64", "autocast"]),
        ({"q": torch.ones(2, 4, 5, 8).int()}, ["torch.int32", "fp16, bf16, fp32 or fp64"]),
        ({"scale": 0.0}, ["scale must be positive", "0.0"]),
        ({"scale": -1}, ["scale must be positive", "-1"]),
        ({"scale": math.nan}, ["scale must be positive"]),
        ({"scale": torch.tensor([1.0, 0.0, 1.0, 1.0])}, ["scale must be positive", "0.0"]),
        ({"scale": torch.ones(3)}, ["shape () or (4,)", "(3,)"]),
        ({"kernel": "sparsemx"}, ["did you mean 'sparsemax'"]),
        ({"kernel": gaussian}, ["call it, as in gaussian()"]),
        ({"kernel": 2}, ["Kernel or its text", "int"]),
        ({"kernel": topk_softmax}, ["call it, as in topk_softmax(k)"]),
        ({"kernel": entmax(torch.tensor([1.5, 1.6]))}, ["alpha", "shape () or (4,)"]),
        ({"mask": torch.ones(7, 7, dtype=torch.bool)}, ["(7, 7) does not broadcast", "(2, 4, 5, 6)"]),
        ({"mask": torch.ones(2, 6, dtype=torch.bool)}, ["a (batch, keys) mask is mask[:, None, None]"]),
        ({"mask": "causal"}, ["Causal(offset=1)", "str"]),
        ({"mask": Causal}, ["call it: Causal(...)"]),
        ({"mask": [Causal(), Causal(1)]}, ["list", "join several with &"]),
        ({"mask": torch.ones(5, 6).int()}, ["torch.int32", "mask.bool()"]),
        ({"mask": torch.ones(5, 6, device="meta")}, ["meta", "q.device"]),
        ({"kernel": Causal()}, ["pass it as mask="]),
        ({"scale": "a"}, ["scale must be a number or a tensor, got str"]),
        ({"scale": torch.tensor(math.inf)}, ["positive and finite"]),
        ({"q": torch.ones(2, 4, 5, 0)}, ["head dim 0", "1 to 256"]),
        ({"backend": "fused"}, ["'fused' is not available", "q is on the CPU", "auto, reference"]),
        ({"backend": "cuda"}, ["backend='cuda' is unknown", "auto, fused, native, reference"]),
    ],
)
def test_bad_input_is_refused_with_what_was_given_and_what_to_do(change, words):
    call = {"q": torch.ones(2, 4, 5, 8), "k": torch.ones(2, 2, 6, 8), "v": torch.ones(2, 2, 6, 8), "kernel": "biweight"}
    with pytest.raises((ValueError, TypeError)) as error:
        attend(**(call | change))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_bad_scores_are_refused():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        weights(torch.ones(3).long())
    with pytest.raises(ValueError, match="at least one dimension"):
        weights(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale must be positive"):
        weights(torch.ones(3), scale=0)


def test_a_second_derivative_is_refused_in_our_own_words():
    q, k, v = draw(3, 3)
    for out in (attend(q, k, v), weights(q)):
        (gradient,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="attend and weights have no second derivative; detach"):
            gradient.sum().backward()


@pytest.mark.parametrize("found", ["3.4.0", "3.3.1+git0", "2.1"])
def test_an_old_triton_is_refused_where_fused_is_asked_for_and_left_alone_by_auto(found, monkeypatch, caplog):
    attention._announce.cache_clear()
    q, k, v = draw(3, 3)
    on_gpu = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0), dtype=torch.float16)
    monkeypatch.setattr(launch, "is_new", lambda index: True)
    monkeypatch.setattr(launch, "find_spec", lambda name: "there")
    for given, old in (("3.5.0", False), ("3.10.1", False), ("4.0", False), (found, True)):
        monkeypatch.setattr(launch, "version", lambda name, given=given: given)
        monkeypatch.setattr(launch, "NO_TRITON", launch.lack_triton())
        with caplog.at_level(logging.INFO, logger="compactattn"):
            assert attention._choose("auto", on_gpu) == ("reference" if old else "fused")
    assert f"because Triton {found} is older than 3.5" in caplog.text
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]  # shown unasked
    with pytest.raises(ValueError) as error:
        attention._choose("fused", on_gpu)
    assert all(word in str(error.value) for word in (f"Triton {found} is older than 3.5", "pip install", "auto, reference"))
    assert torch.equal(attend(q, k, v), attend(q, k, v, backend="reference"))


def test_what_a_missing_triton_would_not_mend_is_told_first(monkeypatch):
    monkeypatch.setattr(launch, "NO_TRITON", "Triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for device, new, reason in (
        ("cpu", True, "on the CPU"),
        ("mps", True, "on mps"),
        ("cuda", False, "older"),
        ("cuda", True, "Triton is"),
    ):
        monkeypatch.setattr(launch, "is_new", lambda index, new=new: new)
        q = SimpleNamespace(device=SimpleNamespace(type=device, index=0), dtype=torch.float64)
        with pytest.raises(ValueError, match=reason):
            attention._choose("fused", q)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert launch.supports(torch.ones(1)) == "Triton is not installed"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ValueError, match="on an AMD GPU"):
        attention._choose("fused", q)


def test_auto_says_once_which_backend_it_chose(caplog):
    attention._announce.cache_clear()
    double = draw(3, 3)
    with caplog.at_level(logging.INFO, logger="compactattn"):
        for q, k, v in (draw(3, 3, dtype=torch.float32), double):
            attend(q, k, v)
            attend(q, k, v)
            attend(q, k, v, backend="reference")
    lacking = build.lack_library()
    assert [record.message for record in caplog.records] == [
        f"attend on cpu: backend='reference' (blocked PyTorch), because {lacking}"
        if lacking
        else "attend on cpu: backend='native' (compiled C)",
        "attend on cpu: backend='reference' (blocked PyTorch), because torch.float64 inputs; attend.c takes fp16, bf16, fp32",
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_numbers_of_numpy_are_numbers():
    q = torch.randn(1, 2, 5, 4)
    torch.manual_seed(0)
    found = attend(q, q, q, scale=np.float32(2.0), dropout=np.float32(0.25))
    torch.manual_seed(0)
    assert torch.equal(found, attend(q, q, q, scale=2.0, dropout=0.25))
    with pytest.raises(TypeError, match=r"Bias takes a tensor, got ndarray; give it to torch\.as_tensor first"):
        attend(q, q, q, mask=Bias(np.zeros((5, 5), np.float32)))
