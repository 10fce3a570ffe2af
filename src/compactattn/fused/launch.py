"""Where PyTorch meets the kernels: what they support, block sizes, strides, and two functions as in reference.py.

Triton is imported at the first launch and not before.
Shapes: B batch, H heads (H' of keys), Q queries, K keys, D head dim.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from compactattn.kernels import RULES, Kernel
from compactattn.masks import View
from compactattn.reference import Estimate, Gradients

HAVE_TRITON = find_spec("triton") is not None
OLDEST_GPU = (8, 0)  # the first with bf16 products
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
CODES = {name: code for code, name in enumerate(("normalising", "anchored", "fixed", "nearest"))}
assert CODES.keys() == RULES.keys()
Code = tuple[float, str, float]  # a kernel as kernels.encode writes it


def supports(q: Tensor, k: Tensor, v: Tensor, view: View, kernel: Kernel) -> str:
    """Why the kernels cannot do a call; empty if they can."""
    if not HAVE_TRITON:
        return "Triton is not installed"
    if q.device.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "q is on the CPU, where the kernels run only under TRITON_INTERPRET=1"
    elif q.device.type != "cuda":
        return f"q is on {q.device.type}, the kernels need CUDA"
    elif _capability(q.device.index or 0) < OLDEST_GPU:
        return f"the GPU is older than compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]}"
    if q.dtype not in DTYPES:
        return f"{q.dtype} inputs; the kernels take fp16, bf16 and fp32"
    if kernel.profile.alpha is not None:
        return "alpha is learned"
    if view.bias is not None or view.allowed is not None:
        return "the mask has a tensor of its own (Bias or Allowed)"
    return ""


@torch.compiler.assume_constant_result
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# -- block sizes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """How one kernel is cut: M queries × N keys at a time."""

    m: int
    n: int
    warps: int
    stages: int
    single: bool = False  # one tile holds all keys


def forward_blocks(queries: int, keys: int, width: int, dtype: torch.dtype) -> Blocks:
    """Blocks of the forward kernel; width is the larger head dim. Up to 256 scores of a row stay in registers."""
    m = query_block(queries, dtype)
    if keys <= 256 and width <= 128 and dtype != torch.float32:  # fp32 products need the registers for themselves
        n = max(_power(keys), 64 if m == 64 else 32)
        return Blocks(m, n, 8 if m * n > 8192 else 4, 1, single=True)
    return Blocks(m, key_block(width, dtype), 4 if width <= 128 else 8, 3 if width <= 64 else 2)


def backward_query_blocks(queries: int, keys: int, width: int, dtype: torch.dtype) -> Blocks:
    m = query_block(queries, dtype)
    if keys <= 128 and width <= 64 and dtype != torch.float32:
        n = max(_power(keys), 64 if m == 64 else 32)
        return Blocks(m, n, 4, 1, single=True)
    return Blocks(m, key_block(width, dtype), 4 if width <= 64 else 8, 2)


def backward_key_blocks(queries: int, keys: int, width: int, dtype: torch.dtype) -> Blocks:
    return Blocks(query_block(queries, dtype), key_block(width, dtype), 4 if width <= 64 else 8, 2)


def query_block(queries: int, dtype: torch.dtype) -> int:
    """The same for all three kernels, so that they multiply with the same instruction."""
    return 16 if queries <= 16 else 32 if dtype == torch.float32 else 64


def key_block(width: int, dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 or width > 128 else 64


def _power(size: int) -> int:
    """The next power of two that tl.dot can take."""
    return max(16, 1 << (size - 1).bit_length())


# -- forward and backward ------------------------------------------------------------------------


def estimate(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, readout: bool) -> tuple[Estimate, Tensor]:
    """`reference.estimate`, and what the backward pass keeps of each row: (3 or 5, B, H, Q)."""
    from compactattn.fused import estimate as kernels

    q, k, v = (_rows_contiguous(x) for x in (q, k, v))
    out = q.new_empty((*q.shape[:3], v.shape[3]))
    kept = q.new_empty(kept_shape(q, code), dtype=torch.float32)
    support = q.new_empty(q.shape[:3] if readout else (0, 0, 0), dtype=torch.int32)
    if q.numel() == 0 or k.numel() == 0:
        out.zero_(), kept.fill_(-torch.inf), support.zero_()
    else:
        call = Call(q, k, v, scale, view, code)
        blocks = forward_blocks(*call.sizes)
        with _on(q):
            kernels.forward[call.grid(q, blocks.m)](
                q, k, v, out, kept, support, scale, call.slopes, view.at, view.lo, view.hi,
                *_strides(q, k, v, out), *call.steps,
                *call.lengths, call.margin, call.nearest,
                READOUT=readout, SINGLE=blocks.single, **call.constants, **_options(blocks),
            )  # fmt: skip
    if not readout:
        return Estimate(out, kept.new_empty((0, 0, 0)), support), kept
    peak, reach = kept[0], kept[1]
    return Estimate(out, torch.where(peak == -torch.inf, torch.inf, peak - reach), support), kept


def estimate_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code, kept: Tensor
) -> Gradients:
    """`reference.estimate_backward`, from what `estimate` kept."""
    from compactattn.fused import estimate as kernels

    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    do, q, k, v = (_rows_contiguous(x) for x in (do, q, k, v))
    if code[0] == 0 or q.numel() == 0 or k.numel() == 0:
        dq.zero_(), dk.zero_(), dv.zero_()
        dscale = torch.zeros_like(scale)
        if q.numel() == 0 or k.numel() == 0:
            return Gradients(dq, dk, dv, dscale, None, None)
    call = Call(q, k, v, scale, view, code)
    pulled = kept.new_empty((2, *q.shape[:3]))  # centre and share of each row
    blocks = backward_query_blocks(*call.sizes)
    with _on(q):
        if code[0] != 0:
            grid = call.grid(q, blocks.m)
            parts = kept.new_empty(grid)
            kernels.backward_queries[grid](
                do, q, k, v, dq, kept, pulled, parts, scale, call.slopes, view.at, view.lo, view.hi,
                *_strides(do, q, k, v, dq), *call.steps,
                *call.lengths, call.margin,
                SINGLE=blocks.single, **call.constants, **_options(blocks),
            )  # fmt: skip
            dscale = parts.view(q.shape[0], q.shape[1], -1).sum((0, 2))
        blocks = backward_key_blocks(*call.sizes)
        kernels.backward_keys[call.grid(k, blocks.n)](
            do, q, k, v, dk, dv, kept, pulled, scale, call.slopes, view.at, view.lo, view.hi,
            *_strides(do, q, k, v, dk, dv), *call.steps,
            *call.lengths, call.margin,
            CHUNK=1024, **call.constants, **_options(blocks),
        )  # fmt: skip
    return Gradients(dq, dk, dv, dscale, None, None)


def kept_shape(q: Tensor, code: Code) -> tuple[int, ...]:
    """(3 or 5, B, H, Q): the numbers that are kept of each row."""
    return (5 if code[1] == "nearest" else 3, *q.shape[:3])


class Call:
    """The arguments that the kernels share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, view: View, code: Code) -> None:
        r, rule, value = code
        batch, heads, queries, dim = q.shape
        keys, value_dim = v.shape[2:]
        self.sizes = queries, keys, max(_power(dim), _power(value_dim)), q.dtype
        self.slopes = scale if view.slopes is None else view.slopes.contiguous()
        self.steps = scale.stride(0), *(x.stride(0) if len(x) > 1 else 0 for x in (view.at, view.lo, view.hi))
        self.lengths = heads, queries, keys, batch * heads * queries
        self.margin, self.nearest = (0.0, min(int(value), keys)) if rule == "nearest" else (value, 0)
        self.constants: dict[str, Any] = {
            "RULE": CODES[rule], "R": r, "GROUP": heads // k.shape[1], "ALIBI": view.slopes is not None,
            "D": dim, "DV": value_dim, "BLOCK_D": _power(dim), "BLOCK_DV": _power(value_dim),
        }  # fmt: skip

    def grid(self, x: Tensor, block: int) -> tuple[int]:
        """One program for each block of rows of each head."""
        return (x.shape[0] * x.shape[1] * -(-x.shape[2] // block),)


def _options(blocks: Blocks) -> dict[str, Any]:
    """Without fused multiply-add a score has the same bits in every kernel."""
    return {
        "BLOCK_M": blocks.m, "BLOCK_N": blocks.n,
        "num_warps": blocks.warps, "num_stages": blocks.stages, "enable_fp_fusion": False,
    }  # fmt: skip


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(step for x in tensors for step in x.stride()[:3])


def _on(x: Tensor) -> AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
