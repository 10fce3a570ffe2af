"""One query, or a few, against a long cache: `decode`, and `Pages` that tell which keys need not be read.

Shapes: B batch, H heads (H' of keys), Q queries, K keys, P pages, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor
from torch.library import custom_op

from compactattn import attention, operators, reference
from compactattn.derivatives import refuse_tangents
from compactattn.fused import decode_launch
from compactattn.fused.decode_launch import MOST_FP32_ROWS, MOST_ROWS, PAGE, Bounds
from compactattn.kernels import Fixed, Kernel, Nearest, Rule, encode, values_are_free
from compactattn.masks import Causal, Mask, MaskLike, Packed, View, as_mask, read_lengths, resolve, sketch
from compactattn.reference import Block
from compactattn.rows import Order, accumulator, weigh

SEEDS = 8  # pages of each query that the reference reads before it judges the others
NOT_NATIVE = "decode reads a cache once, and attend.c would copy it first"

Lengths = Tensor | Sequence[int]


@dataclass(frozen=True, eq=False, repr=False)
class Pages:
    """Elementwise least and largest keys of each page of 64, kept beside a cache of keys.

    q·k ≤ Σ max(q low, q high) bounds the scores of a page without reading it. Append every key that enters the cache, in
    order: what was not appended is always read. After `filled.clamp_max_(n)` the keys from n on may be replaced by others;
    their bounds then hold for both, wide but true. `append` works in place and never waits for a GPU.
    """

    low: Tensor  # (B, H', P, D)
    high: Tensor  # (B, H', P, D)
    filled: Tensor  # (B,) keys added so far

    def __repr__(self) -> str:
        return f"Pages(low={sketch(self.low)}, high={sketch(self.high)}, filled={sketch(self.filled)})"

    @staticmethod
    def of(k: Tensor, lengths: Lengths | None = None) -> Pages:
        """Pages of a cache (B, H', K, D) that holds `lengths[b]` keys of sample b; by default it is full."""
        _check_cache(k)
        batch, _, keys, _ = k.shape
        lengths = [keys] * batch if lengths is None else lengths
        _, hi = _stand(lengths, resolve(None, (batch, 1, 1, keys), k.device), "Pages")
        filled = hi[:, 0].expand(batch).to(torch.int32).clone(memory_format=torch.contiguous_format)
        there = (torch.arange(keys, device=k.device) < filled[:, None])[:, None, :, None]
        room = (0, 0, 0, -keys % PAGE)
        ends = (torch.nn.functional.pad(torch.where(there, k, e), room, value=e) for e in (math.inf, -math.inf))
        low, high = (x.unflatten(2, (-1, PAGE)) for x in ends)
        return Pages(low.amin(3), high.amax(3), filled)

    def append(self, keys: Tensor) -> None:
        """Adds the next keys (B, H', n, D) of every sample."""
        batch, heads, pages, dim = self.low.shape
        if keys.ndim != 4 or (*keys.shape[:2], keys.shape[3]) != (batch, heads, dim) or keys.dtype != self.low.dtype:
            raise ValueError(
                f"keys must be ({batch}, {heads}, n, {dim}) in {self.low.dtype}, got {tuple(keys.shape)} in {keys.dtype}"
            )
        n = keys.shape[2]
        if values_are_free(self.filled) and bool((self.filled + n > pages * PAGE).any()):
            raise ValueError(f"{n} more keys do not fit: there is room for {pages * PAGE}, and {self.filled.tolist()} are in")
        page = (self.filled[:, None] + torch.arange(n, device=keys.device)) // PAGE
        page = page[:, None, :, None].expand_as(keys).long()
        self.low.scatter_reduce_(2, page, keys, "amin")
        self.high.scatter_reduce_(2, page, keys, "amax")
        self.filled.add_(n)


@dataclass(frozen=True, eq=False, repr=False)
class Filled(Mask):
    """Sample b holds `lengths[b]` keys, and its last query stands at the last of them."""

    lengths: Lengths

    def narrow(self, view: View) -> View:
        at, hi = _stand(self.lengths, view, "decode")
        return replace(view, at=at, hi=hi)


@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | str = ..., *, lengths: Lengths | None = None,
    scale: float | Tensor | None = None, mask: MaskLike = None, backend: str = "auto", pages: None = None,
) -> Tensor: ...  # fmt: skip
@overload
def decode(
    q: Tensor, k: Tensor, v: Tensor, kernel: Kernel | str = ..., *, lengths: Lengths | None = None,
    scale: float | Tensor | None = None, mask: MaskLike = None, backend: str = "auto", pages: Pages,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@torch.no_grad()
def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel | str = "biweight",
    *,
    lengths: Lengths | None = None,
    scale: float | Tensor | None = None,
    mask: MaskLike = None,
    backend: str = "auto",
    pages: Pages | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attend` for a few queries against a cache: K is read once, V only where a weight is not zero. No gradient.

    Equals attend(q, k, v, kernel, scale=scale, mask=mask), where sample b has only its first `lengths[b]` keys and its
    last query stands at the last of them. With `pages`, those are not read whose every key is certain to weigh nothing:
    the threshold of a part of the keys is never above that of all, so a page whose bound is below it is out.

    Args:
        q: queries (B, H, Q, D); at most 64 for each key head, Q · H/H', of which a GPU takes 16 in fp32.
        k, v: the cache (B, H', K, D) and (B, H', K, Dv); beyond `lengths` it may hold anything.
        lengths: (B,) keys of each sample, the newest included; a tensor on the GPU is not waited for.
        pages: bounds on the keys; the result is the same.
        The others are as in `attend`.

    Returns:
        The estimate (B, H, Q, Dv); with `pages`, a pair with the number of pages that were not read, (B, H').
    """
    kernel = attention._kernel(kernel)
    q, k, v = attention._autocast(q, k, v)
    attention._check_tensors(q, k, v)
    batch, heads, queries, dim = q.shape
    crowd = _check_rows(queries * heads // k.shape[1], q.dtype)
    beta = attention._per_head("scale", 1 / math.sqrt(dim) if scale is None else scale, heads, q)
    view = resolve(_join(lengths, mask), (batch, heads, queries, k.shape[2]), q.device)
    refuse_tangents(q, k, v, beta, view.bias, kernel.profile.alpha)
    if pages is not None:
        _check_pages(pages, k, view)
    bounds = None if pages is None else Bounds(pages.low, pages.high, pages.filled)
    if attention._choose(backend, q, crowd or _lacking(view, kernel), NOT_NATIVE) == "fused":
        at_most = (None, None, None) if bounds is None else bounds
        out, skipped = _decode(q, k, v, beta, view.at, view.lo, view.hi, view.slopes, *at_most, *encode(kernel))
        return out if pages is None else (out, skipped)
    orders = attention._orders(kernel, heads, q)
    skipped = q.new_zeros((batch, k.shape[1]), dtype=torch.int32)
    if bounds is not None and q.numel() and k.numel():
        order = kernel.r if orders is None else orders
        wanted, skipped = choose_pages(q, k, beta, view, bounds, kernel.rule, order)
        wanted = wanted.repeat_interleave(PAGE, -1)[..., : k.shape[2]]
        view = replace(view, allowed=wanted if view.allowed is None else view.allowed & wanted)
    out, *_ = operators.attend_operator(
        q, k, v, beta, view.at, view.lo, view.hi, view.allowed, view.bias, view.slopes,
        orders, *encode(kernel), False, False,
    )  # fmt: skip
    return out if pages is None else (out, skipped)


@custom_op("compactattn::decode", mutates_args=())
def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    at: Tensor,
    lo: Tensor,
    hi: Tensor,
    slopes: Tensor | None,
    low: Tensor | None,
    high: Tensor | None,
    filled: Tensor | None,
    r: float,
    rule: str,
    value: float,
) -> tuple[Tensor, Tensor]:
    view = View((*q.shape[:3], k.shape[2]), at, lo, hi, slopes=slopes)
    bounds = None if low is None or high is None or filled is None else Bounds(low, high, filled)
    return decode_launch.decode(q, k, v, scale, view, (r, rule, value), bounds)


@_decode.register_fake
def _(q, k, v, scale, at, lo, hi, slopes, low, high, filled, r, rule, value):  # type: ignore[no-untyped-def]
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(k.shape[:2], dtype=torch.int32)


# -- the definition of what is skipped -----------------------------------------------------------


def choose_pages(
    q: Tensor, k: Tensor, scale: Tensor, view: View, bounds: Bounds, rule: Rule, r: Order
) -> tuple[Tensor, Tensor]:
    """(B, H, 1, P) the pages that must be read for a head, and (B, H') how many of those in sight need not.

    Reads the SEEDS most promising pages of each query, takes the threshold θ of their keys, and then any page whose
    bound exceeds θ. θ never falls as keys are added: with Σ w = 1, below a fixed margin, and for the k nearest.
    """
    batch, heads, queries, keys = view.shape
    group = heads // k.shape[1]
    bound = bound_pages(q, scale, view, bounds)  # (B, H, Q, P)
    seen = bound > -math.inf
    best = bound.topk(min(SEEDS, bound.shape[-1])).indices
    seeds = _of_group(torch.zeros_like(seen).scatter(-1, best, True) & seen, group)
    work = accumulator(q.dtype)
    whole = Block(slice(0, batch), slice(0, heads), slice(0, queries), slice(0, keys))
    s = reference.score(q.to(work), whole.of_keys(k, group).to(work), scale, view, whole)
    s = s.masked_fill(~seeds.repeat_interleave(PAGE, -1)[..., :keys], -math.inf)
    _, row = weigh(s, rule, whole.of_heads(r), whole.of_heads(scale))
    theta = row.peak - row.reach
    few = (s > -math.inf).sum(-1, keepdim=True) < rule.k if isinstance(rule, Nearest) else row.peak == -math.inf
    few = few | (row.reach <= 0) if isinstance(rule, Fixed) else few  # nothing in reach: the weights may be uniform
    theta = theta - 32 * torch.finfo(work).eps * (row.reach.abs() + row.peak.abs())  # no rounding of a sum exceeds it
    outside = (bound < theta) & ~few
    wanted = seeds | _of_group(seen & ~outside, group)
    skipped = (_of_group(seen, group) & ~wanted)[:, ::group].sum((-1, -2), dtype=torch.int32)
    return wanted, skipped


def bound_pages(q: Tensor, scale: Tensor, view: View, bounds: Bounds) -> Tensor:
    """(B, H, Q, P) what no score of a page exceeds, rounding included; −inf out of sight, ∞ for keys not added."""
    work = accumulator(q.dtype)
    group = q.shape[1] // bounds.low.shape[1]
    q, low, high = (x.to(work) for x in (q, bounds.low, bounds.high))
    low, high = (x.repeat_interleave(group, 1).mT for x in (low, high))  # (B, H, D, P)
    size = q.abs() @ torch.maximum(low.abs(), high.abs())
    bound = q.clamp_min(0) @ high + q.clamp_max(0) @ low
    bound = (bound + size * (4 * (q.shape[3] + 8) * torch.finfo(work).eps)) * scale[:, None, None]
    begin = torch.arange(low.shape[3], device=q.device) * PAGE
    at, lo, hi = (x[:, None, :, None] for x in (view.at, view.lo, view.hi))
    if view.slopes is not None:
        slopes = view.slopes[:, None, None].to(work)
        ends = torch.stack(torch.broadcast_tensors(at - begin, at - begin - (PAGE - 1)))
        near = ends.abs().amin(0).masked_fill((ends[0] >= 0) & (ends[1] <= 0), 0)
        bound = bound - slopes * torch.where(slopes > 0, near, ends.abs().amax(0))
    known = torch.minimum(begin + PAGE, hi) <= bounds.filled[:, None, None, None]
    bound = torch.where(known & ~bound.isnan(), bound, math.inf)
    return torch.where((begin < hi) & (begin + PAGE > lo), bound, -math.inf)


def _of_group(x: Tensor, group: int) -> Tensor:
    """(B, H, 1, P) whether any query of a group of heads has it."""
    return x.unflatten(1, (-1, group)).any(2).any(2, keepdim=True).repeat_interleave(group, 1)


# -- the edge ------------------------------------------------------------------------------------


def _stand(lengths: Lengths, view: View, taker: str) -> tuple[Tensor, Tensor]:
    """Where each query stands in a cache that holds so many keys, and how far it sees: (B, Q) each."""
    batch, _, _, keys = view.shape
    hi = torch.minimum(view.hi, read_lengths(lengths, batch, keys, view, taker)[:, None])
    return view.at - view.shape[3] + hi, hi


def _join(lengths: Lengths | None, mask: MaskLike) -> MaskLike:
    if lengths is None:
        return mask
    if mask is None:
        return Filled(lengths)
    mask = as_mask(mask)
    if any(isinstance(part, Packed) or (isinstance(part, Causal) and part.start is not None) for part in mask.parts):
        raise ValueError("lengths set where each query stands: leave out Packed and the start of Causal, or the lengths")
    return Filled(lengths) & mask


def _lacking(view: View, kernel: Kernel) -> str:
    """What of a call the decode kernels cannot do; empty if nothing."""
    if kernel.profile.alpha is not None:
        return "alpha is learned"
    return "" if view.bias is None and view.allowed is None else "the mask has a tensor of its own (Bias or Allowed)"


def _check_rows(rows: int, dtype: torch.dtype) -> str:
    """Why the kernels cannot take so many queries of one key head; empty if they can."""
    if rows > MOST_ROWS:
        raise ValueError(
            f"{rows} queries for each key head (queries × heads / key heads): decode takes {MOST_ROWS}; use attend"
        )
    if rows <= MOST_FP32_ROWS or dtype != torch.float32:
        return ""
    return f"{rows} queries for each key head, and in fp32 the kernels take {MOST_FP32_ROWS} (in fp16 or bf16 {MOST_ROWS})"


def _check_cache(k: Tensor) -> None:
    if not isinstance(k, Tensor) or k.ndim != 4:
        given = f"shape {tuple(k.shape)}" if isinstance(k, Tensor) else type(k).__name__
        raise ValueError(f"k must be a tensor (batch, heads, time, head_dim), got {given}")


def _check_pages(pages: Pages, k: Tensor, view: View) -> None:
    batch, heads, keys, dim = k.shape
    if pages.low.shape != (batch, heads, -(-keys // PAGE), dim) or pages.low.dtype != k.dtype:
        raise ValueError(
            f"pages are those of another cache: {tuple(pages.low.shape)} in {pages.low.dtype} for k {tuple(k.shape)} "
            f"in {k.dtype}; make them with Pages.of(k)"
        )
    if pages.low.device != k.device:
        raise ValueError(f"pages are on {pages.low.device} and k on {k.device}; make them with Pages.of(k)")
    if view.bias is not None:
        raise ValueError("pages bound q·k, and a Bias has no bound: leave out one of them")
