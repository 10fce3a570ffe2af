"""Dropout of weights on a GPU: the mask of the definition to the bit, its gradients, CUDA graphs, and no wait for the host."""

import random

import pytest
import torch

from compactattn import Causal, attend
from compactattn.dropout import Dropout, draw_seed, factors, foresee
from gpu_tests.cases import GROUPS, cases_of
from gpu_tests.settings import DEVICE, EVERY, HALF, length, needs_gpu
from gpu_tests.test_calls import KERNELS, draw
from gpu_tests.test_numerics import judge_all

P = 0.3


def both_ways(inputs, do, kernel, seed=None):
    """Output and the gradients of q, k, v and scale, with dropout."""
    if seed is not None:
        torch.manual_seed(seed)
    q, k, v, scale = inputs
    out = attend(q, k, v, kernel, scale=scale, mask=Causal(1), dropout=P, backend="fused")
    return (out.detach(), *torch.autograd.grad(out, inputs, do))


@pytest.mark.parametrize("turn", range(6))
@pytest.mark.parametrize("kernel", ["gaussian", "ball", "norm_relu"])
@pytest.mark.parametrize("dtype", [HALF, "float32"])
def test_the_mask_is_that_of_the_definition_to_the_bit(dtype, kernel, turn):
    """Equal scores, and values that each show one of up to 64 keys in a row; dv of ones shows it again."""
    rng = random.Random(turn)
    batch, heads, queries, keys = (
        rng.randint(1, 3),
        rng.randint(1, 4),
        rng.randint(1, length(900)),
        rng.randint(1, length(2100)),
    )
    first = rng.randint(0, max(0, keys - 64))
    last = min(first + 64, keys)
    q, k = (torch.zeros(batch, heads, size, 16, device=DEVICE, dtype=getattr(torch, dtype)) for size in (queries, keys))
    v = torch.zeros(batch, heads, keys, 64, device=DEVICE, dtype=q.dtype)
    v[:, :, first:last] = torch.eye(last - first, 64, device=DEVICE, dtype=q.dtype)
    v.requires_grad_()
    torch.manual_seed(turn)
    spans = slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys)
    fates = foresee(Dropout(P, draw_seed(P, q.device)), batch, heads, queries)
    wanted = factors(fates, *spans, torch.float32)
    torch.manual_seed(turn)
    out = attend(q, k, v, kernel, dropout=P, backend="fused")
    assert torch.equal(out[..., : last - first] > 0, wanted[..., first:last] > 0)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    torch.testing.assert_close(dv[..., 0].float(), wanted.sum(2) / keys, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("p", [0.05, 0.5])
@pytest.mark.parametrize("group", GROUPS[:: 7 * EVERY], ids=str)
def test_errors(group, p, record_property):
    found = judge_all(cases_of(group), dropout=p)
    record_property("numerics", {"dtype": group.dtype, **found})
    assert not found["faults"], "\n".join(found["faults"])


@pytest.mark.parametrize("size", [300, 1100], ids=["all tiles", "tiles skipped"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_seed_brings_the_same_bits_back_and_another_does_not(kernel, size):
    inputs, do = draw(size=length(size))
    first, again, other = (both_ways(inputs, do, kernel, seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_sample_keeps_its_mask_whatever_follows_it_in_the_batch():
    (q, k, v, scale), do = draw(batch=4, size=length(333))
    together = both_ways([q, k, v, scale], do, "biweight", 1)
    inputs = [*(x[:2].detach().requires_grad_() for x in (q, k, v)), scale]
    alone = both_ways(inputs, do[:2], "biweight", 1)
    for x, y in zip(together[:4], alone[:4], strict=True):
        assert torch.equal(x[:2], y)


@needs_gpu
@pytest.mark.parametrize("kernel", ["biweight", "gaussian"])
def test_a_cuda_graph_draws_anew_at_every_replay(kernel):
    inputs, do = draw(size=300)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            both_ways(inputs, do, kernel)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both_ways(inputs, do, kernel)
    outputs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        graph.replay()
        outputs.append(replayed[0].clone())
        for x, y in zip(replayed, both_ways(inputs, do, kernel, seed), strict=True):
            assert torch.equal(x, y)
    graph.replay()
    assert not torch.equal(*outputs)
    assert not torch.equal(replayed[0], outputs[1])


@needs_gpu
def test_the_host_waits_for_nothing():
    inputs, do = draw(size=300)
    both_ways(inputs, do, "biweight")
    torch.cuda.set_sync_debug_mode("error")
    try:
        both_ways(inputs, do, "biweight")
    finally:
        torch.cuda.set_sync_debug_mode("default")
