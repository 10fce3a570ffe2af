"""What a query may see.

Masks are small objects joined with `&`. Causal, padded and packed attention all let a query see
one run of consecutive keys, so each resolves to two numbers per query, `lo` and `hi`; only an
arbitrary boolean mask or bias needs a tensor of its own.

Shapes: B batch, H heads, Q queries, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compactattn.kernels import values_are_free

LONGEST_SHOWN = 8  # numbers of a list that a printed mask shows


@dataclass(frozen=True, eq=False)
class View:
    """What each query may see: keys lo ≤ j < hi, further narrowed by `allowed` and shifted by `bias` and `slopes`."""

    shape: tuple[int, int, int, int]  # (B, H, Q, K)
    at: Tensor  # (1 | B, Q) the key position at which a query stands
    lo: Tensor  # (1 | B, Q)
    hi: Tensor  # (1 | B, Q)
    allowed: Tensor | None = None  # bool, broadcasts to (B, H, Q, K)
    bias: Tensor | None = None  # broadcasts to (B, H, Q, K)
    slopes: Tensor | None = None  # (H,)

    @staticmethod
    def everything(shape: tuple[int, int, int, int], device: torch.device) -> View:
        queries, keys = shape[2:]
        at = torch.arange(queries, device=device)[None] + (keys - queries)
        return View(shape, at, torch.zeros_like(at), torch.full_like(at, keys))


class Mask:
    """Something that narrows a View. Join masks with `&`: Causal(1) & Padding(lengths)."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{x.name}={sketch(getattr(self, x.name))}' for x in _given(self))})"

    def __and__(self, other: Mask | Tensor) -> Mask:
        return Joined((*self.parts, *as_mask(other).parts))

    def __rand__(self, other: Tensor) -> Mask:
        return as_mask(other) & self

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self,)

    def narrow(self, view: View) -> View:
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class Joined(Mask):
    members: tuple[Mask, ...]

    def __repr__(self) -> str:
        return " & ".join(map(repr, self.members))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.members


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """A query at position p sees the keys j ≤ p − offset. offset = 1 is strictly past, as in Memory Mosaics.

    Query i stands at position start + i; by default the last query stands at the last key.
    """

    offset: int = 0
    start: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.offset, float) or isinstance(self.start, float):
            raise TypeError(f"Causal takes whole numbers, got offset={self.offset!r}, start={self.start!r}")

    def narrow(self, view: View) -> View:
        _, _, queries, keys = view.shape
        shift = 0 if self.start is None else self.start - (keys - queries)
        at = view.at + shift
        return replace(view, at=at, hi=torch.minimum(view.hi, at + (1 - self.offset)))


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Sample b has `lengths[b]` keys; the rest is padding. `queries`, if given, does the same for query rows.

    In self-attention pass the lengths twice: padded rows then return exactly 0.
    """

    lengths: Tensor | Sequence[int]
    queries: Tensor | Sequence[int] | None = None

    def narrow(self, view: View) -> View:
        batch, _, queries, keys = view.shape
        hi = torch.minimum(view.hi, read_lengths(self.lengths, batch, keys, view, "Padding")[:, None])
        if self.queries is not None:
            most = read_lengths(self.queries, batch, queries, view, "Padding", "query")[:, None]
            real = torch.arange(queries, device=hi.device) < most
            hi = torch.where(real, hi, view.lo)
        return replace(view, hi=hi)


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Sequences of the given lengths lie end to end along time; none sees another.

    `queries` gives the query lengths where they differ from the key lengths. A length may be 0.
    """

    lengths: Tensor | Sequence[int]
    queries: Tensor | Sequence[int] | None = None

    def narrow(self, view: View) -> View:
        _, _, queries, keys = view.shape
        device = view.at.device
        key_ends = _ends(self.lengths, keys, "key", device)
        query_ends = key_ends if self.queries is None else _ends(self.queries, queries, "query", device)
        if self.queries is None and queries != keys:
            raise ValueError(
                f"Packed lengths cover {keys} keys but there are {queries} queries; "
                "give Packed(lengths, queries=...) the query lengths"
            )
        if key_ends.shape != query_ends.shape:
            raise ValueError(
                f"Packed has {len(key_ends)} key sequences and {len(query_ends)} query sequences; give one length each"
            )
        index = torch.arange(queries, device=device)
        sequence = torch.searchsorted(query_ends, index, right=True)
        begins = torch.cat((key_ends.new_zeros(1), key_ends))
        # the last query of a sequence stands at its last key
        at = index - query_ends[sequence] + key_ends[sequence]
        lo = torch.maximum(view.lo, begins[sequence])
        return replace(view, at=at[None], lo=lo, hi=torch.minimum(view.hi, key_ends[sequence]))


@dataclass(frozen=True, eq=False, repr=False)
class Allowed(Mask):
    """A boolean tensor that broadcasts to (B, H, Q, K): True where a query may see a key."""

    tensor: Tensor

    def narrow(self, view: View) -> View:
        if self.tensor.dtype != torch.bool:
            raise TypeError(f"Allowed takes a boolean tensor, got {self.tensor.dtype}; use Bias for scores to add")
        allowed = _broadcastable(self.tensor, view, "Allowed")
        return replace(view, allowed=allowed if view.allowed is None else view.allowed & allowed)


@dataclass(frozen=True, eq=False, repr=False)
class Bias(Mask):
    """A tensor added to the scaled scores; it broadcasts to (B, H, Q, K) and has a gradient. −inf hides a key."""

    tensor: Tensor

    def narrow(self, view: View) -> View:
        if not isinstance(self.tensor, Tensor):
            raise TypeError(f"Bias takes a tensor, got {type(self.tensor).__name__}; give it to torch.as_tensor first")
        if not self.tensor.is_floating_point():
            raise TypeError(f"Bias takes a floating-point tensor, got {self.tensor.dtype}; use Allowed for booleans")
        bias = _broadcastable(self.tensor, view, "Bias")
        return replace(view, bias=bias if view.bias is None else view.bias + bias)


@dataclass(frozen=True, eq=False, repr=False)
class ALiBi(Mask):
    """Adds −slope_h · |distance between query and key|. Default slopes: 2^(−8(h+1)/H), as published.

    The slopes are constants; to learn a positional bias pass it as Bias.
    """

    slopes: Tensor | Sequence[float] | None = None

    def narrow(self, view: View) -> View:
        heads = view.shape[1]
        if self.slopes is None:
            slopes = torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device=view.at.device))
        else:
            slopes = torch.as_tensor(self.slopes, device=view.at.device)
        if slopes.shape != (heads,):
            raise ValueError(f"ALiBi needs one slope for each of {heads} heads, got shape {tuple(slopes.shape)}")
        if slopes.requires_grad:
            raise ValueError("ALiBi slopes are constants and have no gradient; detach them, or pass a learned Bias")
        if view.slopes is not None:
            raise ValueError("two ALiBi masks were joined; give one")
        return replace(view, slopes=slopes)


MaskLike = Mask | Tensor | None


def as_mask(mask: Mask | Tensor) -> Mask:
    """A bare boolean tensor is read as Allowed, a floating-point one as Bias."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"a mask tensor is boolean or floating-point, got {mask.dtype}; use mask.bool()")
        return Allowed(mask) if mask.dtype == torch.bool else Bias(mask)
    if mask is None:
        raise TypeError("None is no mask, and nothing joins with it; use the other mask alone")
    called = isinstance(mask, type) and issubclass(mask, Mask)
    remedy = f"call it: {mask.__name__}(...)" if called else "join several with &, as in Causal(offset=1) & Padding(lengths)"
    raise TypeError(f"a mask is a Mask, a tensor or None, got {type(mask).__name__}; {remedy}")


def resolve(mask: MaskLike, shape: tuple[int, int, int, int], device: torch.device) -> View:
    """The View of a mask."""
    view = View.everything(shape, device)
    if mask is None:
        return view
    mask = as_mask(mask)
    parts = mask.parts
    packed = [part for part in parts if isinstance(part, Packed)]
    if len(packed) > 1 or (packed and any(isinstance(part, Causal) and part.start is not None for part in parts)):
        raise ValueError("Packed sets where each query stands: join one Packed, and a Causal without start")
    if sum(isinstance(part, Causal) and part.start is not None for part in parts) > 1:
        raise ValueError("two Causal masks with a start were joined; give one")
    # Packed moves the queries, so it goes before anything that measures from them; ALiBi measures last
    for part in sorted(parts, key=lambda part: (not isinstance(part, Packed), isinstance(part, ALiBi))):
        view = part.narrow(view)
    return view


def _given(mask: Mask) -> list[Field[Any]]:
    """The fields of a mask that differ from their default."""
    return [] if not is_dataclass(mask) else [x for x in fields(mask) if getattr(mask, x.name) is not x.default]


def sketch(x: object) -> str:
    """What to print of a field: a tensor or a long list by its size alone."""
    if isinstance(x, Tensor):
        return f"<{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}>"
    return f"<{len(x)} numbers>" if isinstance(x, Sequence) and len(x) > LONGEST_SHOWN else repr(x)


def _whole(lengths: Tensor | Sequence[int], taker: str) -> Tensor:
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(list(lengths) if isinstance(lengths, Iterable) else math.nan)
    if lengths.numel() and (lengths.is_floating_point() or lengths.dtype == torch.bool):
        given = f"{lengths.dtype} of shape {tuple(lengths.shape)}"
        raise TypeError(f"{taker} takes whole lengths, got {given}; a (batch, keys) mask is mask[:, None, None]")
    return lengths.long()


def read_lengths(lengths: Tensor | Sequence[int], batch: int, most: int, view: View, taker: str, what: str = "key") -> Tensor:
    """(B,) lengths as a tensor beside the View; an error speaks of `taker`, to whom they were given."""
    given = _whole(lengths, taker)
    if given.shape != (batch,):
        raise ValueError(f"{taker} needs {batch} {what} lengths, one per sample; got shape {tuple(given.shape)}")
    if values_are_free(given) and bool(((given < 0) | (given > most)).any()):
        raise ValueError(f"{taker} {what} lengths must lie in 0..{most}, got {given.tolist()}")
    return given.to(view.at)


def _ends(lengths: Tensor | Sequence[int], total: int, what: str, device: torch.device) -> Tensor:
    given = _whole(lengths, "Packed")
    if given.ndim != 1:
        raise ValueError(f"Packed needs a list of {what} lengths, got shape {tuple(given.shape)}")
    if values_are_free(given) and (int(given.sum()) != total or bool((given < 0).any())):
        raise ValueError(f"Packed {what} lengths must be ≥ 0 and sum to {total}, got {given.tolist()}")
    return given.to(device).cumsum(0)


def _broadcastable(tensor: Tensor, view: View, name: str) -> Tensor:
    """The tensor with four dimensions, each 1 or the full size."""
    given = tuple(tensor.shape)
    if tensor.device != view.at.device:
        raise ValueError(f"{name} is on {tensor.device} and q on {view.at.device}; move it with .to(q.device)")
    if len(given) > 4 or any(size not in (1, full) for size, full in zip(reversed(given), reversed(view.shape), strict=False)):
        batch, _, queries, keys = view.shape
        remedies = {(batch, keys): "(batch, keys) mask is mask[:, None, None]",
                    (batch, queries, keys): "(batch, queries, keys) mask is mask[:, None]"}  # fmt: skip
        remedy = f"; a {remedies[given]}" if given in remedies else ""
        raise ValueError(f"{name} of shape {given} does not broadcast to (batch, heads, queries, keys) = {view.shape}{remedy}")
    return tensor.reshape((1,) * (4 - len(given)) + given)
