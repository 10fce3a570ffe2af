"""Mamba's scan on a GPU: errs as little as the plain one, the same bits each time, replayed in a CUDA graph."""

import pytest
import torch
from torch.nn.functional import softplus

from compactattn.mixers import selective_scan
from gpu_tests.settings import DEVICE, REPEATS, TRIAL, length, needs_gpu

NAMES = ("y", "last", "du", "dstep", "drates", "db", "dc", "dstate")
#         B, T, E, N
SHAPES = [(1, 1, 1, 1), (2, 31, 5, 5), (3, 33, 40, 16), (2, 70, 100, 64), (4, 1000, 256, 16), (2, 4097, 48, 16)]


@pytest.fixture(autouse=True)
def _kernels(monkeypatch):
    """In a trial the kernels run under the interpreter; fp64 is plain."""
    if TRIAL:
        monkeypatch.setattr(selective_scan, "fused", lambda u, rates: u.dtype == torch.float32)


def draw(shape):
    """Inputs as Mamba makes them, and gradients of y and of the last state."""
    b, t, e, n = shape
    t = length(t)
    u, step, dy, rates, b_, c, state, dlast = (
        torch.randn(size, device=DEVICE) for size in (*[(b, t, e)] * 3, (n, e), *[(b, t, n)] * 2, *[(b, n, e)] * 2)
    )
    return [x.requires_grad_() for x in (u, softplus(2 * step - 2), -n * rates.sigmoid(), b_, c, state)], (dy, dlast)


def both_ways(inputs, slopes, dtype=torch.float32):
    """Outputs, and the gradients of all inputs."""
    inputs = [x if x.dtype == dtype else x.detach().to(dtype).requires_grad_() for x in inputs]
    out = selective_scan.selective_scan(*inputs)
    return [x.detach() for x in (*out, *torch.autograd.grad(out, inputs, [x.to(dtype) for x in slopes]))]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scan_errs_as_little_as_the_plain_one(shape, monkeypatch, record_property):
    inputs, slopes = draw(shape)
    ours, exact = (both_ways(inputs, slopes, dtype) for dtype in (torch.float32, torch.float64))
    monkeypatch.setattr(selective_scan, "fused", lambda u, rates: False)
    plain, ratios = both_ways(inputs, slopes), {}
    for name, mine, theirs, want in zip(NAMES, ours, plain, exact, strict=True):
        room = (theirs - want).norm() + torch.finfo(torch.float32).eps * want.norm() / 2
        ratios[name] = float((mine - want).norm() / room)
    worst = max(ratios, key=lambda name: ratios[name])
    record_property("note", f"{shape}: the worst error is {ratios[worst]:.2f} of plain PyTorch's, of {worst}")
    assert all(ratio <= (2 if name in ("y", "last") else 3) for name, ratio in ratios.items()), ratios


def test_repeats_are_bit_identical():
    inputs, slopes = draw((4, 300, 48, 16))
    first = both_ways(inputs, slopes)
    changed = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(min(REPEATS, 100)):
        for x, y in zip(first, both_ways(inputs, slopes), strict=True):
            changed += (x != y).sum()
    assert changed == 0


@needs_gpu
def test_a_cuda_graph_replays_both_passes():
    inputs, slopes = draw((4, 300, 48, 16))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            both_ways(inputs, slopes)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = both_ways(inputs, slopes)
    for _ in range(3):
        with torch.no_grad():
            for x in (inputs[0], *inputs[3:], *slopes):
                x.normal_()
        graph.replay()
        for x, y in zip(replayed, both_ways(inputs, slopes), strict=True):
            assert torch.equal(x, y)
