"""Decode, the memories' keys and values and the loss on a GPU: each errs as little as plain PyTorch, in the same bits."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from compactattn import Pages, attend, decode
from compactattn.memory.features import leaky_average, peek_values, unit
from compactattn.memory.operators import fused_keys, fused_values
from compactattn.models import head
from gpu_tests.settings import DEVICE, HALF, REPEATS, TRIAL, length, needs_gpu
from gpu_tests.test_calls import KERNELS

DTYPES = list(dict.fromkeys([HALF, "float16", "float32"]))
FEW = min(REPEATS, 50)


def normal(*shape, dtype="float32"):
    return torch.randn(shape, device=DEVICE).to(getattr(torch, dtype))


def judge(ours, plain, exact, limits, record_property):
    """Each may err so many times as much as plain PyTorch or as the exact answer when rounded once, and a few ulp of fp32."""
    ratios = []
    for mine, theirs, want, limit in zip(ours, plain, exact, limits, strict=True):
        unavoidable = max((x.double() - want).norm() for x in (theirs, want.to(mine.dtype)))
        room = unavoidable + 4 * torch.finfo(torch.float32).eps * want.norm()
        ratios.append(float((mine.double() - want).norm() / room) / limit)
    record_property("note", f"the worst error is {max(ratios):.2f} of what is allowed")
    assert max(ratios) <= 1, ratios


def same_bits(call):
    first = call()
    return all(torch.equal(x, y) for _ in range(FEW) for x, y in zip(first, call(), strict=True))


# -- decode --------------------------------------------------------------------------------------


def draw_cache(dtype, keys=5000):
    """Eight heads of two key heads, one query each; a cache whose neighbouring keys are alike, filled to different lengths."""
    keys = length(keys)
    k = normal(3, 2, keys, 64).cumsum(2)
    k = (8 * k / k.norm(dim=-1, keepdim=True)).to(getattr(torch, dtype))
    return normal(3, 8, 1, 64, dtype=dtype), k, normal(3, 2, keys, 64, dtype=dtype), [keys, keys // 3, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_decode_errs_as_little_as_the_reference_with_pages_and_without(kernel, dtype, record_property):
    q, k, v, lengths = draw_cache(dtype)
    exact = [
        attend(*(x[i : i + 1, :, :n].double() for x, n in ((q, 1), (k, filled), (v, filled))), kernel, backend="reference")
        for i, filled in enumerate(lengths)
    ]
    plain = decode(q, k, v, kernel, lengths=lengths, backend="reference")
    ours = decode(q, k, v, kernel, lengths=lengths, backend="fused")
    paged, skipped = decode(q, k, v, kernel, lengths=lengths, pages=Pages.of(k, lengths), backend="fused")
    want = torch.cat(exact)
    judge([ours, paged], [plain, plain], [want, want], [2, 2], record_property)
    pages = torch.tensor([-(-filled // 64) for filled in lengths], device=DEVICE)[:, None]
    assert ((skipped >= 0) & (skipped < pages.clamp_min(1))).all()
    assert same_bits(lambda: (decode(q, k, v, kernel, lengths=lengths, backend="fused"),))


@needs_gpu
@pytest.mark.parametrize("kernel", ["biweight", "relumax", "gaussian", "norm_relu"])
def test_a_cuda_graph_decodes_from_a_cache_that_grows(kernel):
    q, k, v, _ = draw_cache(HALF)
    lengths = torch.tensor([4000, 1200, 7], device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            decode(q, k, v, kernel, lengths=lengths, backend="fused")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = decode(q, k, v, kernel, lengths=lengths, backend="fused")
    for _ in range(3):
        lengths += 1
        q.normal_()
        graph.replay()
        assert torch.equal(replayed, decode(q, k, v, kernel, lengths=lengths, backend="fused"))


# -- the memories' features ----------------------------------------------------------------------


def plain_keys(x, leak):
    return unit(leaky_average(x, leak))


FEATURES = {
    "keys": (lambda x, leak: fused_keys(x, leak, None)[0], plain_keys, lambda: [torch.tensor([0.05, 0.7, 3.0], device=DEVICE)]),
    "values": (fused_values, peek_values, lambda: [torch.rand(3, device=DEVICE), 0.2 + torch.rand(3, device=DEVICE)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FEATURES)
def test_features_err_as_little_as_their_definition(name, dtype, record_property):
    fused, plain, numbers = FEATURES[name]
    x, dy = normal(2, length(1000), 3, 64, dtype=dtype).transpose(1, 2), normal(2, 3, length(1000), 64, dtype=dtype)
    given = [x, *numbers()]

    def both_ways(function, wide=False):
        inputs = [y.detach().to(torch.float64 if wide else y.dtype).requires_grad_() for y in given]
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, dy.to(out.dtype))
        return [y.detach() for y in (out, *gradients)][:2]  # a number of a head is a sum in which plain PyTorch can be lucky

    judge(both_ways(fused), both_ways(plain), both_ways(plain, wide=True), [2, 3], record_property)
    assert same_bits(lambda: both_ways(fused))


# -- the loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [257, 50_257])
def test_the_loss_errs_as_little_as_cross_entropy(words, dtype, monkeypatch, record_property):
    if TRIAL:
        words = min(words, 300)
        monkeypatch.setattr(head, "fused", lambda hidden: True)
    tokens = 40 if TRIAL else 3000
    hidden, weight = normal(tokens, 64, dtype=dtype), normal(words, 64, dtype=dtype)
    targets = torch.randint(0, words, (tokens,), device=DEVICE)
    counted = torch.rand(tokens, device=DEVICE) < 0.7

    def definition(hidden, weight):
        return (cross_entropy(hidden @ weight.T * 0.31, targets, reduction="none") * counted).sum()

    def both_ways(loss, wide=False):
        inputs = [y.detach().to(torch.float64 if wide else y.dtype).requires_grad_() for y in (hidden, weight)]
        total = loss(*inputs)
        return [y.detach() for y in (total, *torch.autograd.grad(total, inputs))]

    ours = both_ways(lambda hidden, weight: head.head_loss(hidden, weight, targets, counted, 0.31))
    judge(ours, both_ways(definition), both_ways(definition, wide=True), [2, 3, 3], record_property)
