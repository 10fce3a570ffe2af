"""Where PyTorch meets attend.c: what it supports, how it wants its tensors, and two functions as in reference.py.

Shapes: B batch, H heads (H' of keys), Q queries, K keys, D head dim.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compactattn import reference
from compactattn.dropout import Dropout, foresee
from compactattn.kernels import RULES, Fixed, Nearest, decode_rule
from compactattn.masks import View
from compactattn.native.build import lack_library, library
from compactattn.reference import Estimate, Gradients
from compactattn.rows import WHOLE, Pull

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
Code = tuple[float, str, float]  # a kernel as kernels.encode writes it
PIECES_FOR_EACH_THREAD = 2  # at a time
MOST_PIECE_BYTES = 2**28  # of dk and dv, which each piece has of its own where several are made at once
FLOAT_MAX, FLOAT_MIN = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
KINDS = (0.0, *WHOLE, math.nan, math.inf)  # of r, as attend.c numbers them; NaN stands for all others


class Kernel(ctypes.Structure):
    """Kernel of attend.c, field by field."""

    _fields_ = (("rule", ctypes.c_int32), ("kind", ctypes.c_int32), ("r", ctypes.c_float), ("value", ctypes.c_float))

    @staticmethod
    def of(code: Code) -> Kernel:
        r, rule, value = code
        r = r if r == math.inf else ctypes.c_float(r).value  # 1.00000001 is 1 in C
        kind = KINDS.index(r if r in KINDS else math.nan)
        value = min(max(value, FLOAT_MIN), FLOAT_MAX) if value else value  # a margin is no 0 in C either
        return Kernel(list(RULES).index(rule), kind, min(r, FLOAT_MAX), value)


class Call(ctypes.Structure):
    """Call of attend.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "scale", "k_tiles", "v_tiles", "at", "lo", "hi", "slopes", "bias", "allowed", "before", "between",
            "dout", "out", "reach", "threshold", "support", "dq", "dk", "dv", "piece_dk", "piece_dv", "dscale",
        )),
        ("bias_strides", ctypes.c_int64 * 4),
        ("allowed_strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in (
            "batch", "heads", "key_heads", "queries", "rows", "keys", "dim", "width", "samples_seen", "parts", "threads",
        )),
        ("kernel", Kernel),
        ("boost", ctypes.c_float),
        ("limit", ctypes.c_uint32),
    )  # fmt: skip


class RowsCall(ctypes.Structure):
    """RowsCall of attend.c, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w", "dw", "perfect", "norm", "dtheta", "edge")),
        *((name, ctypes.c_int64) for name in ("rows", "keys", "threads")),
        ("kernel", Kernel),
    )  # fmt: skip


def supports(q: Tensor) -> str:
    """Why attend.c cannot do any call like this; empty if it can. The first answer may take some seconds, to compile it."""
    if q.device.type != "cpu":
        return f"q is on {q.device.type}, attend.c runs on a CPU"
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs; attend.c takes fp16, bf16, fp32"
    return lack_library()


def lacks(learned: bool, bias_grad: bool) -> str:
    """What it has no form of."""
    return "alpha is learned" if learned else "the bias needs a gradient" if bias_grad else ""


def estimate(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, readout: bool, grad: bool,
    drop: Dropout | None = None,
) -> tuple[Estimate, Tensor]:  # fmt: skip
    """As `reference.estimate`, which has the word where something is not finite."""
    if 0 in (*q.shape[:3], k.shape[2]) or not _all_finite(q, k, v):
        r, rule, value = code
        return reference.estimate(q, k, v, scale, view, decode_rule(rule, value), r, readout, drop, grad)
    shape = q.shape[:3]
    call = Prepared(q, k, v, scale, view, code, drop)
    call.give("v", call.pad_keys(v))
    out = call.new("out", (*shape[:2], call.rows, call.width))
    reach = call.new("reach", shape) if grad else q.new_empty((0, 0, 0), dtype=torch.float32)
    threshold, support = (torch.empty((0, 0, 0), dtype=dtype) for dtype in (torch.float32, torch.int32))
    if readout:
        threshold, support = call.new("threshold", shape), call.new("support", shape, torch.int32)
    call.run(library().attend)
    return Estimate(out[:, :, : shape[2], : v.shape[3]].to(q.dtype).contiguous(), threshold, support), reach


def estimate_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, reach: Tensor | None,
    drop: Dropout | None = None,
) -> Gradients:  # fmt: skip
    """As `reference.estimate_backward`."""
    if 0 in (*q.shape[:3], k.shape[2]) or not _all_finite(q, k, v, do):
        r, rule, value = code
        return reference.estimate_backward(do, q, k, v, scale, view, decode_rule(rule, value), r, False, drop, reach)
    call = Prepared(q, k, v, scale, view, code, drop)
    call.give("dout", call.pad_rows(do))
    call.give("k", call.pad_keys(k))
    call.give("v_tiles", call.tile(call.pad_keys(v)))
    if reach is not None:
        call.give("reach", reach)
    key_shape = (*k.shape[:2], call.keys)
    dq = call.new("dq", (*q.shape[:2], call.rows, call.dim))
    dk = call.new("dk", (*key_shape, call.dim)).zero_()
    dv = call.new("dv", (*key_shape, call.width)).zero_()
    call.new("piece_dk", (call.buffers, call.keys, call.dim)).zero_()
    call.new("piece_dv", (call.buffers, call.keys, call.width)).zero_()
    dscale = call.new("dscale", tuple(q.shape[:2]), torch.float64).zero_()
    call.run(library().attend_backward)
    dq = dq[:, :, : q.shape[2], : q.shape[3]].to(q.dtype)
    dk, dv = (x[:, :, : like.shape[2], : like.shape[3]].to(like.dtype) for x, like in ((dk, k), (dv, v)))
    return Gradients(dq, dk, dv, dscale.sum(0).to(scale.dtype), None, None)


def weigh_all(s: Tensor, code: Code, perfect: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As `rows.weigh_all`, for fp32."""
    w, norm = s.clone(memory_format=torch.contiguous_format), s.new_empty((len(s), 1))
    edge = torch.empty((len(s), 1) if RULES[code[1]] is Nearest else 0, dtype=torch.long)
    perfect = None if perfect is None else perfect.contiguous()
    call = RowsCall(w=w.data_ptr(), norm=norm.data_ptr(), **_shape(s, code))
    call.perfect, call.edge = _pointer(perfect), _pointer(edge)
    library().weigh_rows(ctypes.byref(call))
    return w, norm, edge


def pull_all(w: Tensor, dw: Tensor, norm: Tensor, edge: Tensor, code: Code) -> Pull:
    """As `rows.pull_all`, for fp32."""
    w, ds = w.contiguous(), dw.clone(memory_format=torch.contiguous_format)
    dtheta = torch.empty_like(norm) if RULES[code[1]] is Fixed else None
    call = RowsCall(w=w.data_ptr(), dw=ds.data_ptr(), norm=norm.data_ptr(), **_shape(w, code))
    call.dtheta, call.edge = _pointer(dtheta), _pointer(edge)
    library().pull_rows(ctypes.byref(call))
    return Pull(ds, dtheta, None)


def _shape(s: Tensor, code: Code) -> dict[str, Any]:
    return {"rows": len(s), "keys": s.shape[1], "threads": torch.get_num_threads(), "kernel": Kernel.of(code)}


def _pointer(x: Tensor | None) -> int | None:
    return x.data_ptr() if x is not None and x.numel() else None


class Prepared:
    """A call of attend.c, and the tensors that it points to."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, drop: Dropout | None) -> None:
        self.lanes, at_once = library().lanes(), library().rows_at_once()
        batch, heads, queries, _ = q.shape
        self.rows, self.keys = _round_up(queries, at_once), _round_up(k.shape[2], 2 * self.lanes)
        self.dim, self.width = (_round_up(x.shape[3], self.lanes) for x in (q, v))
        places, threads = batch * k.shape[1], torch.get_num_threads()
        gradients = 4 * places * self.keys * (self.dim + self.width)  # bytes of dk and dv
        pieces = math.ceil(self.rows / library().long_run()) * heads // k.shape[1]
        # no number hangs on how many are made at once
        parts = max(1, min(math.ceil(PIECES_FOR_EACH_THREAD * threads / places), pieces, MOST_PIECE_BYTES // gradients))
        self.buffers = parts * places if parts > 1 else min(threads, places)
        # a key beyond the last would be read beyond the end of memory
        seen = torch.broadcast_tensors(view.at, view.lo.clamp_min(0), view.hi.clamp_max(k.shape[2]))
        self.kept: list[Tensor] = []
        self.call = Call(
            batch=batch, heads=heads, key_heads=k.shape[1], queries=queries, rows=self.rows, keys=self.keys, dim=self.dim,
            width=self.width, samples_seen=len(seen[0]), parts=parts, threads=threads,
            kernel=Kernel.of(code),
        )  # fmt: skip
        self.give("q", self.pad_rows(q))
        self.give("k_tiles", self.tile(self.pad_keys(k)))
        self.give("scale", scale.float())
        for field, x in zip(("at", "lo", "hi"), seen, strict=True):
            self.give(field, x)
        if view.slopes is not None:
            self.give("slopes", view.slopes.float())
        if view.bias is not None:
            self.give_broadcast("bias", view.bias.float())
        if view.allowed is not None:
            self.give_broadcast("allowed", view.allowed)
        if drop is not None:
            fates = foresee(drop, batch, heads, queries)
            self.give("before", fates.before)
            self.give("between", fates.between)
            self.call.boost, self.call.limit = drop.boost, 2 * drop.limit

    def give(self, field: str, x: Tensor) -> None:
        """Points a field to a tensor, and keeps it until the call is over."""
        self._point(field, x.contiguous())

    def _point(self, field: str, x: Tensor) -> None:
        self.kept.append(x)
        setattr(self.call, field, x.data_ptr())

    def give_broadcast(self, field: str, x: Tensor) -> None:
        """The same of a tensor that broadcasts to the scores, as it lies; a size of 1 does not step."""
        self._point(field, x)
        strides = [0 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
        setattr(self.call, f"{field}_strides", (ctypes.c_int64 * 4)(*strides))

    def new(self, field: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        self.give(field, x)
        return x

    def pad_rows(self, x: Tensor) -> Tensor:
        return _pad(x, self.rows, self.lanes)

    def pad_keys(self, x: Tensor) -> Tensor:
        return _pad(x, self.keys, self.lanes)

    def tile(self, x: Tensor) -> Tensor:
        """(B, H', K / tile, D, tile): what a tile of keys has of each feature side by side."""
        return x.unflatten(2, (-1, 2 * self.lanes)).mT

    def run(self, function: Callable[..., object]) -> None:
        function(ctypes.byref(self.call))


def _pad(x: Tensor, time: int, lanes: int) -> Tensor:
    """In fp32, with zeros up to a multiple of lanes and up to `time`."""
    room = (0, _round_up(x.shape[3], lanes) - x.shape[3], 0, time - x.shape[2])
    return pad(x.float(), room) if any(room) else x.float()


def _round_up(x: int, step: int) -> int:
    return math.ceil(x / step) * step


def _all_finite(*tensors: Tensor) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)
