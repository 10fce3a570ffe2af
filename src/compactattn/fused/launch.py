"""Where PyTorch meets the kernels: what they support, strides, and two functions as in reference.py.

Triton is imported at the first launch and not before.
Shapes: B batch, H heads (H' of keys), Q queries, K keys, D head dim.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compactattn.dropout import Dropout
from compactattn.fused.cut import Blocks, choose_cut, is_hopper, is_roomy, to_power
from compactattn.kernels import RULES
from compactattn.masks import View
from compactattn.reference import Estimate, Gradients

OLDEST_TRITON = (3, 5)  # the first with functions of compile-time numbers; tensor descriptors are in 3.4


def lack_triton() -> str:
    """Why Triton, which is not imported for it, cannot be used; empty if it can. One whose version is not told is taken."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    try:
        found = version("triton")
    except PackageNotFoundError:  # a build under another name
        return ""
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= OLDEST_TRITON:
        return ""
    oldest = ".".join(map(str, OLDEST_TRITON))
    return f"Triton {found} is older than {oldest} (pip install 'triton>={oldest}', or a newer torch)"


NO_TRITON = lack_triton()
HAVE_TRITON = not NO_TRITON
OLDEST_GPU = (8, 0)  # the first with bf16 products
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODES = {name: code for code, name in enumerate(("normalising", "anchored", "fixed", "nearest"))}
assert CODES.keys() == RULES.keys()
Code = tuple[float, str, float]  # a kernel as kernels.encode writes it
LEARNED = -1.0  # stands for the r of the kernels where each head has its own
ALIBI, BIASED, ALLOWED = 1, 2, 4  # what bends the scores, as bits
TRACK_FROM = 1024  # keys; below, skipping tiles costs more than it saves
LONG = 4096  # keys, from which on a program is mostly its tiles
# steps of Newton, relative to ρ, at which it stops: on the class bests, and on the sums, which it corrects to first order.
# The error that is left is about the square of the step for the output, a third of the step for the centre of ds; for r = 1
# the slopes jump at θ.
TOLERANCES = {
    torch.bfloat16: {False: (2.0**-7, 2.0**-5), True: (2.0**-14, 2.0**-13)},
    torch.float16: {False: (2.0**-12, 2.0**-11), True: (2.0**-16, 2.0**-15)},
    torch.float32: {False: (2.0**-16, 2.0**-21), True: (2.0**-21, 2.0**-21)},
}


def supports(q: Tensor) -> str:
    """Why the kernels cannot do a call; empty if they can. First what installing Triton would not mend."""
    if q.device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "q is on the CPU, where the kernels run only under TRITON_INTERPRET=1"
    elif q.device.type != "cuda":
        return f"q is on {q.device.type}, the kernels need CUDA"
    elif torch.version.hip is not None:
        return "q is on an AMD GPU, the kernels hold instructions of NVIDIA's"
    elif not is_new(q.device.index or 0):
        return f"the GPU is older than compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]}"
    if NO_TRITON:
        return NO_TRITON
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs; the kernels take fp16, bf16 and fp32"
    return ""


@torch.compiler.assume_constant_result
def is_new(index: int) -> bool:
    """Whether a GPU has what the kernels need."""
    return torch.cuda.get_device_capability(index) >= OLDEST_GPU


# -- forward and backward ------------------------------------------------------------------------


class Kept(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    rows: Tensor  # (4 to 6, B, H, Q) fp32: see threshold.py
    tilt: Tensor  # (up to 2, B, H, Q, Dv) mean of the values under the slopes, or its way from o; what rounding it, or o, left
    flags: Tensor  # (B·H, blocks of queries, tiles of keys) int8: whether a tile holds a weight, where it pays to know


def kept_like(q: Tensor, k: Tensor, v: Tensor, code: Code, grad: bool) -> Kept:
    """Empty tensors for it."""
    r, rule, _ = code
    cut = choose_cut(q.shape[2], max(to_power(q.shape[3]), to_power(v.shape[3])), q.dtype, is_roomy(q.device))
    rows = q.new_empty(({"nearest": 6, "anchored": 5}.get(rule, 4), *q.shape[:3]), dtype=torch.float32)
    tilted, exact = r != math.inf and rule != "fixed", q.dtype == torch.float32
    means = (tilted and (rule == "nearest" or not exact)) + (not exact) if grad and r != 0 else 0
    tilt = q.new_empty((means, *q.shape[:3], v.shape[3]))
    heads, blocks, tiles = q.shape[0] * q.shape[1], _count(q.shape[2], cut.forward.m), _count(k.shape[2], cut.forward.n)
    tracked = k.shape[2] >= TRACK_FROM and not (r == math.inf and rule == "normalising")
    flags = q.new_empty((heads, blocks, tiles) if tracked else (0, 0, 0), dtype=torch.int8)
    return Kept(rows, tilt, flags)


def estimate(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, orders: Tensor | None, readout: bool, grad: bool,
    drop: Dropout | None = None,
) -> tuple[Estimate, Kept]:  # fmt: skip
    """`reference.estimate`, and what the backward pass keeps."""
    from compactattn.fused.forward import forward
    from compactattn.fused.threshold import threshold

    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    kept = kept_like(q, k, v, code, grad)
    support = q.new_empty(q.shape[:3] if readout else (0, 0, 0), dtype=torch.int32)
    if q.numel() == 0 or k.numel() == 0:
        out.zero_(), kept.rows.fill_(-torch.inf), kept.tilt.zero_(), support.zero_()
    else:
        call = Call(q, k, v, scale, view, code, orders, drop)
        track = kept.flags.numel() > 0
        listed = track and code[1] in ("normalising", "anchored")
        lists = counts = kept.flags
        grid = call.grid(q, call.cut.forward.m)
        copies = _describe(call.cut.forward.n, k, v)
        with _on(q):
            if call.peaked:
                threshold[grid](
                    q, k, copies[0], kept.rows, kept.flags, *call.sight,
                    *_strides(q, k), *call.steps, *call.lengths, call.margin, call.nearest,
                    TRACK=listed, TOLERANCE=call.tolerance[0], DESCRIBED=copies[0] is not k,
                    **call.constants("RULE", "R", "GROUP", "BENDS", "D", "BLOCK_D"), **_options(call.cut.threshold),
                )  # fmt: skip
            if listed:
                lists, counts = call.list_tiles(kept.flags, by_key=False)
            forward[grid](
                q, k, v, *copies, out, kept.tilt, kept.rows, support, lists, counts, kept.flags, *call.sight, call.seed,
                *_strides(q, k, v, out), *call.steps, *call.lengths, call.margin, *call.drop,
                READOUT=readout, GRAD=grad, LISTED=listed, TRACK=track, TOLERANCE=call.tolerance[1],
                DESCRIBED=copies[0] is not k,
                **call.constants(), **_options(call.cut.forward),
            )  # fmt: skip
    if not readout:
        return Estimate(out, kept.rows.new_empty((0, 0, 0)), support), kept
    peak, reach = kept.rows[0], kept.rows[1]
    return Estimate(out, torch.where(peak == -torch.inf, torch.inf, peak - reach), support), kept


def estimate_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, orders: Tensor | None,
    wanted: tuple[bool, bool], out: Tensor, kept: Kept, drop: Dropout | None = None,
) -> Gradients:  # fmt: skip
    """`reference.estimate_backward`, from what `estimate` kept. `wanted`: whether bias and scale want a gradient."""
    from compactattn.fused.backward import backward_keys, backward_queries

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    do, q, k, v = (_rows_contiguous(x) for x in (do, q, k, v))
    bias_grad, scale_grad = wanted
    dbias = torch.empty_like(view.bias, dtype=torch.float32) if bias_grad and view.bias is not None else None
    dscale, dorders = torch.zeros_like(scale), None if orders is None else torch.zeros_like(orders)
    if code[0] == 0 or q.numel() == 0 or k.numel() == 0:
        dq.zero_(), dk.zero_(), dv.zero_()
        if dbias is not None:
            dbias.zero_()
        if q.numel() == 0 or k.numel() == 0:
            return Gradients(dq, dk, dv, dscale, dbias, dorders)
    call = Call(q, k, v, scale, view, code, orders, drop)
    cut = call.cut
    track = kept.flags.numel() > 0
    pulled = kept.rows.new_empty((4, call.heads, call.blocks * cut.queries.m))  # what the keys need to know of each row
    with _on(q):
        if code[0] != 0:
            grid = call.grid(q, cut.queries.m)
            parts = kept.rows.new_empty((1 if orders is None else 2, *grid))
            lists, counts = call.list_tiles(kept.flags, by_key=False) if track else (kept.flags, kept.flags)
            copies = _describe(cut.queries.n, k, v)
            backward_queries[grid](
                do, q, k, v, *copies, out, kept.tilt, dq, kept.rows, pulled, parts[0], parts[-1], lists, counts,
                *call.sight, call.seed,
                *_strides(do, q, k, v, out, dq), *call.steps, *call.lengths, call.margin, *call.drop,
                LISTED=track, SCALED=scale_grad, DESCRIBED=copies[0] is not k, **call.constants(), **_options(cut.queries),
            )  # fmt: skip
            if scale_grad:
                dscale = call.join(parts[0])
            if orders is not None:
                dorders = call.join(parts[1])
            if dbias is not None:
                call.pull_bias(dbias, do, q, k, v, kept, pulled)
        lists, counts = call.list_tiles(kept.flags, by_key=True)
        copies = _describe(cut.keys.m, do, q)
        backward_keys[call.grid(k, cut.keys.n)](
            do, q, *copies, k, v, dk, dv, kept.rows, pulled, lists, counts, *call.sight, call.seed,
            *_strides(do, q, k, v, dk, dv), *call.steps, *call.lengths[:-1], call.blocks, call.margin, *call.drop,
            DESCRIBED=copies[0] is not do,
            **call.constants(), **_options(cut.keys),
        )  # fmt: skip
    return Gradients(dq, dk, dv, dscale, dbias, dorders)


class Call:
    """The arguments that the kernels share."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, orders: Tensor | None,
        drop: Dropout | None,
    ) -> None:  # fmt: skip
        from compactattn.fused.threshold import is_plain
        from compactattn.fused.weights import is_even

        r, rule, value = code if orders is None else (LEARNED, *code[1:])
        batch, heads, queries, dim = q.shape
        keys, value_dim = v.shape[2:]
        exact = q.dtype == torch.float32
        bends = (view.slopes is not None) * ALIBI + (view.bias is not None) * BIASED + (view.allowed is not None) * ALLOWED
        kind = (CODES[rule], r, bends, exact)
        brief = keys < LONG and drop is None and is_plain(*kind)
        width = max(to_power(dim), to_power(value_dim))
        self.cut = choose_cut(queries, width, q.dtype, is_roomy(q.device), is_even(*kind), brief)
        # where the weights of a fixed kernel may exceed fp16, are powers of s/ρ (which overflow for s itself), or a tensor can
        # hide all keys, the best score is needed first
        direct = rule == "fixed" and q.dtype != torch.float16 and r in (0, 1) and bends <= ALIBI
        self.peaked = not direct and not (rule == "normalising" and r == math.inf)
        self.tolerance = TOLERANCES[q.dtype][r == 1]
        self.view, self.heads = view, batch * heads
        self.blocks, self.tiles = _count(queries, self.cut.forward.m), _count(keys, self.cut.forward.n)
        slopes, given = (None if x is None else x.contiguous() for x in (view.slopes, orders))
        allowed = None if view.allowed is None else view.allowed.view(torch.uint8)
        extras = (scale if x is None else x for x in (view.bias, allowed, given))
        self.sight = scale, scale if slopes is None else slopes, view.at, view.lo, view.hi, *extras
        self.steps = (
            scale.stride(0), *(x.stride(0) if len(x) > 1 else 0 for x in (view.at, view.lo, view.hi)),
            *_shared_strides(view.bias), *_shared_strides(view.allowed),
        )  # fmt: skip
        self.lengths = heads, queries, keys, batch * heads * queries, self.tiles
        self.margin, self.nearest = (0.0, min(int(value), keys)) if rule == "nearest" else (value, 0)
        self.seed = scale if drop is None else drop.seed
        self.drop = (0, 1.0) if drop is None else (drop.limit, drop.boost)
        self._constants: dict[str, Any] = {
            "RULE": CODES[rule], "R": r, "GROUP": heads // k.shape[1], "BENDS": bends,
            "EXACT": exact, "PEAKED": self.peaked, "DROPS": drop is not None,
            "D": dim, "DV": value_dim, "BLOCK_D": to_power(dim), "BLOCK_DV": to_power(value_dim),
        }  # fmt: skip

    def constants(self, *names: str) -> dict[str, Any]:
        """The compile-time numbers of these names, or all."""
        return {name: self._constants[name] for name in names or self._constants}

    def grid(self, x: Tensor, block: int) -> tuple[int]:
        """One program for each block of rows of each head."""
        return (x.shape[0] * x.shape[1] * _count(x.shape[2], block),)

    @cached_property
    def bounds(self) -> Tensor:
        """(1 | B, blocks, 4): the keys that any and that all queries of a block see."""
        from compactattn.fused.lists import bound_blocks

        lo, hi = self.view.lo, self.view.hi
        bounds = lo.new_empty((max(len(lo), len(hi)), self.blocks, 4), dtype=torch.int32)
        bound_blocks[bounds.shape[0] * self.blocks,](
            lo, hi, bounds, *self.steps[2:4], *self.lengths[1:3], **self.constants("BENDS"), BLOCK_M=self.cut.forward.m
        )
        return bounds

    def join(self, parts: Tensor) -> Tensor:
        """(H,) sums of what each block of queries has."""
        return parts.view(-1, self.lengths[0], self.blocks).sum((0, 2))

    def pull_bias(self, dbias: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, pulled: Tensor) -> None:
        """Fills the gradient of the bias, from what the queries have written to `pulled`."""
        from compactattn.fused.backward_bias import backward_bias

        names = ("BY_SAMPLE", "BY_HEAD", "BY_QUERY", "BY_KEY")
        own = {name: size > 1 for name, size in zip(names, dbias.shape, strict=True)}
        parts = (*dbias.shape[:2], self.blocks if own["BY_QUERY"] else 1, self.tiles if own["BY_KEY"] else 1)
        backward_bias[math.prod(parts),](
            do, q, k, v, dbias, kept.rows, pulled, kept.flags, *self.sight, self.seed,
            *_strides(do, q, k, v), *_shared_strides(dbias), *self.steps, q.shape[0], *self.lengths, self.margin, *self.drop,
            TRACK=kept.flags.numel() > 0, **own, **self.constants(), **_options(self.cut.queries),
        )  # fmt: skip

    def list_tiles(self, flags: Tensor, by_key: bool) -> tuple[Tensor, Tensor]:
        """The lists of `fused.lists.list_tiles`, and their counts."""
        from compactattn.fused.lists import COUNTS, list_tiles

        bounds = self.bounds
        own, size = (self.tiles, self.blocks) if by_key else (self.blocks, self.tiles)
        lists = bounds.new_empty((self.heads, own, size), dtype=torch.int16 if size < 2**15 else torch.int32)
        counts = bounds.new_empty((self.heads, own, COUNTS.value))
        list_tiles[self.heads * own,](
            bounds, flags, lists, counts, bounds.stride(0) if len(bounds) > 1 else 0, self.lengths[0], self.blocks, self.tiles,
            BY_KEY=by_key, FLAGGED=flags.numel() > 0, BLOCK_N=self.cut.forward.n, CHUNK=128, num_warps=1,
        )  # fmt: skip
        return lists, counts


def _options(blocks: Blocks) -> dict[str, Any]:
    """Multiplications and additions are fused where the source says so: a score has the same bits in every kernel."""
    return {
        "BLOCK_M": blocks.m, "BLOCK_N": blocks.n,
        "num_warps": blocks.warps, "num_stages": blocks.stages, "maxnreg": blocks.registers,
        "enable_fp_fusion": False,
    }  # fmt: skip


def _describe(rows: int, *tensors: Tensor) -> tuple[Any, ...]:
    """Descriptors by which a GPU copies blocks of rows of (B, H, Q, D) by itself; what lies beyond Q and D reads as zero.

    Where it has no engine for that, or a row begins at no multiple of 16 bytes, the tensors themselves.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-untyped]

    for x in tensors:
        aligned = x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in x.stride()[:3])
        if not (is_hopper(x.device) and aligned and x.element_size() == 2):
            return tensors
    return tuple(TensorDescriptor(x, list(x.shape), [*x.stride()[:3], 1], [1, 1, rows, to_power(x.shape[3])]) for x in tensors)


def _count(size: int, block: int) -> int:
    return -(-size // block)


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(step for x in tensors for step in x.stride()[:3])


def _shared_strides(x: Tensor | None) -> tuple[int, ...]:
    """Of a tensor that broadcasts to (B, H, Q, K): 0 where one number serves all."""
    return (0,) * 4 if x is None else tuple(step if size > 1 else 0 for size, step in zip(x.shape, x.stride(), strict=True))


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
