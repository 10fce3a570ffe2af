"""Causal convolutions with a state: short learned filters, and the diagonal state space that S4D and H3 share.

Time is cut into chunks and every chunk is a product with a banded matrix, so that no answer sees the future, not even in its
last bits, as it would through a Fourier transform. Shapes: (B, T, C) with B batch, T time, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from compactattn.mixers.recurrence import Recurrence

CHUNK = 64  # positions that one matrix product covers
FEW = 8  # taps up to which shifted copies are faster than a product
SHORTEST_STEP, LONGEST_STEP = 1e-3, 1e-1  # of the time that a position takes, at the start of training


def full_precision(x: Tensor) -> torch.autocast:
    """Sums over long times are not for autocast."""
    return torch.autocast(x.device.type, enabled=False)


def draw_steps(count: int) -> Tensor:
    """Step sizes, log-uniform between the shortest and the longest."""
    return torch.exp(torch.empty(count).uniform_(math.log(SHORTEST_STEP), math.log(LONGEST_STEP)))


def draw_taps(channels: int, size: int) -> Tensor:
    """Filters (channels, size), uniform within ±1/√size, as nn.Conv1d starts."""
    return torch.empty(channels, size).uniform_(-(size**-0.5), size**-0.5)


def bands(taps: Tensor, rows: int) -> Tensor:
    """(C, rows, rows + S − 1) of taps (C, S): row i holds the taps, last one first, from column i on."""
    size = taps.shape[1]
    width = rows + size - 1
    row = pad(taps.flip(1), (0, width + 1 - size))
    # each row of a matrix one column narrower starts one place later
    return row[:, None].expand(-1, rows, -1).flatten(1)[:, : rows * width].unflatten(1, (rows, width))


def filter_causally(x: Tensor, taps: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """y_t = Σ_j taps_j x_{t−j} for taps (C, S), with the S − 1 positions before x (B, S − 1, C), and the same after x."""
    batch, time, channels = x.shape
    chunk, before = min(CHUNK, time), past.shape[1]
    row = torch.cat((past, x), 1)
    if before < FEW:
        y = taps[:, 0] * x
        for back in range(1, before + 1):
            y = torch.addcmul(y, taps[:, back], row[:, before - back : before - back + time])
        return y, row[:, time:]
    windows = pad(row, (0, 0, 0, -time % chunk)).unfold(1, before + chunk, chunk)  # (B, n, C, S − 1 + chunk)
    y = windows.permute(2, 0, 1, 3).flatten(1, 2) @ bands(taps, chunk).mT  # (C, B n, chunk)
    return y.view(channels, batch, -1)[..., :time].permute(1, 2, 0), row[:, time:]


class ShiftSSM(Recurrence):
    """y_t = Σ_{j < state} taps_j x_{t−j} + skip · x_t: the state space that shifts (H3, Fu et al. 2023) is a learned filter.

    The state is the last `state` − 1 inputs. The taps start as `start` draws them: N(0, 1) by default.
    """

    def __init__(self, width: int, state: int, start: Callable[[int, int], Tensor] = torch.randn) -> None:
        super().__init__()
        self.taps = nn.Parameter(start(width, state))
        self.skip = nn.Parameter(torch.randn(width))

    def step(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        x = x.to(self.skip.dtype)
        seen = torch.cat((self._window(x, past), x[:, None]), 1)  # (B, S, C), the newest last
        return torch.einsum("bsc,cs->bc", seen, self.taps.flip(1)) + self.skip * x, (seen[:, 1:],)

    def advance(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        x = x.to(self.skip.dtype)
        y, window = filter_causally(x, self.taps, self._window(x, past))
        return y + self.skip * x, (window,)

    def _window(self, x: Tensor, past: tuple[Tensor] | None) -> Tensor:
        return x.new_zeros(len(x), self.taps.shape[1] - 1, x.shape[-1]) if past is None else past[0]


Start = Callable[[int], tuple[Tensor, Tensor]]
Discretisation = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def start_linear(pairs: int) -> tuple[Tensor, Tensor]:
    """Frequencies πn (S4D-Lin), and what the readout is multiplied by at the start: 1."""
    return math.pi * torch.arange(pairs), torch.ones(pairs)


def start_inverse(pairs: int) -> tuple[Tensor, Tensor]:
    """Frequencies (N/π)(N/(2n + 1) − 1) with N = 2 · pairs (S4D-Inv), and what the readout is multiplied by at the start: b.

    b is complex normal, divided by √(2 Σ_n |b_n / a_n|²) with a = −1/2 + i · frequency. The answer to a constant input then has
    a variance of 1. This is the start of S4D in the code that RegBench's grew from.
    """
    size = 2 * pairs
    frequency = size / math.pi * (size / (2 * torch.arange(pairs) + 1) - 1)
    b = torch.complex(torch.randn(pairs), torch.randn(pairs))
    energy = 2 * (b.abs() ** 2 / (0.25 + frequency**2)).sum()
    return frequency, b / energy.sqrt()


def hold(rate: Tensor, frequency: Tensor, step: Tensor, readout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Real and imaginary parts of log ā and of w, by zero-order hold: ā = exp(Δ a) and w = c (ā − 1) / a."""
    decay, angle = -step * rate, step * frequency
    # ā − 1: near 1 the difference would lose its bits
    e, e_i = torch.expm1(decay) * torch.cos(angle) - 2 * torch.sin(angle / 2) ** 2, torch.exp(decay) * torch.sin(angle)
    c, c_i = readout.unbind(-1)
    grown, grown_i = c * e - c_i * e_i, c * e_i + c_i * e
    size = rate**2 + frequency**2
    return decay, angle, (frequency * grown_i - rate * grown) / size, -(frequency * grown + rate * grown_i) / size


def bilinear(rate: Tensor, frequency: Tensor, step: Tensor, readout: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same by the bilinear rule: ā = (1 + z) / (1 − z) and w = c Δ / (1 − z) with z = Δ a / 2.

    |ā|² = 1 + 4 Re z / |1 − z|², and the angle of ā is that of 1 − |z|² + 2i Im z.
    """
    z, z_i = -step * rate / 2, step * frequency / 2
    size = (1 - z) ** 2 + z_i**2
    # ā = 0 has no logarithm
    decay = torch.log1p((4 * z / size).clamp_min(torch.finfo(z.dtype).eps - 1)) / 2
    angle = torch.atan2(2 * z_i, 1 - z**2 - z_i**2)
    c, c_i = readout.unbind(-1)
    return decay, angle, step * (c * (1 - z) - c_i * z_i) / size, step * (c * z_i + c_i * (1 - z)) / size


class DiagonalSSM(Recurrence):
    """y_t = 2 Re Σ_n w_n h_t,n + skip · x_t with h_t = ā h_{t−1} + x_t, each channel on its own (S4D, Gu et al. 2022).

    ā and w come from h' = a h + x and the readout c by `discretise`: `hold` or `bilinear`. a = −rate + i · frequency starts as
    −1/2 + iπn (S4D-Lin) for n < state / 2, or with the frequencies of another `start`; the other half are the conjugates.
    c starts as complex normal times what `start` says. All channels may share one a, but each has its own Δ and c.
    What must not decay in training, a and Δ, is stored flat. `state` is even; what is kept is h, (B, C, state / 2) complex.
    """

    SSM: tuple[str, ...] = ("log_step", "log_rate", "frequency")

    def __init__(
        self, width: int, state: int, *, start: Start = start_linear, shared: bool = False, discretise: Discretisation = hold
    ) -> None:
        super().__init__()
        self.discretise = discretise
        pairs, copies = state // 2, 1 if shared else width
        self.log_step = nn.Parameter(draw_steps(width).log())
        frequency, gain = start(pairs)
        self.log_rate = nn.Parameter(torch.full((copies * pairs,), math.log(0.5)))
        self.frequency = nn.Parameter(frequency.repeat(copies))
        c = torch.view_as_complex(torch.randn(width, pairs, 2) * 0.5**0.5)
        self.readout = nn.Parameter(torch.view_as_real(c * gain))
        self.skip = nn.Parameter(torch.randn(width))

    def step(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        x = x.to(self.skip.dtype)
        rate, angle, *weight = self._discretise()
        state = torch.polar(rate.exp(), angle) * (0.0 if past is None else past[0]) + x[..., None]
        return 2 * (torch.complex(*weight) * state).real.sum(-1) + self.skip * x, (state,)

    def advance(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        """Three products for each chunk: what its inputs leave at its end, what they answer, what was left before answers.

        In real numbers, which a compiler can fuse: a row holds N real parts and then N imaginary ones.
        """
        x = x.to(self.skip.dtype)
        batch, time, width = x.shape
        chunk = min(CHUNK, time)
        rate, angle, w, w_i = (part[..., None] for part in self._discretise())
        ages = torch.arange(chunk + 1, device=x.device)
        left = torch.exp(rate * ages)  # of a state so much later, (C, N, chunk + 1)
        p, p_i = left * torch.cos(angle * ages), left * torch.sin(angle * ages)
        chunks = pad(x, (0, 0, 0, -time % chunk)).unflatten(1, (-1, chunk)).permute(3, 0, 1, 2)  # (C, B, n, chunk)
        flat = chunks.flatten(1, 2)

        fading = torch.cat((p, p_i), 1)[..., :-1].flip(-1).mT  # (C, chunk, 2 N)
        ends = (flat @ fading).unflatten(1, (batch, -1)).unflatten(-1, (2, -1))  # (C, B, n, 2, N)
        state = x.new_zeros(batch, *self.readout.shape) if past is None else torch.view_as_real(past[0])
        h, h_i = state.transpose(0, 1).unbind(-1)  # (C, B, N)
        entering = [(h, h_i)]
        for end in ends.unbind(2)[:-1]:
            h, h_i = _advance_state(h, h_i, p[:, None, :, -1], p_i[:, None, :, -1], end)
            entering.append((h, h_i))
        before = torch.cat([torch.stack(part, 2) for part in zip(*entering, strict=True)], -1).flatten(1, 2)  # (C, B n, 2 N)

        answers = 2 * torch.cat((w * p - w_i * p_i, -w * p_i - w_i * p), 1)  # (C, 2 N, chunk + 1)
        kernel = answers[:, : w.shape[1], :-1].sum(1)
        inside = flat @ bands(kernel, chunk)[..., chunk - 1 :].mT
        y = torch.baddbmm(inside, before, answers[..., 1:])
        y = y.view(width, batch, -1)[..., :time].permute(1, 2, 0) + self.skip * x

        rest = time - (len(entering) - 1) * chunk  # the last chunk may be short
        last = (chunks[:, :, -1, :rest] @ fading[:, chunk - rest :]).unflatten(-1, (2, -1))
        h, h_i = _advance_state(h, h_i, p[:, None, :, rest], p_i[:, None, :, rest], last)
        return y, (torch.complex(h, h_i).transpose(0, 1),)

    def _discretise(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Real and imaginary parts of log ā and of w, each (C, N)."""
        pairs = self.readout.shape[1]
        rate, frequency = self.log_rate.exp().view(-1, pairs), self.frequency.view(-1, pairs)  # (C, N), or (1, N) if shared
        return self.discretise(rate, frequency, self.log_step.exp()[:, None], self.readout)


def _advance_state(h: Tensor, h_i: Tensor, p: Tensor, p_i: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """p h + end in complex numbers, of real and imaginary parts; end is (…, 2, N)."""
    new, new_i = end.unbind(-2)
    return torch.addcmul(new + p * h, p_i, h_i, value=-1), torch.addcmul(new_i + p * h_i, p_i, h)
