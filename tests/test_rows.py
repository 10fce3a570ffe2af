"""What the fuzz tests do not see: how the weights are found."""

import pytest
import torch

from compactattn import Causal, attend, entmax, parse, reference, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("keys", [1, 2, 16, 1000, 65536])
def test_newton_needs_few_turns(keys, dtype, monkeypatch):
    """Measured over these rows: at most 14, for r near 1 and 65,536 scores of scale 0.1."""
    turns = 0
    step = rows._newton

    def counted(*arguments):
        nonlocal turns
        turns += 1
        return step(*arguments)

    monkeypatch.setattr(rows, "_newton", counted)
    ramp = torch.arange(keys, dtype=dtype)
    for scale in (0.0, 1e-8, 1e-5, 1e-3, 0.1, 1.0, 10.0, 1e4, 1e8):
        s = torch.stack([torch.randn(keys, dtype=dtype), torch.randn(keys, dtype=dtype).round(), -ramp]) * scale
        for kernel in ("sparsemax", "entmax(1.95)", "entmax(1.75)", "entmax15", "entmax43", "entmax(1.1)", "entmax(1.0001)"):
            turns = 0
            rows.weigh(s, parse(kernel).rule, parse(kernel).r)
            assert 1 <= turns <= 14, (kernel, scale)


@pytest.mark.parametrize("kernel", ["sparsemax", "entmax15", "entmax43", "entmax(1.75)", "learned"])
def test_the_backward_pass_does_not_search_again(kernel, monkeypatch):
    """It starts from the reach that was found before: one turn of Newton for each block, a second if rounding asks for it."""
    monkeypatch.setattr(rows, "CPU_BLOCK", 2**12)
    counts = {}

    def count(module, name):
        call = getattr(module, name)

        def counted(*arguments):
            counts[name] = counts.get(name, 0) + 1
            return call(*arguments)

        monkeypatch.setattr(module, name, counted)

    count(reference, "weigh")
    count(rows, "_newton")
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 64, 8, requires_grad=True) for _ in range(3))
    made = entmax(torch.tensor([1.3, 1.8], requires_grad=True)) if kernel == "learned" else kernel
    out = attend(q, k, v, made, scale=2.0, mask=Causal(1), backend="reference")
    assert counts["_newton"] > 2 * counts["weigh"]
    counts.clear()
    out.sum().backward()
    assert 4 <= counts["weigh"] <= counts["_newton"] <= 1.5 * counts["weigh"]
