"""The papers' equations in NumPy, one position and one channel after another: written from the text, sharing no code."""

from __future__ import annotations

from math import erf

import numpy as np


def arrays(module):
    return {name: value.detach().numpy() for name, value in module.named_parameters()}


def linear(p, name, x):
    return p[f"{name}.weight"] @ x + p.get(f"{name}.bias", 0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def diagonal(p, name, x):
    """x' = A x + B u by zero-order hold, with B = 1 and every state beside its conjugate; y = Re C x + D u."""
    time, width = x.shape
    y = np.zeros((time, width))
    for channel in range(width):
        step = np.exp(p[f"{name}.log_step"][channel])
        pairs = len(p[f"{name}.log_rate"]) // width
        mine = slice(channel * pairs, (channel + 1) * pairs)
        a = -np.exp(p[f"{name}.log_rate"][mine]) + 1j * p[f"{name}.frequency"][mine]
        c = p[f"{name}.readout"][channel] @ np.array([1, 1j])
        a, c = np.concatenate((a, a.conj())), np.concatenate((c, c.conj()))
        a_bar, b_bar = np.exp(step * a), (np.exp(step * a) - 1) / a
        state = np.zeros_like(a)
        for t in range(time):
            state = a_bar * state + b_bar * x[t, channel]
            y[t, channel] = (c @ state).real + p[f"{name}.skip"][channel] * x[t, channel]
    return y


def kernel(p, name, channel, time, discretise):
    """2 Re Σ_n c_n b̄_n ā_n^j for ages j < time, of one a for each channel or one that all share."""
    step, c = np.exp(p[f"{name}.log_step"][channel]), p[f"{name}.readout"][channel] @ np.array([1, 1j])
    rates, frequencies = (p[f"{name}.{part}"].reshape(-1, len(c)) for part in ("log_rate", "frequency"))
    mine = channel % len(rates)
    a_bar, b_bar = discretise(-np.exp(rates[mine]) + 1j * frequencies[mine], step)
    return np.array([2 * (c * b_bar * a_bar**age).sum().real for age in range(time)])


def zero_order_hold(a, step):
    return np.exp(step * a), (np.exp(step * a) - 1) / a


def bilinear(a, step):
    return (1 + step * a / 2) / (1 - step * a / 2), step / (1 - step * a / 2)


def convolve(p, name, x, discretise):
    """y = K x + skip ⊙ x, with a matrix K (T, T) of ages for every channel."""
    time, width = x.shape
    ages = np.arange(time)[:, None] - np.arange(time)
    y = p[f"{name}.skip"] * x
    for channel in range(width):
        taps = kernel(p, name, channel, time, discretise)
        y[:, channel] += np.where(ages >= 0, taps[np.maximum(ages, 0)], 0) @ x[:, channel]
    return y


def shift(p, name, x):
    """State moves one place down and the input enters at the top: A is the shift matrix, B = e₁ (H3, section 3.1)."""
    time, width = x.shape
    size = p[f"{name}.taps"].shape[1]
    y = np.zeros((time, width))
    for channel in range(width):
        state = np.zeros(size)
        for t in range(time):
            state = np.eye(size, k=-1) @ state + np.eye(size)[0] * x[t, channel]
            y[t, channel] = p[f"{name}.taps"][channel] @ state + p[f"{name}.skip"][channel] * x[t, channel]
    return y


def s4d(module, x):
    p = arrays(module)
    y = diagonal(p, "diagonal", x)
    y = y * (1 + np.vectorize(erf)(y / np.sqrt(2))) / 2
    both = np.stack([linear(p, "to_output", row) for row in y])
    value, gate = np.split(both, 2, -1)
    return value * sigmoid(gate)


def h3(module, x):
    p = arrays(module)
    q, k, v = np.split(np.stack([linear(p, "to_inputs", row) for row in x]), 3, -1)
    y = q * diagonal(p, "diagonal", shift(p, "shift", k) * v)
    return np.stack([linear(p, "to_output", row) for row in y])


def s4d_benchmark(module, x):
    p = arrays(module)
    y = convolve(p, "diagonal", x, zero_order_hold)
    y = y * (1 + np.vectorize(erf)(y / np.sqrt(2))) / 2
    return np.stack([linear(p, "to_output", row) for row in y])


def h3_benchmark(module, x):
    p = arrays(module)
    q, k, v = np.split(np.stack([linear(p, "to_inputs", row) for row in x]), 3, -1)
    y = q * convolve(p, "diagonal", shift(p, "shift", k) * v, bilinear)
    return np.stack([linear(p, "to_output", row) for row in y])


def mamba(module, x):
    """Algorithm 2 of the paper, with the block of its Figure 3 around it."""
    p = arrays(module)
    raw, gate = np.split(np.stack([linear(p, "to_inputs", row) for row in x]), 2, -1)
    time, inner = raw.shape
    rank, size = p["to_step.weight"].shape[1], len(p["log_rate"]) // inner
    state, out = np.zeros((inner, size)), []
    for t in range(time):
        u = p["taps_bias"].copy()
        for lag in range(p["taps"].shape[1]):
            u += p["taps"][:, lag] * raw[t - lag] if t >= lag else 0
        u = silu(u)
        selected = linear(p, "to_selection", u)
        step = np.log1p(np.exp(linear(p, "to_step", selected[:rank]) + p["step_bias"]))
        b, c = selected[rank : rank + size], selected[rank + size :]
        y = np.zeros(inner)
        for channel in range(inner):
            a = -np.exp(p["log_rate"].reshape(size, inner)[:, channel])
            state[channel] = np.exp(step[channel] * a) * state[channel] + step[channel] * b * u[channel]
            y[channel] = c @ state[channel] + p["skip"][channel] * u[channel]
        out.append(linear(p, "to_output", y * silu(gate[t])))
    return np.stack(out)
