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
from compactattn.mixers.gla import GLA
from compactattn.mixers.h3 import H3
from compactattn.mixers.mamba import Mamba
from compactattn.mixers.recurrence import Recurrence
from compactattn.mixers.retnet import RetNet
from compactattn.mixers.s4d import S4D
from compactattn.models.config import ModelConfig


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
        self.mixer_norm = nn.LayerNorm(width, bias=bias)
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


def make_mosaic_block(config: ModelConfig) -> Block:
    """Contextual and persistent memory; no biases. Linear N(0, 1/fan_in), output projections divided by √layers."""
    alibi = config.positions == "alibi"
    mixer = ContextualMemory(
        config.width, config.heads, parse(config.kernel), alibi=alibi, as_released=config.as_released, dropout=config.dropout
    )
    store = PersistentMemory(config.width, config.heads, config.slots_per_head)
    block = Block(mixer, store, config.width, bias=False, dropout=config.dropout)
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear):
            shrink = math.sqrt(config.layers) if name.endswith("to_output") else 1.0
            nn.init.normal_(module.weight, std=module.in_features**-0.5 / shrink)
    return block


def make_transformer_block(config: ModelConfig) -> Block:
    """GPT-2: attention and an MLP. Linear N(0, 0.02²), output projections divided by √(2 · layers), biases 0."""
    alibi = config.positions == "alibi"
    mixer = SelfAttention(config.width, config.heads, parse(config.kernel), alibi=alibi, dropout=config.dropout)
    block = Block(mixer, MLP(config.width, config.inner), config.width, bias=True, dropout=config.dropout)
    start_as_gpt2(block, config.layers)
    return block


def start_as_gpt2(part: nn.Module, layers: int) -> None:
    for name, module in part.named_modules():
        if isinstance(module, nn.Linear):
            shrink = math.sqrt(2 * layers) if name.endswith("to_output") else 1.0
            nn.init.normal_(module.weight, std=0.02 / shrink)
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


BLOCKS: Mapping[str, Callable[[ModelConfig], Block]] = {
    "mosaic": make_mosaic_block,
    "transformer": make_transformer_block,
    **dict.fromkeys(RECURRENCES, make_recurrent_block),
}
