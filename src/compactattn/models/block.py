"""One residual block around a mixer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from compactattn.kernels import parse
from compactattn.memory.contextual import ContextualMemory
from compactattn.memory.inspection import Look
from compactattn.memory.persistent import PersistentMemory
from compactattn.mixers.attention import SelfAttention
from compactattn.mixers.convolution import bilinear, draw_taps, start_inverse
from compactattn.mixers.gla import GLA
from compactattn.mixers.h3 import H3
from compactattn.mixers.mamba import Mamba
from compactattn.mixers.recurrence import Recurrence
from compactattn.mixers.retnet import NormalisedRetNet, RetNet
from compactattn.mixers.s4d import S4D
from compactattn.models.config import GPT2_STD, ModelConfig


class MLP(nn.Module):
    """W₂ gelu(W₁ x), four times as wide inside unless told otherwise."""

    def __init__(self, width: int, inner: int = 0) -> None:
        super().__init__()
        inner = inner or 4 * width
        self.to_inside, self.to_output = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_output(gelu(self.to_inside(x), approximate="tanh"))

    def advance(self, x: Tensor, past: None) -> tuple[Tensor, None]:
        return self(x), None


Mixer = ContextualMemory | SelfAttention | Recurrence
Store = PersistentMemory | MLP


class Block(nn.Module):
    """x + mixer(norm x), then x + store(norm x): the mixer looks along time, the store holds what was learned.

    In training each number that they add is dropped with probability `dropout`.
    """

    def __init__(self, mixer: Mixer, store: Store | None, width: int, *, bias: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.mixer_norm: nn.Module = nn.LayerNorm(width, bias=bias)
        self.store_norm = nn.LayerNorm(width, bias=bias) if store else None
        self.mixer, self.store = mixer, store

    def forward(self, x: Tensor) -> Tensor:
        features, _ = self.prepare(x, None, keep=False)
        return self.finish(x, self.mixer.regress(*features), None, keep=False)[0]

    def advance(self, x: Tensor, past: tuple[Any, Any] | None) -> tuple[Tensor, tuple[Any, Any]]:
        """The block at new positions that follow the past, and the past with them."""
        mixed, stored = past or (None, None)
        features, mixed = self.prepare(x, mixed, keep=True)
        x, stored = self.finish(x, self.mixer.regress(*features), stored, keep=True)
        return x, (mixed, stored)

    def prepare(self, x: Tensor, past: Any, keep: bool) -> tuple[tuple[Tensor, ...], Any]:
        """What attention takes, and what the mixer keeps, if it should: what training keeps for nothing costs memory."""
        return self.mixer.features(self.mixer_norm(x), past, keep)

    def finish(self, x: Tensor, y: Tensor, past: Any, keep: bool) -> tuple[Tensor, Any]:
        """The block from attention's estimate y on, and what the store keeps."""
        x = x + self.dropout(self.mixer.answer(y))
        if self.store is None or self.store_norm is None:
            return x, None
        y, past = self.store.advance(self.store_norm(x), past)
        return x + self.dropout(y), past if keep else None

    def compile_parts(self) -> None:
        """Compiles what surrounds attention, and recurrent mixers. Keys of self-attention are a view, better left as it is."""
        if not isinstance(self.mixer, SelfAttention):
            self.prepare = torch.compile(self.prepare, dynamic=False)  # type: ignore[method-assign]
        self.finish = torch.compile(self.finish, dynamic=False)  # type: ignore[method-assign]

    def inspect(self, x: Tensor) -> Look:
        """What the mixer attends to."""
        if isinstance(self.mixer, Recurrence):
            raise ValueError(
                f"{type(self.mixer).__name__} keeps a state and attends to nothing; only attention can be inspected"
            )
        return self.mixer.inspect(self.mixer_norm(x))


class BareBlock(Block):
    """mixer(x): no norm, no residual, no dropout. The only layer of RegBench's Mamba, which reads raw embeddings."""

    def __init__(self, mixer: Mixer, width: int) -> None:
        super().__init__(mixer, None, width, bias=False)
        self.mixer_norm = nn.Identity()

    def finish(self, x: Tensor, y: Tensor, past: Any, keep: bool) -> tuple[Tensor, Any]:
        return self.mixer.answer(y), None


def make_mosaic_block(config: ModelConfig) -> Block:
    """Contextual and persistent memory; no biases. Linear N(0, 1/fan_in), output projections divided by √layers."""
    alibi = config.positions == "alibi"
    mixer = ContextualMemory(
        config.width, config.heads, parse(config.kernel), alibi=alibi, as_released=config.as_released,
        dropout=config.attention_dropout, beta_squared=config.beta_squared,
    )  # fmt: skip
    store = PersistentMemory(config.width, config.heads, config.slots_per_head, dropout=config.persistent_dropout)
    block = Block(mixer, store, config.width, bias=False, dropout=config.dropout)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            shrink = math.sqrt(config.layers) if name.endswith("to_output") else 1.0
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / shrink)
    return block


def make_transformer_block(config: ModelConfig) -> Block:
    """GPT-2: attention and an MLP. Linear N(0, 0.02²), output projections divided by √(2 · layers), biases 0."""
    alibi = config.positions == "alibi"
    mixer = SelfAttention(config.width, config.heads, parse(config.kernel), alibi=alibi, dropout=config.attention_dropout)
    block = Block(mixer, MLP(config.width, config.inner), config.width, bias=True, dropout=config.dropout)
    start_as_gpt2(block, config.layers)
    return block


def start_as_gpt2(part: nn.Module, layers: int, outputs: str = "to_output") -> None:
    """Linear N(0, 0.02²), biases 0; those whose name ends as `outputs` does divided by √(2 · layers)."""
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear):
            shrink = math.sqrt(2 * layers) if name.endswith(outputs) else 1.0
            nn.init.normal_(module.weight, std=GPT2_STD / shrink)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


RECURRENCES: Mapping[str, Callable[[ModelConfig], Recurrence]] = {
    "s4d": lambda config: S4D(config.width, config.state or 64),
    "h3": lambda config: H3(config.width, config.state or 64),
    "gla": lambda config: GLA(config.width, config.heads),
    "retnet": lambda config: RetNet(config.width, config.heads),
    "mamba": lambda config: Mamba(config.width, config.state or 16, config.inner),
}


def make_recurrent_block(config: ModelConfig) -> Block:
    """A recurrent mixer with its own first weights, and GPT-2's MLP; Mamba does the work of both and has none."""
    mixer = RECURRENCES[config.architecture](config)
    store = None if config.architecture == "mamba" else MLP(config.width, config.inner)
    if store:
        start_as_gpt2(store, config.layers)
    return Block(mixer, store, config.width, bias=True, dropout=config.dropout)


def make_benchmark_block(config: ModelConfig, mixer: Recurrence, outputs: str = "to_output") -> Block:
    """A block of RegBench's code: a mixer and GPT-2's MLP, and every Linear of both starts as GPT-2's do."""
    block = Block(mixer, MLP(config.width, config.inner), config.width, bias=True, dropout=config.dropout)
    start_as_gpt2(block, config.layers, outputs)
    return block


BENCHMARK_BLOCKS: Mapping[str, Callable[[ModelConfig], Block]] = {
    "s4d": lambda config: make_benchmark_block(
        config, S4D(config.width, config.state or 64, gated=False, start=start_inverse, shared=True)
    ),
    # the benchmark's rule goes by names, and misses the one of H3's output projection
    "h3": lambda config: make_benchmark_block(
        config, H3(config.width, config.state or 64, taps=draw_taps, discretise=bilinear), outputs="store.to_output"
    ),
    "gla": lambda config: make_benchmark_block(config, GLA(config.width, config.heads)),
    "retnet": lambda config: make_benchmark_block(config, NormalisedRetNet(config.width, config.heads)),
    "mamba": lambda config: BareBlock(RECURRENCES["mamba"](config), config.width),
}
RECURRENT_BLOCKS: Mapping[str, Mapping[str, Callable[[ModelConfig], Block]]] = {
    "own": dict.fromkeys(RECURRENCES, make_recurrent_block),
    "benchmark": BENCHMARK_BLOCKS,
}
BLOCKS: Mapping[str, Callable[[ModelConfig], Block]] = {
    "mosaic": make_mosaic_block,
    "transformer": make_transformer_block,
    **dict.fromkeys(RECURRENCES, lambda config: RECURRENT_BLOCKS[config.form][config.architecture](config)),
}
