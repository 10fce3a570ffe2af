"""Who is compared: ours, and every peer that computes the same on a GPU.

A contestant computes one or more kernels of the family; what it cannot compute, nobody asks of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from compactattn.attention import attend
from compactattn.bench.regimes import Inputs, Problem
from compactattn.kernels import Kernel, parse, split_names
from compactattn.masks import Causal
from compactattn.training.config import RunError

AUTOTUNING = 5, 20  # ms to warm up and to measure each variant of AdaSplash-2
KERNELS = (
    "sparsemax", "biweight", "triweight", "relumax(1)", "relumax(2)", "relumax(3)",
    "norm_relu", "gaussian", "topk_softmax(32)",
)  # fmt: skip
Call = Callable[[Tensor, Tensor, Tensor, float, int], Tensor]  # (q, k, v, scale, offset of the causal mask) → output


@dataclass(frozen=True)
class Contestant:
    """One implementation of attention."""

    name: str
    about: str
    prepare: Callable[[Kernel], Call | None]  # None where it does not compute the kernel
    package: str = ""  # that must be installed
    strict: bool = False  # can hide a query's own key; else it is timed with the plain causal mask
    longest: int = 2**31
    regimes: tuple[str, ...] = ("mild", "sharp", "local", "memory")  # where its time says something new
    slow: bool = False  # to compile or to run: its turn comes last
    compiles: Literal["", "once", "lengths"] = ""  # Triton kernels, once for a head dim or for each length too
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None


@dataclass(frozen=True)
class Cell:
    """One contestant with one kernel on one problem: a row of the results."""

    problem: Problem
    contestant: Contestant
    kernel: str

    @property
    def offset(self) -> int:
        return self.problem.offset if self.contestant.strict else 0

    @property
    def call(self) -> Call:
        prepared = self.contestant.prepare(parse(self.kernel))
        assert prepared is not None
        return prepared


def run_both(call: Call, inputs: Inputs, scale: float, offset: int) -> tuple[Tensor, ...]:
    """(output, dq, dk, dv)."""
    q, k, v, do = inputs
    out = call(q, k, v, scale, offset)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), do.detach()))


def name_kernels(text: str) -> list[str]:
    """Kernels in a text, separated by commas; each that is one of ours above by its name there, "all" for all of those."""
    known = {parse(name): name for name in KERNELS}
    try:
        named = [known.get(parse(name), name) for name in (KERNELS if text == "all" else split_names(text))]
    except ValueError as error:
        raise RunError(str(error)) from error
    if not named:
        raise RunError("name at least one kernel, as in --kernels biweight,sparsemax")
    return list(dict.fromkeys(named))


def _prepare_ours(kernel: Kernel) -> Call:
    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return attend(q, k, v, kernel, scale=scale, mask=Causal(offset), backend="fused")

    return call


def _prepare_sdpa(kernel: Kernel) -> Call | None:
    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    return call if kernel == SOFTMAX else None


def _prepare_flex(kernel: Kernel) -> Call | None:
    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return _compile_flex()(q, k, v, block_mask=_make_block_mask(q.shape[2], offset, q.device), scale=scale)

    return call if kernel == SOFTMAX else None


@cache
def _compile_flex() -> Callable[..., Tensor]:
    import torch._dynamo.config
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.config.recompile_limit = 64  # one graph for each shape; beyond the limit it would run uncompiled
    return torch.compile(flex_attention, dynamic=False)


@cache
def _make_block_mask(length: int, offset: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda b, h, i, j: i - offset >= j, None, None, length, length, device=device)


def _prepare_adasplash_1(kernel: Kernel) -> Call | None:
    alpha = ALPHAS.get(kernel)

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return import_module("adasplash").adasplash_v1(_absorb(q, scale), k, v, alpha=alpha, is_causal=True)

    return None if alpha is None else call


def _prepare_adasplash_2(kernel: Kernel) -> Call | None:
    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        return _load_adasplash().adasplash_v2(_absorb(q, scale), k, v)

    return call if kernel == parse("biweight") else None


@cache
def _load_adasplash() -> Any:
    warmup, rep = AUTOTUNING
    shorten_autotuning(partial(import_module("triton.testing").do_bench, warmup=warmup, rep=rep))
    return import_module("adasplash")


def shorten_autotuning(bench: Callable[..., Any]) -> None:
    """AdaSplash-2 chooses among its own variants by this clock; the usual one takes ten seconds for each length."""
    if CONTESTANTS["adasplash-2"].installed:
        for tuner in vars(import_module("adasplash.adasplash_v2")).values():
            if type(tuner).__name__ == "Autotuner" and tuner._do_bench is None:
                tuner._do_bench = bench


def _absorb(q: Tensor, scale: float) -> Tensor:
    """Queries for a function whose scale is 1/√D whatever one wants."""
    factor = scale * math.sqrt(q.shape[-1])
    return q if math.isclose(factor, 1.0) else q * factor


def _prepare_entmax(kernel: Kernel) -> Call | None:
    alpha = ALPHAS.get(kernel)

    def call(q: Tensor, k: Tensor, v: Tensor, scale: float, offset: int) -> Tensor:
        import entmax

        transform = {2.0: entmax.sparsemax, 1.5: entmax.entmax15}.get(alpha or 0.0, lambda s: entmax.entmax_bisect(s, alpha))
        legal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
        scores = q.float() @ k.float().mT * scale  # scores rounded to bf16 move the support: gradients err by a tenth
        return transform(scores.masked_fill(~legal, -math.inf)).to(v.dtype) @ v

    return None if alpha is None else call


SOFTMAX = parse("gaussian")
ALPHAS = {parse("sparsemax"): 2.0, parse("biweight"): 1.5, parse("triweight"): 4 / 3}
OURS = Contestant("ours", "attend(), fused", _prepare_ours, strict=True, compiles="once")
PEERS = (
    Contestant("sdpa-cudnn", "PyTorch SDPA, cuDNN backend", _prepare_sdpa,
               context=lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
    Contestant("sdpa-flash", "PyTorch SDPA, flash backend", _prepare_sdpa, regimes=("mild", "memory"),
               context=lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
    Contestant("adasplash-2", "PyPI adasplash, adasplash_v2", _prepare_adasplash_2, "adasplash", compiles="lengths"),
    Contestant("flex", "PyTorch FlexAttention, compiled", _prepare_flex, strict=True, regimes=("mild", "memory"), slow=True),
    Contestant("adasplash-1", "PyPI adasplash, adasplash_v1", _prepare_adasplash_1, "adasplash", longest=8192, slow=True),
    Contestant("entmax", "PyPI entmax on a dense matrix of scores", _prepare_entmax, "entmax", longest=2048,
               regimes=("mild", "memory"), slow=True),
)  # fmt: skip
CONTESTANTS = {contestant.name: contestant for contestant in (OURS, *PEERS)}
