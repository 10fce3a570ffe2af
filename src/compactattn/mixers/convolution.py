"""Causal convolutions with a state: short learned filters, and the diagonal state space that S4D and H3 share.

Time is cut into chunks and every chunk is a product with a banded matrix, so that no answer sees the future, not even in its
last bits, as it would through a Fourier transform. Shapes: (B, T, C) with B batch, T time, C channels.
"""

from __future__ import annotations

import math

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

    The state is the last `state` − 1 inputs.
    """

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(width, state))
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


class DiagonalSSM(Recurrence):
    """y_t = 2 Re Σ_n w_n h_t,n + skip · x_t with h_t = ā h_{t−1} + x_t, each channel on its own (S4D, Gu et al. 2022).

    ā = exp(Δ a) and w = c (ā − 1) / a: the zero-order hold of h' = a h + x. a = −rate + i · frequency starts as −1/2 + iπn
    (S4D-Lin) for n < state / 2; the other half are the conjugates. What must not decay in training, a and Δ, is stored flat.
    The state is h, (B, C, state / 2) complex.
    """

    def __init__(self, width: int, state: int) -> None:
        super().__init__()
        if state < 2 or state % 2:
            raise ValueError(f"state {state} does not divide into pairs of conjugates; choose an even number from 2 on")
        self.width, pairs = width, state // 2
        self.log_step = nn.Parameter(draw_steps(width).log())
        self.log_rate = nn.Parameter(torch.full((width * pairs,), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(pairs).repeat(width))
        self.readout = nn.Parameter(torch.randn(width, pairs, 2) * 0.5**0.5)  # c: real and imaginary part
        self.skip = nn.Parameter(torch.randn(width))

    def step(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        x = x.to(self.skip.dtype)
        exponent, weight = self._discretise()
        state = exponent.exp() * self._state(x, past) + x[..., None]
        return 2 * (weight * state).real.sum(-1) + self.skip * x, (state,)

    def advance(self, x: Tensor, past: tuple[Tensor] | None) -> tuple[Tensor, tuple[Tensor]]:
        """Three products for each chunk: what its inputs leave at its end, what they answer, what was left before answers."""
        x = x.to(self.skip.dtype)
        batch, time, width = x.shape
        chunk = min(CHUNK, time)
        exponent, weight = self._discretise()
        powers = torch.exp(exponent[..., None] * torch.arange(chunk + 1, device=x.device))  # (C, N, chunk + 1)
        chunks = pad(x, (0, 0, 0, -time % chunk)).unflatten(1, (-1, chunk)).permute(3, 0, 1, 2)  # (C, B, n, chunk)
        flat = chunks.flatten(1, 2)

        fading = torch.view_as_real(powers[..., :-1].flip(-1).mT).flatten(2)  # (C, chunk, 2 N)
        ends = torch.view_as_complex((flat @ fading).unflatten(-1, (-1, 2))).unflatten(1, (batch, -1))
        entering = [self._state(x, past).transpose(0, 1)]  # (C, B, N) each
        for end in ends.unbind(2)[:-1]:
            entering.append(powers[:, None, :, -1] * entering[-1] + end)

        answers = 2 * torch.view_as_real((weight[..., None] * powers[..., 1:]).conj().resolve_conj())  # (C, N, chunk, 2)
        before = torch.view_as_real(torch.stack(entering, 2)).flatten(-2).flatten(1, 2)  # (C, B n, 2 N)
        kernel = 2 * (weight[..., None] * powers[..., :-1]).real.sum(1)
        inside = flat @ bands(kernel, chunk)[..., chunk - 1 :].mT
        y = torch.baddbmm(inside, before, answers.transpose(2, 3).flatten(1, 2))
        y = y.view(width, batch, -1)[..., :time].permute(1, 2, 0) + self.skip * x

        rest = time - (len(entering) - 1) * chunk  # the last chunk may be short
        last = torch.view_as_complex((chunks[:, :, -1, :rest] @ fading[:, chunk - rest :]).unflatten(-1, (-1, 2)))
        return y, ((powers[:, None, :, rest] * entering[-1] + last).transpose(0, 1),)

    def _discretise(self) -> tuple[Tensor, Tensor]:
        """Δ a and w, each (C, N)."""
        a = torch.complex(-self.log_rate.exp(), self.frequency).view(self.width, -1)
        exponent = self.log_step.exp()[:, None] * a
        return exponent, torch.view_as_complex(self.readout) * torch.expm1(exponent) / a

    def _state(self, x: Tensor, past: tuple[Tensor] | None) -> Tensor:
        return torch.zeros_like(torch.view_as_complex(self.readout)).repeat(len(x), 1, 1) if past is None else past[0]
