"""The selective scan of Mamba as an operator of torch.library: h_t = exp(Δ_t a) h_{t−1} + b_t u_t, and y_t = c_t · h_t.

Time is cut into chunks and the i-th positions of all chunks advance together, so that a loop takes CHUNK turns for each slice
of the batch, whatever the length; what crosses from chunk to chunk is a second loop, over chunks. A slice is as many rows as
SLICE has room for, one at least. Every factor is a decay of at most 1: nothing is divided. The backward pass makes the states
again from those that enter chunks, which alone are kept; on a CPU nothing of size T × N × E outlives a slice. On a GPU each
pass is one kernel instead, fused/selective_scan.py, with chunks of its own.

Shapes: B batch, T time, E channels, N states; K chunks in a slice, of L positions. u and Δ are (B, T, E), b and c (B, T, N),
rates a (N, E), states (B, N, E).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn.functional import pad

from compactattn.fused.launch import HAVE_TRITON, is_new

CHUNK = 32
SLICE = {"cpu": 2**22, "cuda": 2**27}  # states that are stored at a time: on a CPU, what its cache holds
MOST_FUSED_STATES = 64  # of a channel
LOG2_E = 1.4426950408889634


def selective_scan(u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """y (B, T, E) and the state after it, in fp32 (fp64 for fp64)."""
    work = torch.promote_types(torch.promote_types(u.dtype, rates.dtype), torch.float32)
    y, last, _ = _scan(*(x.to(work) for x in (u, step, rates, b, c, state)))
    return y, last


def fused(u: Tensor, rates: Tensor) -> bool:
    """Whether kernels of Triton do the work."""
    if not (HAVE_TRITON and u.is_cuda and u.dtype == torch.float32 and len(rates) <= MOST_FUSED_STATES):
        return False
    return is_new(u.device.index or 0)


class _Slice(NamedTuple):
    """Some rows of a batch, cut into chunks."""

    rows: slice
    u: Tensor  # (L, K, 1, E)
    step: Tensor  # (L, K, 1, E)
    b: Tensor  # (L, K, N, 1)
    c: Tensor  # (L, K, N, 1)
    rates: Tensor  # (N, E), for powers of 2
    store: Tensor  # (number, L, K, N, E): room for what the slice stores, used again by the next

    def decay(self, at: int, out: Tensor) -> Tensor:
        """exp(Δ a) of the positions `at` of all chunks."""
        return torch.mul(self.step[at], self.rates, out=out).exp2_()  # measured: 2.6 times as fast as exp

    def zeros(self) -> Tensor:
        """(K, N, E)."""
        return self.u.new_zeros(self.u.shape[1], *self.rates.shape)

    def whole_decay(self, batch: int) -> Tensor:
        """(B, n, N, E): what a chunk leaves of the state that enters it."""
        return (self.step.sum(0) * self.rates).exp2_().unflatten(0, (batch, -1))


def _cut(x: Tensor, chunk: int) -> Tensor:
    """(L, K, X) of (B, T, X): a position that is padded neither decays nor adds."""
    chunks = pad(x, (0, 0, 0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk))
    return chunks.permute(2, 0, 1, 3).flatten(1, 2).contiguous()


def _join(x: Tensor, batch: int, time: int) -> Tensor:
    """(B, T, X) of (L, K, X)."""
    return x.unflatten(1, (batch, -1)).permute(1, 2, 0, 3).flatten(1, 2)[:, :time]


def _slices(number: int, u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor) -> Iterator[_Slice]:
    """Slices with room for so many numbers for each state and position."""
    batch, time, _ = u.shape
    chunk = min(CHUNK, time)
    size = max(1, SLICE.get(u.device.type, 2**22) // (rates.numel() * time))
    size = min(size, batch)
    store = u.new_empty(number, chunk, size * -(-time // chunk), *rates.shape)
    for start in range(0, batch, size):
        rows = slice(start, min(start + size, batch))
        u_, step_, b_, c_ = (_cut(x[rows], chunk) for x in (u, step, b, c))
        room = store[:, :, : u_.shape[1]]
        yield _Slice(rows, u_[:, :, None], step_[:, :, None], b_[..., None], c_[..., None], rates * LOG2_E, room)


@custom_op("compactattn::selective_scan", mutates_args=())
def _scan(u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states (B, n, N, E) that enter chunks."""
    if fused(u, rates):
        from compactattn.fused import selective_scan as kernels

        return kernels.scan(u, step, rates, b, c, state)
    time, answers, last, entering = u.shape[1], [], torch.empty_like(state), []
    for part in _slices(1, u, step, rates, b, c):
        (decays,), h = part.store, part.zeros()
        for at in range(len(decays)):
            h.mul_(part.decay(at, decays[at])).addcmul_(part.u[at], part.b[at])
        carried = [state[part.rows]]
        whole, ends = (x.unbind(1) for x in (part.whole_decay(len(carried[0])), h.unflatten(0, (len(carried[0]), -1))))
        for decay, end in zip(whole, ends, strict=True):
            carried.append(torch.addcmul(end, decay, carried[-1]))
        last[part.rows] = carried.pop()
        entering.append(torch.stack(carried, 1))

        h, y = entering[-1].flatten(0, 1).clone(), torch.empty_like(part.u)
        for at in range(len(decays)):
            h.mul_(decays[at]).addcmul_(part.u[at], part.b[at])
            torch.bmm(part.c[at].mT, h, out=y[at])
        answers.append(_join(y[:, :, 0], len(carried[0]), time))
    return torch.cat(answers), last, torch.cat(entering)


@_scan.register_fake
def _(u, step, rates, b, c, state):  # type: ignore[no-untyped-def]
    batch, time, _ = u.shape
    chunk = min(CHUNK, time)
    if fused(u, rates):
        from compactattn.fused import selective_scan as kernels

        chunk = kernels.CHUNK
    return torch.empty_like(u), torch.empty_like(state), state.new_empty(batch, -(-time // chunk), *rates.shape)


@custom_op("compactattn::selective_scan_backward", mutates_args=())
def _scan_backward(
    dy: Tensor, dlast: Tensor, entering: Tensor, u: Tensor, step: Tensor, rates: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of u, Δ, a, b, c and the state: g_t = c_t dy_t + exp(Δ_{t+1} a) g_{t+1}, from the last position on."""
    if fused(u, rates):
        from compactattn.fused import selective_scan as kernels

        return kernels.scan_gradient(dy, dlast, entering, u, step, rates, b, c)
    time, drates, dstate = u.shape[1], torch.zeros_like(rates), torch.empty_like(dlast)
    gathered: list[list[Tensor]] = [[], [], [], []]
    for part in _slices(2, u, step, rates, b, c):
        dy_ = _cut(dy[part.rows], len(part.u))[:, :, None]  # (L, K, 1, E)
        decays, kept, dc = _states_again(part, entering[part.rows].flatten(0, 1), dy_)
        leaving, dstate[part.rows] = _carry_back(part, decays, dy_, dlast[part.rows])
        pulled, by_rates = _pull_back(part, rates, decays, kept, leaving, dy_)
        drates += by_rates
        for own, x in zip(gathered, (*pulled, dc), strict=True):
            own.append(_join(x, len(dstate[part.rows]), time))
    du, dstep, db, dc = (torch.cat(own) for own in gathered)
    return du, dstep, drates, db, dc, dstate


def _states_again(part: _Slice, h: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Decays (L, K, N, E), what they keep of the state before, and the gradient (L, K, N) of c."""
    (decays, kept), dc = part.store, torch.empty_like(part.c)
    for at in range(len(decays)):
        torch.mul(part.decay(at, decays[at]), h, out=kept[at])
        h = torch.addcmul(kept[at], part.u[at], part.b[at])
        torch.bmm(h, dy[at].mT, out=dc[at])
    return decays, kept, dc[..., 0]


def _carry_back(part: _Slice, decays: Tensor, dy: Tensor, dlast: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (K, N, E) of the states that leave chunks, and that (B, N, E) of the state before all."""
    g = part.zeros()
    for at in reversed(range(len(decays))):
        g.addcmul_(part.c[at], dy[at]).mul_(decays[at])
    carried = [dlast]
    whole, begins = (x.unbind(1) for x in (part.whole_decay(len(dlast)), g.unflatten(0, (len(dlast), -1))))
    for decay, begin in zip(reversed(whole), reversed(begins), strict=True):
        carried.append(torch.addcmul(begin, decay, carried[-1]))
    before = carried.pop()
    return torch.stack(carried[::-1], 1).flatten(0, 1), before


def _pull_back(
    part: _Slice, rates: Tensor, decays: Tensor, kept: Tensor, g: Tensor, dy: Tensor
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Gradients of u, Δ (L, K, E) and b (L, K, N), and that of a (N, E), from the gradients of the states that leave chunks."""
    du, dstep, db, by_rates = (
        torch.empty_like(part.u),
        torch.empty_like(part.step),
        torch.empty_like(part.b),
        torch.zeros_like(g),
    )
    scratch = torch.empty_like(g)
    for at in reversed(range(len(decays))):
        g.addcmul_(part.c[at], dy[at])
        torch.bmm(part.b[at].mT, g, out=du[at])
        torch.bmm(g, part.u[at].mT, out=db[at])
        dexponent = kept[at].mul_(g)
        by_rates.addcmul_(dexponent, part.step[at])
        torch.sum(torch.mul(dexponent, rates, out=scratch), 1, keepdim=True, out=dstep[at])
        g.mul_(decays[at])
    return (du[:, :, 0], dstep[:, :, 0], db[..., 0]), by_rates.sum(0)


@_scan_backward.register_fake
def _(dy, dlast, entering, u, step, rates, b, c):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(x) for x in (u, step, rates, b, c, dlast))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)  # nobody asks for the gradient of the states that enter chunks: zeros would be as large
    ctx.save_for_backward(output[2], *inputs[:5])


def _pull(ctx: Any, dy: Tensor | None, dlast: Tensor | None, _: None) -> tuple[Tensor, ...]:
    entering, u, *_ = ctx.saved_tensors
    dy = torch.zeros_like(u) if dy is None else dy.contiguous()
    dlast = torch.zeros_like(entering[:, 0]) if dlast is None else dlast.contiguous()
    return _scan_backward(dy, dlast, *ctx.saved_tensors)


_scan.register_autograd(_pull, setup_context=_save)
