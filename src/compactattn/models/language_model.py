"""The language model: embedding, blocks, norm, and the embedding again as output layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from compactattn.memory.inspection import Look
from compactattn.models.block import BLOCKS
from compactattn.models.config import GPT2_STD, ModelConfig
from compactattn.models.head import head_loss


class Cache(NamedTuple):
    """What the model keeps of a sequence: its length, and the past of every block."""

    length: int
    blocks: tuple[Any, ...]


class LanguageModel(nn.Module):
    """logits = scale · E norm(blocks(E[tokens])), with one embedding E for input and output.

    The output of Memory Mosaics is scaled: E starts as N(0, 1/C), scale = 1/√C. That of GPT-2 and all others is plain: E
    starts as N(0, 0.02²), scale = 1. `config.output` gives either to any of them, and `config.start` names other starts.
    RegBench's Mamba has no norm: logits = E mixer(E[tokens]).
    """

    EMBEDDING: tuple[str, ...] = ("embedding.weight",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        mosaic = config.architecture == "mosaic"
        self.config = config
        self.scale = config.width**-0.5 if config.scales_output else 1.0
        self.embedding = nn.Embedding(config.vocab, config.width)
        nn.init.normal_(self.embedding.weight, std=config.embedding_std)
        self.positions = nn.Embedding(config.longest, config.width) if config.positions == "learned" else None
        if self.positions is not None:
            nn.init.normal_(self.positions.weight, std=GPT2_STD)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.blocks = nn.ModuleList(BLOCKS[config.architecture](config) for _ in range(config.layers))
        self.norm = nn.Identity() if config.bare else nn.LayerNorm(config.width, bias=not mosaic)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T)."""
        return self.head(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        """(B, T, C): what the output layer sees."""
        x = self._embed(tokens, 0)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden vectors (..., C), in full precision: bf16 would tie the best with the second."""
        with torch.autocast(hidden.device.type, enabled=False):
            return linear(hidden.to(self.embedding.weight.dtype), self.embedding.weight) * self.scale

    def loss(self, inputs: Tensor, targets: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy over the counted positions, and their number, with at most head.CHUNK logits at a time."""
        hidden = self.hidden(inputs).flatten(0, 1)
        total = head_loss(hidden, self.embedding.weight, targets.flatten(), counted.flatten(), self.scale)
        return total, counted.sum()

    def compile_parts(self) -> None:
        """Compiles what surrounds attention, one graph for all blocks and every kernel, or a recurrent block as a whole."""
        for block in self.blocks:
            block.compile_parts()  # type: ignore[operator]

    def prefill(self, tokens: Tensor) -> tuple[Tensor, Cache]:
        """Logits (B, V) after the last of tokens (B, T), and a cache to go on from."""
        return self.advance(tokens, Cache(0, (None,) * len(self.blocks)))

    def step(self, token: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Logits (B, V) after one more token (B,)."""
        return self.advance(token[:, None], cache)

    def advance(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Cache]:
        """Logits (B, V) after the last of new tokens (B, T) that follow the cached ones."""
        x, kept = self._embed(tokens, cache.length), []
        for block, past in zip(self.blocks, cache.blocks, strict=True):
            x, past = block.advance(x, past)  # type: ignore[operator]
            kept.append(past)
        return self.head(self.norm(x[:, -1])), Cache(cache.length + tokens.shape[1], tuple(kept))

    def inspect(self, tokens: Tensor) -> list[Look]:
        """What the mixer of every block attends to."""
        return list(self.looks(tokens))

    def looks(self, tokens: Tensor) -> Iterator[Look]:
        """The same one block after another: the weights of a layer are (B, H, T, T), which is much for a long text."""
        x = self._embed(tokens, 0)
        for block in self.blocks:
            yield block.inspect(x)  # type: ignore[operator]
            x = block(x)

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is None:
            return self.dropout(x)
        end, longest = start + tokens.shape[1], self.config.longest
        if end > longest:
            raise ValueError(
                f"a sequence of {end} tokens is longer than the {longest} this model learned positions for; shorten it"
            )
        return self.dropout(x + self.positions.weight[start:end])


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """The model with its initial weights, which depend on the config and the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LanguageModel(config)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
