import time

import pytest
import torch

from compactattn import Causal, attend
from compactattn.memory.features import CHUNK as CHUNKS
from compactattn.memory.features import context_keys, leaky_average, leaky_scan, peek_values

CHUNK = CHUNKS["cpu"]


def test_leaky_average_is_the_recurrence_of_eq_5():
    x = torch.randn(2, 3, 17, 4, dtype=torch.float64)
    leak = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    state, steps = torch.zeros(2, 3, 4, dtype=torch.float64), []
    for t in range(17):
        state = x[:, :, t] + torch.exp(-leak)[:, None] * state
        steps.append(state)
    torch.testing.assert_close(leaky_average(x, leak), torch.stack(steps, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(context_keys(x, leak)[0].norm(dim=-1), torch.ones(2, 3, 17, dtype=torch.float64))


def test_values_peek_one_step_ahead_and_the_last_peeks_at_nothing():
    x = torch.randn(1, 3, 9, 4, dtype=torch.float64)
    mix = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    v = peek_values(x, mix)
    for head in range(3):
        for t in range(9):
            ahead = x[0, head, t + 1] if t < 8 else torch.zeros(4, dtype=torch.float64)
            raw = mix[head] * x[0, head, t] + (1 - mix[head]) * ahead
            expected = raw / raw.norm() if raw.norm() > 0 else raw
            torch.testing.assert_close(v[0, head, t], expected)


def test_a_strictly_causal_memory_never_sees_the_future_through_the_peek():
    x = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    leak, mix = torch.tensor([0.5, 2.0]).double(), torch.tensor([0.2, 0.8]).double()

    def memory(x):
        keys, _ = context_keys(x, leak)
        return attend(keys, keys, peek_values(x, mix), "sparsemax", scale=4.0, mask=Causal(offset=1))

    changed = x.clone()
    changed[:, :, 7:] += 1
    assert torch.equal(memory(x)[:, :, :7], memory(changed)[:, :, :7])
    assert not torch.equal(memory(x)[:, :, 7], memory(changed)[:, :, 7])
    assert torch.equal(memory(x)[:, :, 0], torch.zeros(1, 2, 4).double())


LEAKS = torch.tensor([0.0, 0.05, 0.5, 5.0, 400.0], dtype=torch.float64)


@pytest.mark.parametrize("length", [1, 2, 63, CHUNK, CHUNK + 1, 1000, CHUNK * CHUNK + 3])
def test_the_scan_equals_the_definition_in_output_and_every_gradient(length):
    x = torch.randn(2, len(LEAKS), length, 3, dtype=torch.float64, requires_grad=True)
    leak, weight = LEAKS.clone().requires_grad_(), torch.randn(2, len(LEAKS), length, 3, dtype=torch.float64)
    out, expected = leaky_scan(x, leak), leaky_average(x, leak)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    got = torch.autograd.grad((out * weight).sum(), (x, leak))
    for mine, theirs in zip(got, torch.autograd.grad((expected * weight).sum(), (x, leak)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_the_scan_passes_gradcheck_with_a_state():
    x = torch.randn(1, 2, CHUNK + 5, 2, dtype=torch.float64, requires_grad=True)
    leak = torch.tensor([0.1, 1.0], dtype=torch.float64, requires_grad=True)
    state = torch.randn(1, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(leaky_scan, (x, leak, state))


@pytest.mark.parametrize("cut", [1, 40, CHUNK, 199])
def test_the_scan_goes_on_from_its_own_last_row(cut):
    x = torch.randn(2, 3, 200, 4, dtype=torch.float64)
    leak = LEAKS[:3]
    whole = leaky_scan(x, leak)
    rest = leaky_scan(x[:, :, cut:], leak, whole[:, :, cut - 1])
    torch.testing.assert_close(rest, whole[:, :, cut:], rtol=1e-12, atol=1e-12)


def test_the_scan_never_sees_the_future():
    x = torch.randn(1, 3, 150, 4)
    changed = x.clone()
    changed[:, :, 100:] += 1
    assert torch.equal(leaky_scan(x, LEAKS[1:4].float())[:, :, :100], leaky_scan(changed, LEAKS[1:4].float())[:, :, :100])


def test_the_scan_is_linear_in_time_and_far_ahead_of_the_definition():
    x = torch.randn(1, 2, 4096, 32, requires_grad=True)
    leak = torch.tensor([0.5, 2.0], requires_grad=True)

    def clock(average):
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            torch.autograd.grad(average(x, leak).sum(), (x, leak))
            best = min(best, time.perf_counter() - start)
        return best

    assert clock(leaky_scan) * 5 <= clock(leaky_average)  # measured: 60 to 120 times
