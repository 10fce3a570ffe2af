"""What attention is timed on: shapes, and queries and keys whose scores are mild, sharp, local or those of a memory.

Shapes: B batch, H heads, T time, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

TOKENS, HEADS = 32_768, 16  # batch · length, and heads, of every problem but the memory's
AMPLITUDE, SLOWEST, FASTEST = 1.7, 1e-4, 0.3  # of the positions in "local", at head dim 64; frequencies in turns per token


@dataclass(frozen=True)
class Problem:
    """Causal self-attention of one shape in one regime."""

    regime: str
    batch: int
    heads: int
    length: int
    head_dim: int

    @property
    def offset(self) -> int:
        """1 where a query may not see its own key, as in a contextual memory."""
        return int(self.regime == "memory")

    @property
    def scale(self) -> float:
        """1/√D, or e² where keys are unit vectors: the β² that a memory begins with."""
        return math.exp(2) if self.regime == "memory" else self.head_dim**-0.5


MEMORY = Problem("memory", batch=32, heads=12, length=512, head_dim=64)  # the paper's contextual memory


class Inputs(NamedTuple):
    """Queries, keys and values (B, H, T, D), each with a gradient, and the gradient of the output."""

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor


def draw(problem: Problem, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Inputs:
    """The inputs of a problem. They depend on the problem and the seed alone, for one kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.length, problem.head_dim)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    q, k = REGIMES[problem.regime](normal, shape)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, normal(*shape)))
    return Inputs(q, k, v, normal(*shape).to(dtype))


Normal = Callable[..., Tensor]
Shape = tuple[int, int, int, int]


def _draw_mild(normal: Normal, shape: Shape) -> tuple[Tensor, Tensor]:
    """q, k ~ N(0, 1): scores ~ N(0, 1), and nearly every tile holds a key that weighs something."""
    return normal(*shape), normal(*shape)


def _draw_sharp(normal: Normal, shape: Shape) -> tuple[Tensor, Tensor]:
    """The mild scores times 6."""
    return math.sqrt(6) * normal(*shape), math.sqrt(6) * normal(*shape)


def _draw_local(normal: Normal, shape: Shape) -> tuple[Tensor, Tensor]:
    """Neighbours attend to neighbours: half of the features are N(0, 1), the other half encode the position smoothly.

    Position t is (a cos ωt, a sin ωt) over geometrically spaced ω, for queries and keys alike, so that scores fall with
    the distance |t − t'|. The amplitude and the range of ω are chosen so that of the 64×64 tiles, for 1.5-entmax, about .6, .3
    and .2 hold a non-zero weight at lengths 2,048, 8,192 and 32,768 where D = 64. More features tell positions apart more
    sharply: with a ∝ D^(−1/3) about .4 and .15 do at the first two where D = 128, with the same a a third of that or less.
    """
    batch, heads, length, dim = shape
    content, pairs = dim - 2 * (dim // 4), dim // 4
    q, k = normal(batch, heads, length, content), normal(batch, heads, length, content)
    frequencies = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), pairs, dtype=torch.float64)
    angles = 2 * math.pi * torch.arange(length, dtype=torch.float64)[:, None] * frequencies  # (T, D/4)
    amplitude = AMPLITUDE * (64 / dim) ** (1 / 3)
    positions = amplitude * torch.cat([angles.cos(), angles.sin()], -1).to(q)
    positions = positions.expand(batch, heads, length, 2 * pairs)
    return torch.cat([q, positions], -1), torch.cat([k, positions], -1)


def _draw_memory(normal: Normal, shape: Shape) -> tuple[Tensor, Tensor]:
    """q ≡ k on the unit sphere, as in a contextual memory."""
    keys = normalize(normal(*shape), dim=-1)
    return keys, keys.clone()


REGIMES: dict[str, Callable[[Normal, Shape], tuple[Tensor, Tensor]]] = {
    "mild": _draw_mild,
    "sharp": _draw_sharp,
    "local": _draw_local,
    "memory": _draw_memory,
}
