"""The contract of attend() and weights(): shapes, masks, dtypes, gradients, compilation, errors."""

import copy
import logging
import math
import shutil

import pytest
import torch

from compactattn import (
    ALiBi,
    Allowed,
    Bias,
    Causal,
    Packed,
    Padding,
    attend,
    attention,
    entmax,
    gaussian,
    parse,
    reference,
    rows,
    topk_softmax,
    weights,
)
from compactattn.kernels import Fixed, encode
from compactattn.masks import resolve

KERNELS = [
    "gaussian",
    "sparsemax",
    "biweight",
    "triweight",
    "entmax(1.7)",
    "norm_relu",
    "rectified(r=2)",
    "relumax",
    "relumax(r=3, b=2)",
    "topk_softmax(3)",
    "topk_uniform(3)",
    "topk_biweight(4)",
    "ball",
    "margin",
    "truncated_gaussian(1.5)",
]
SHIFT_INVARIANT = [name for name in KERNELS if not isinstance(parse(name).rule, Fixed)]
MASKS = {
    "none": lambda q, k: None,
    "causal": lambda q, k: Causal(),
    "strict": lambda q, k: Causal(offset=1),
    "padding": lambda q, k: Padding([0, k], queries=[q, max(q - 1, 0)]),
    "packed": lambda q, k: Causal(1) & Packed([k // 3, 0, k - k // 3], queries=[q // 2, 0, q - q // 2]),
    "boolean": lambda q, k: torch.rand(2, 1, q, k) > 0.4,
    "bias": lambda q, k: Causal() & Bias(torch.randn(1, 4, q, k, dtype=torch.float64)),
    "alibi": lambda q, k: Causal() & ALiBi(),
}


def draw(queries, keys, heads=4, key_heads=2, dim=6, value_dim=5, dtype=torch.float64):
    shapes = ((2, heads, queries, dim), (2, key_heads, keys, dim), (2, key_heads, keys, value_dim))
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)


def dense(q, k, v, kernel, scale=None, mask=None):
    """attend() by the definition: all scores at once, illegal ones −inf, weights, sum."""
    (batch, heads, queries, dim), keys = q.shape, k.shape[2]
    view = resolve(mask, (batch, heads, queries, keys), q.device)
    scale = torch.as_tensor(1 / math.sqrt(dim) if scale is None else scale, dtype=q.dtype).expand(heads)
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    s = scale[:, None, None] * (q @ k.mT)
    position = torch.arange(keys)
    if view.bias is not None:
        s = s + view.bias
    if view.slopes is not None:
        s = s - view.slopes[:, None, None] * (view.at[:, None, :, None] - position).abs()
    illegal = (position < view.lo[:, None, :, None]) | (position >= view.hi[:, None, :, None])
    illegal = illegal if view.allowed is None else illegal | ~view.allowed
    s = s.masked_fill(illegal, -math.inf)
    flat = s.flatten(0, -2)
    kernel = parse(kernel)
    perfect = scale[:, None].expand(batch, heads, queries).reshape(-1, 1) if isinstance(kernel.rule, Fixed) else None
    return attention._weights(flat, perfect, None, *encode(kernel))[0].view_as(s) @ v


def gradients(out, inputs, seed=1):
    g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    return torch.autograd.grad(out, inputs, g, allow_unused=True)


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "mask",
    [
        Padding([0, 0]),
        Padding([5, 5], queries=[0, 0]),
        Causal(offset=99),
        Allowed(torch.zeros(5, dtype=torch.bool)),
        Bias(torch.full((5, 5), -math.inf)),
        Packed([0, 5], queries=[5, 0]),
    ],
    ids=["no keys", "no queries", "out of reach", "forbidden", "-inf bias", "other sequence"],
)
def test_a_row_with_no_legal_key_is_zero_with_zero_gradient(kernel, mask):
    q, k, v = draw(5, 5)
    out, readout = attend(q, k, v, kernel, mask=mask, return_readout=True)
    assert torch.equal(out, torch.zeros_like(out))
    assert (readout.support == 0).all()
    assert (readout.threshold == math.inf).all()
    assert (readout.bandwidth == 0).all()
    for gradient in gradients(out, (q, k, v)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("kernel", KERNELS)
def test_padded_and_first_rows_are_zero_among_live_ones(kernel):
    q, k, v = draw(6, 6)
    out = attend(q, k, v, kernel, mask=Causal(1) & Padding([6, 3], queries=[6, 3]))
    assert (out[:, :, 0] == 0).all()
    assert (out[1, :, 3:] == 0).all()
    assert (out[1, :, 1:3] != 0).any(-1).all()
    dq, dk, dv = gradients(out, (q, k, v))
    assert (dq[:, :, 0] == 0).all()
    for gradient in (dq, dk, dv):
        assert (gradient[1, :, 3:] == 0).all()
        assert gradient.isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 4, 0), (0, 5)])
def test_zero_length_rows_give_empty_weights(shape):
    for kernel in KERNELS:
        s = torch.randn(shape, requires_grad=True)
        w = weights(s, kernel)
        assert w.shape == shape
        w.sum().backward()
        assert s.grad.shape == shape


@pytest.mark.parametrize("kernel", KERNELS)
def test_attend_to_no_keys_or_no_queries_at_all(kernel):
    q, k, v = draw(3, 0)
    assert torch.equal(attend(q, k, v, kernel), torch.zeros(2, 4, 3, 5, dtype=torch.float64))
    q, k, v = draw(0, 3)
    assert attend(q, k, v, kernel).shape == (2, 4, 0, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_future_is_invisible_and_the_newest_legal_key_is_not(kernel, offset, dtype, monkeypatch):
    monkeypatch.setattr(rows, "CPU_BLOCK", 600)
    q, k, v = (x.detach() for x in draw(31, 31, dtype=dtype))
    before = attend(q, k, v, kernel, mask=Causal(offset))
    t = 17
    q2, k2, v2 = q.clone(), k.clone(), v.clone()
    q2[:, :, t + 1 :] += 5
    k2[:, :, t + 1 - offset :] *= -7
    v2[:, :, t + 1 - offset :] += 100
    assert torch.equal(attend(q2, k2, v2, kernel, mask=Causal(offset))[:, :, : t + 1], before[:, :, : t + 1])
    k3, v3 = k.clone(), v.clone()
    newest = t - offset
    k3[:, :, newest] = 50 * torch.sign(q[:, ::2, t])  # for one head of each group it is now the best key
    v3[:, :, newest] += 100
    after = attend(q, k3, v3, kernel, mask=Causal(offset))[:, ::2, t]
    assert ((after - before[:, ::2, t]).abs() > 2).all()


@pytest.mark.parametrize("kernel", [*KERNELS, "entmax(1.9)", "entmax(1.3)"])
def test_the_past_is_bit_identical_however_hard_the_future_is(kernel):
    q, k, v = (torch.randn(1, 2, 200, 8) for _ in range(3))
    before = attend(q, k, v, kernel, mask=Causal())[:, :, :151]
    for factor in (0.0, 0.01, 30.0):
        later = [x.clone() for x in (q, k, v)]
        for x in later:
            x[:, :, 151:] *= factor
        assert torch.equal(attend(*later, kernel, mask=Causal())[:, :, :151], before)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_is_masked_may_hold_anything(kernel, junk):
    """As in padding that nobody has written to: no output and no gradient may notice."""
    lengths = torch.tensor([3, 7])
    mask = Causal() & Padding(lengths, queries=lengths)
    clean = draw(7, 7)
    dirty = [x.detach().clone() for x in clean]
    for x in dirty:
        x[0, :, 3:] = junk
    dirty = [x.requires_grad_() for x in dirty]
    ours, theirs = attend(*dirty, kernel, mask=mask), attend(*clean, kernel, mask=mask)
    assert torch.equal(ours, theirs)
    for a, b in zip(gradients(ours, dirty), gradients(theirs, clean), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kernel", ["softmax", "sparsemax", "relumax"])
def test_a_value_that_is_not_a_number_shows_in_the_rows_that_use_it_and_no_other(kernel):
    q, k, v = (x.detach() for x in draw(9, 9))
    spoilt = v.clone()
    spoilt[0, 0, 5, 2] = math.nan
    out = attend(q, k, spoilt, kernel, mask=Causal())
    used = torch.zeros(2, 4, 9, dtype=torch.bool)
    used[0, :2] = (
        weights(
            (q @ k.repeat_interleave(2, 1).mT).masked_fill(~torch.ones(9, 9).tril().bool(), -math.inf),
            kernel,
            scale=1 / math.sqrt(6),
        )[0, :2, :, 5]
        > 0
    )
    assert torch.equal(out.isnan().any(-1), used)
    assert torch.equal(out[~used], attend(q, k, v, kernel, mask=Causal())[~used])


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


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_equal_a_loop_over_them(kernel):
    lengths = [5, 1, 0, 9]
    q, k, v = draw(15, 15)
    out = attend(q, k, v, kernel, mask=Causal(1) & Packed(lengths))
    parts = [attend(*part, kernel, mask=Causal(1)) for part in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)]
    loop = torch.cat(parts, 2)
    torch.testing.assert_close(out, loop, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(gradients(out, (q, k, v)), gradients(loop, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("length", [1, 63, 1000])
@pytest.mark.parametrize("dim", [1, 7, 65, 256])
def test_odd_lengths_and_head_dims(length, dim):
    q, k, v = (torch.randn(1, 1, length, dim, requires_grad=True) for _ in range(3))
    out = attend(q, k, v, mask=Causal())
    expected = dense(*(x.double() for x in (q, k, v)), "biweight", mask=Causal())
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    out.sum().backward()
    assert q.grad.isfinite().all()


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
        torch.library.opcheck(attention._attend, inputs)
    s = torch.randn(6, 9, requires_grad=True)
    perfect = torch.ones(6, 1, requires_grad=True) if code[1] == "fixed" else None
    row_orders = None if orders is None else (1 + torch.rand(6, 1)).requires_grad_()
    torch.library.opcheck(attention._weights, (s, perfect, row_orders, *code))


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.ones(2, 4, 5)}, ["q must be a tensor (batch, heads, time, head_dim)", "(2, 4, 5)"]),
        ({"k": [1.0]}, ["k must be a tensor", "list"]),
        ({"k": torch.ones(2, 2, 6, 9)}, ["share the head dim", "(2, 2, 6, 9)"]),
        ({"k": torch.ones(2, 3, 6, 8), "v": torch.ones(2, 3, 6, 8)}, ["multiple of the heads of k"]),
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
        ({"mask": "causal"}, ["Causal(offset=1)", "str"]),
        ({"mask": Causal}, ["call it: Causal(...)"]),
        ({"mask": [Causal(), Causal(1)]}, ["list", "join several with &"]),
        ({"mask": torch.ones(5, 6).int()}, ["torch.int32", "mask.bool()"]),
        ({"mask": torch.ones(5, 6, device="meta")}, ["meta", "q.device"]),
        ({"kernel": Causal()}, ["pass it as mask="]),
        ({"scale": "a"}, ["scale must be a number or a tensor, got str"]),
        ({"scale": torch.tensor(math.inf)}, ["positive and finite"]),
        ({"q": torch.ones(2, 4, 5, 0)}, ["head dim 0", "1 to 256"]),
        ({"backend": "fused"}, ["'fused' is not available", "auto, reference"]),
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


def test_auto_says_once_which_backend_it_chose(caplog):
    attention._announce.cache_clear()
    q, k, v = draw(3, 3)
    with caplog.at_level(logging.INFO, logger="compactattn"):
        attend(q, k, v)
        attend(q, k, v)
        attend(q, k, v, backend="reference")
    assert [record.message for record in caplog.records] == ["attend on cpu: backend='reference' (blocked PyTorch)"]
