import torch

from compactattn import Causal, attend
from compactattn.memory.features import context_keys, leaky_average, peek_values


def test_leaky_average_is_the_recurrence_of_eq_5():
    x = torch.randn(2, 3, 17, 4, dtype=torch.float64)
    leak = torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    state, steps = torch.zeros(2, 3, 4, dtype=torch.float64), []
    for t in range(17):
        state = x[:, :, t] + torch.exp(-leak)[:, None] * state
        steps.append(state)
    torch.testing.assert_close(leaky_average(x, leak), torch.stack(steps, 2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(context_keys(x, leak).norm(dim=-1), torch.ones(2, 3, 17, dtype=torch.float64))


def test_values_peek_one_step_ahead_and_the_last_peeks_at_nothing():
    x = torch.randn(3, 9, 4, dtype=torch.float64)
    mix = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    v = peek_values(x, mix)
    for head in range(3):
        for t in range(9):
            ahead = x[head, t + 1] if t < 8 else torch.zeros(4, dtype=torch.float64)
            raw = mix[head] * x[head, t] + (1 - mix[head]) * ahead
            expected = raw / raw.norm() if raw.norm() > 0 else raw
            torch.testing.assert_close(v[head, t], expected)


def test_a_strictly_causal_memory_never_sees_the_future_through_the_peek():
    x = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    leak, mix = torch.tensor([0.5, 2.0]).double(), torch.tensor([0.2, 0.8]).double()

    def memory(x):
        keys = context_keys(x, leak)
        return attend(keys, keys, peek_values(x, mix), "sparsemax", scale=4.0, mask=Causal(offset=1))

    changed = x.clone()
    changed[:, :, 7:] += 1
    assert torch.equal(memory(x)[:, :, :7], memory(changed)[:, :, :7])
    assert not torch.equal(memory(x)[:, :, 7], memory(changed)[:, :, 7])
    assert torch.equal(memory(x)[:, :, 0], torch.zeros(1, 2, 4).double())
