"""The definition, second half: weights → estimate, a block of scores at a time, forward and backward.

Memory is O(block × K), never O(Q × K).

Shapes: B batch, H heads (H' of keys), Q queries, K keys, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor

from compactattn.dropout import Dropout, Fates, factors, foresee
from compactattn.kernels import Rule
from compactattn.masks import View
from compactattn.rows import Order, accumulator, block_size, pull, weigh

QUERIES = 64  # in a block, where batch and heads fill it


@dataclass(frozen=True)
class Block:
    """A set of scores small enough to hold: samples × heads × queries, against keys."""

    b: slice
    h: slice
    q: slice
    k: slice

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.b, self.h, self.q]

    def of_keys(self, x: Tensor, group: int) -> Tensor:
        """(b, h, k, D): the keys or values of each query head."""
        if group == 1:
            return x[self.b, self.h, self.k]
        heads = torch.arange(self.h.start, self.h.stop, device=x.device) // group
        return x[self.b, heads, self.k]

    @overload
    def of_heads(self, x: Tensor) -> Tensor: ...
    @overload
    def of_heads(self, x: Order) -> Order: ...
    def of_heads(self, x: Order) -> Order:
        """(h, 1, 1) of an (H,) tensor; a number is the same for every head."""
        return x[self.h, None, None] if isinstance(x, Tensor) else x

    def of_scores(self, x: Tensor) -> Tensor:
        """The part of a tensor that broadcasts to (B, H, Q, K)."""
        spans = zip((self.b, self.h, self.q, self.k), x.shape, strict=True)
        return x[tuple(slice(0, 1) if size == 1 else span for span, size in spans)]

    def factors(self, fates: Fates | None, dtype: torch.dtype) -> Tensor | None:
        """What dropout multiplies the weights of the block by."""
        return None if fates is None else factors(fates, self.b, self.h, self.q, self.k, dtype)

    def of_rows(self, x: Tensor) -> Tensor:
        """(b, 1, q, 1) of a (1 | B, Q) tensor."""
        return (x if len(x) == 1 else x[self.b])[:, None, self.q, None]


def blocks(view: View) -> Iterator[Block]:
    """Cuts the scores into blocks of about `block_size` numbers, each over the keys that its queries can see."""
    batch, heads, queries, keys = view.shape
    room = block_size(view.at.device) // max(keys, 1)  # rows
    # of few queries at a time, since no key is looked at that none of them sees; of all, if nothing else fills a block
    q_step = max(1, min(queries, room, max(QUERIES, room // max(batch * heads, 1))))
    h_step = max(1, min(heads, room // q_step))
    b_step = max(1, min(batch, room // (h_step * q_step))) if h_step >= heads else 1
    for b, q in ((b, q) for b in range(0, batch, b_step) for q in range(0, queries, q_step)):
        span_b, span_q = slice(b, min(b + b_step, batch)), slice(q, min(q + q_step, queries))
        first, last = _span(view, span_b, span_q)
        for h in range(0, heads, h_step):
            yield Block(span_b, slice(h, min(h + h_step, heads)), span_q, slice(first, last))


def _span(view: View, b: slice, q: slice) -> tuple[int, int]:
    """The first and last + 1 key that any of these queries can see; (0, 0) if there is none."""
    lo, hi = ((x if len(x) == 1 else x[b])[:, q] for x in (view.lo, view.hi))
    some = lo < hi
    if not bool(some.any()):
        return 0, 0
    keys = view.shape[3]
    return int(torch.where(some, lo, keys).min()), int(torch.where(some, hi, 0).max())


def score(q: Tensor, k: Tensor, scale: Tensor, view: View, block: Block) -> Tensor:
    """s = scale · q·k + bias − slope · |distance|, with −inf at illegal keys. q, k are already of the block."""
    s = (q @ k.mT).mul_(block.of_heads(scale))
    position = torch.arange(block.k.start, block.k.stop, device=s.device)
    if view.bias is not None:
        s = s.add_(block.of_scores(view.bias))
    if view.slopes is not None:
        s = s - block.of_heads(view.slopes).to(s.dtype) * (block.of_rows(view.at) - position).abs()
    lo, hi = block.of_rows(view.lo), block.of_rows(view.hi)
    if int(lo.max()) > block.k.start:
        s.masked_fill_(position < lo, -math.inf)
    seen = max(int(hi.min()) - block.k.start, 0)  # keys before the first that some query may not see
    if seen < s.shape[-1]:
        s[..., seen:].masked_fill_(position[seen:] >= hi, -math.inf)
    if view.allowed is not None:
        s = s.masked_fill_(~block.of_scores(view.allowed), -math.inf)
    return s


class Estimate(NamedTuple):
    """What one pass over the blocks returns."""

    out: Tensor  # (B, H, Q, Dv)
    threshold: Tensor  # (B, H, Q) θ
    support: Tensor  # (B, H, Q) keys with a non-zero weight


def estimate(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, rule: Rule, r: Order, readout: bool,
    drop: Dropout | None = None, grad: bool = False,
) -> tuple[Estimate, Tensor]:  # fmt: skip
    """Nadaraya-Watson estimate of the values at each query (paper Eq. 2): o = Σ_i w_i v_i.

    For `grad`, also the reach of each row (B, H, Q), which `estimate_backward` need not search for again.
    """
    group = q.shape[1] // k.shape[1]
    work = accumulator(q.dtype)
    out = q.new_zeros((*q.shape[:3], v.shape[3]))
    rows = q.shape[:3] if readout else (0, 0, 0)
    threshold = q.new_full(rows, math.inf, dtype=work)
    support = q.new_zeros(rows, dtype=torch.int32)
    reach = q.new_empty(q.shape[:3] if grad else (0, 0, 0), dtype=work)
    clean, spoilt = _finite(v), _spoilt(v)
    fates = None if drop is None else foresee(drop, *q.shape[:3])
    for block in blocks(view):
        qb, kb = block.of_queries(q).to(work), block.of_keys(k, group).to(work)
        w, row = weigh(score(qb, kb, scale, view, block), rule, block.of_heads(r), block.of_heads(scale))
        if readout:
            empty = row.peak == -math.inf
            block.of_queries(threshold).copy_(torch.where(empty, math.inf, row.peak - row.reach)[..., 0])
            block.of_queries(support).copy_((w > 0).sum(-1))
        if grad:
            block.of_queries(reach).copy_(row.reach[..., 0])
        w = _thin(w, block.factors(fates, work), out=w)
        part = w @ block.of_keys(clean, group).to(work)
        if spoilt is not None:
            part = part.masked_fill(w @ block.of_keys(spoilt, group).to(work) > 0, math.nan)
        block.of_queries(out).copy_(part)
    return Estimate(out, threshold, support), reach


class Gradients(NamedTuple):
    """Gradients of a scalar loss with respect to every input of `estimate`."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor  # (H,)
    bias: Tensor | None
    r: Tensor | None  # (H,)


def estimate_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, rule: Rule, r: Order, bias_grad: bool,
    drop: Dropout | None = None, reach: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of `estimate`, one block of recomputed weights at a time, from the reach that it found."""
    batch, heads, _, _ = view.shape
    group = heads // k.shape[1]
    work = accumulator(q.dtype)
    dq = q.new_zeros(q.shape, dtype=work)
    dk = q.new_zeros((batch, heads, *k.shape[2:]), dtype=work)
    dv = q.new_zeros((batch, heads, *v.shape[2:]), dtype=work)
    dscale, dr = (scale.new_zeros(heads) for _ in range(2))
    dbias = torch.zeros_like(view.bias, dtype=work) if bias_grad and view.bias is not None else None
    clean_q, clean_k, clean_v = (_finite(x) for x in (q, k, v))
    fates = None if drop is None else foresee(drop, *q.shape[:3])
    for block in blocks(view):
        factor, order = block.of_heads(scale), block.of_heads(r)
        qb, kb = block.of_queries(q).to(work), block.of_keys(k, group).to(work)
        start = None if reach is None else block.of_queries(reach)[..., None]
        w, row = weigh(score(qb, kb, scale, view, block), rule, order, factor, start)
        qb, dob = (block.of_queries(x).to(work) for x in (clean_q, do))
        kb, vb = (block.of_keys(x, group).to(work) for x in (clean_k, clean_v))
        kept = block.factors(fates, work)
        dv[block.b, block.h, block.k] += _thin(w, kept).mT @ dob
        dw = dob @ vb.mT
        ds, dperfect, dorder = pull(w, _thin(dw, kept, out=dw), row.norm, row.edge, rule, order)
        if dbias is not None:
            part = block.of_scores(dbias)
            part += ds.sum_to_size(part.shape)
        block.of_queries(dq).copy_(ds @ kb)
        dk[block.b, block.h, block.k] += (ds.mT @ qb).mul_(factor)
        dscale[block.h] += (block.of_queries(dq) * qb).sum((0, 2, 3))
        if dperfect is not None:
            dscale[block.h] += dperfect.sum((0, 2, 3))
        if dorder is not None:
            dr[block.h] += dorder.sum((0, 2, 3))
    dq.mul_(scale[:, None, None])
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) if group > 1 else x for x in (dk, dv))
    return Gradients(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dscale, dbias, dr if isinstance(r, Tensor) else None)


def _thin(x: Tensor, kept: Tensor | None, out: Tensor | None = None) -> Tensor:
    """The weights after dropout, or what they receive through it."""
    return x if kept is None else torch.mul(x, kept, out=out)


def _finite(x: Tensor) -> Tensor:
    """x with zeros for what is not finite, so that a weight of 0 silences it: 0 · NaN would be NaN."""
    return x if bool(x.isfinite().all()) else x.nan_to_num(0.0, 0.0, 0.0)


def _spoilt(v: Tensor) -> Tensor | None:
    """(B, H', K, 1) ones where a value is not finite; None if all are."""
    finite = v.isfinite().all(-1, keepdim=True)
    return None if bool(finite.all()) else (~finite).to(v.dtype)
