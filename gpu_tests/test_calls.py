"""What every call promises: the same bits each time, whatever the batch, in a CUDA graph, compiled; linear memory."""

import gc

import pytest
import torch

from compactattn import ALiBi, Bias, Causal, Padding, attend
from gpu_tests.settings import DEVICE, HALF, REPEATS, TRIAL, length, needs_gpu

KERNELS = ["gaussian", "sparsemax", "biweight", "entmax(1.7)", "norm_relu", "relumax", "topk_softmax(32)"]
REPEATED = [*KERNELS, "rectified(r=2, b=1)", "topk_biweight(32)"]


def draw(batch=2, heads=4, size=1000, dim=64):
    """q, k, v, scale with gradients, and do; half as many key heads."""
    shapes = ((batch, heads, size, dim), *[(batch, heads // 2, size, dim)] * 2, (batch, heads, size, dim))
    q, k, v, do = (torch.randn(shape, device=DEVICE).to(getattr(torch, HALF)) for shape in shapes)
    scale = (0.5 + torch.rand(heads, device=DEVICE)) / 4
    return [x.requires_grad_() for x in (q, k, v, scale)], do


def both_ways(inputs, do, kernel, mask):
    """Output and the gradients of q, k, v and scale."""
    q, k, v, scale = inputs
    out = attend(q, k, v, kernel, scale=scale, mask=mask, backend="fused")
    return (out.detach(), *torch.autograd.grad(out, inputs, do))


@pytest.mark.parametrize("size", [1000, 1100], ids=["all tiles", "tiles skipped"])
@pytest.mark.parametrize("kernel", REPEATED)
def test_repeats_are_bit_identical(kernel, size, record_property):
    inputs, do = draw(size=length(size))
    first = both_ways(inputs, do, kernel, Causal(1))
    assert not any(x.isnan().any() for x in first)
    changed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(REPEATS):
        for x, y in zip(first, both_ways(inputs, do, kernel, Causal(1)), strict=True):
            changed += (x != y).sum()
    record_property("note", f"{REPEATS} repeats, {int(changed)} numbers differ")
    assert changed == 0


@pytest.mark.parametrize("size", [333, 1100], ids=["all tiles", "tiles skipped"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sample_does_not_see_its_batch(kernel, size):
    (q, k, v, scale), do = draw(batch=5, size=length(size))
    together = both_ways([q, k, v, scale], do, kernel, Causal())
    for picked in ([3], [4, 3], [3, 0, 1, 3, 2, 4, 1]):
        inputs = [*(x[picked].detach().requires_grad_() for x in (q, k, v)), scale]
        alone = both_ways(inputs, do[picked], kernel, Causal())
        for name, x, y in zip(("out", "dq", "dk", "dv"), together, alone, strict=False):
            assert torch.equal(x[picked], y), (name, picked)


@needs_gpu
@pytest.mark.parametrize("size", [300, 1100], ids=["all tiles", "tiles skipped"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_cuda_graph_replays_both_passes(kernel, size):
    inputs, do = draw(size=size)
    lengths = torch.tensor([size, 217], device=DEVICE)

    def work():
        return both_ways(inputs, do, kernel, Causal(1) & Padding(lengths, queries=lengths) & ALiBi())

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = work()
    for _ in range(3):
        with torch.no_grad():
            for x in (*inputs[:3], do):
                x.normal_()
            lengths.random_(0, size + 1)
        graph.replay()
        for x, y in zip(replayed, work(), strict=True):
            assert torch.equal(x, y)


@pytest.fixture
def compiled(monkeypatch):
    """The names of the kernels that are compiled meanwhile, or found among those compiled before."""
    from triton import knobs

    names = []

    def note(*, repr, fn, **_):
        if fn.module.startswith("compactattn."):
            names.append(fn.name)

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    return names


@needs_gpu
@pytest.mark.parametrize("dim", [48, 40, 5])  # that no other test has compiled for already
@pytest.mark.parametrize("kernel", ["biweight", "relumax", "topk_softmax(8)"])
def test_a_new_length_compiles_nothing(kernel, dim, compiled, record_property):
    # without and with tiles to skip, and from 4,096 keys on; strides that 16 divides have kernels of their own, where the head
    # dim does not see to it
    for size in (992, 999, 1000, 3008, 3001, 3000, 4112, 4105, 4104):
        both_ways(*draw(size=size, dim=dim), kernel, Causal(1))
    first, sizes = len(compiled), (333, 301, 512, 777, 1023, 1024, 1025, 2048, 3001, 4097)
    for size in sizes:
        both_ways(*draw(size=size, dim=dim), kernel, Causal(1))
    record_property("note", f"{first} kernels compiled at first, {len(compiled) - first} for {len(sizes)} new lengths")
    assert first > 0
    assert len(compiled) == first, compiled[first:]


@needs_gpu
def test_a_new_length_of_a_bias_compiles_nothing(compiled, record_property):
    def work(size):
        inputs, do = draw(batch=1, heads=2, size=size, dim=48)
        bias = torch.randn(1, 1, size, size, device=DEVICE).requires_grad_()
        out = attend(*inputs[:3], "biweight", scale=inputs[3], mask=Causal(1) & Bias(bias), backend="fused")
        torch.autograd.grad(out, [*inputs, bias], do)

    for size in (992, 1040):  # without and with tiles to skip
        work(size)
    first, sizes = len(compiled), (333, 512, 1000, 1025, 2048)
    for size in sizes:
        work(size)
    record_property("note", f"{first} kernels compiled at first, {len(compiled) - first} for {len(sizes)} new lengths")
    assert len(compiled) == first, compiled[first:]


@needs_gpu
@pytest.mark.parametrize("kernel", ["gaussian", "biweight", "relumax", "topk_softmax(32)"])
def test_memory_is_linear(kernel, record_property):
    """But for one byte for each tile of 64 × 64 scores, and the lists of those that hold a weight."""
    peaks = []
    for size in (8192, 8192, 16384):  # the first warms up
        inputs, do = draw(batch=1, size=size)
        gc.collect()  # what an earlier test left must not be freed meanwhile
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both_ways(inputs, do, kernel, Causal(1))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    ratio, given = peaks[2] / peaks[1], sum(x.numel() * x.element_size() for x in (*inputs, do))
    record_property("note", f"16,384 keys need {ratio:.3f} times the memory of 8,192, {peaks[2] / given:.2f} times the inputs")
    assert ratio < 2.1


@pytest.mark.parametrize("kernel", ["biweight", "relumax", "topk_softmax(32)"])
def test_torch_compile_sees_one_graph_and_returns_the_same_bits(kernel):
    inputs, do = draw(size=length(300))

    def model(q, k, v, scale):
        return attend(q, k, v, kernel, scale=scale, mask=Causal(1) & ALiBi(), backend="fused")

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if TRIAL else "inductor")
    eager, ours = (f(*inputs) for f in (model, compiled))
    assert torch.equal(eager, ours)
    for x, y in zip(*(torch.autograd.grad(out, inputs, do) for out in (eager, ours)), strict=True):
        assert torch.equal(x, y)
