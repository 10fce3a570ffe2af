"""Tokens after tokens, with a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from compactattn.models.language_model import LanguageModel


@torch.inference_mode()
def generate(
    model: LanguageModel, prompt: Tensor, tokens: int, *, temperature: float = 0.0, stop: int | None = None, seed: int = 0
) -> Iterator[Tensor]:
    """Yields the next token (B,) of every row of a prompt (B, T), `tokens` times or until every row has stopped.

    temperature = 0 takes the likeliest token; otherwise one is drawn from softmax(logits / temperature).
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"a prompt is (batch, time) with at least one token, got shape {tuple(prompt.shape)}")
    if temperature < 0:
        raise ValueError(f"temperature = {temperature} must be 0 (the likeliest token) or positive")
    generator = torch.Generator(prompt.device).manual_seed(seed)
    stopped = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    logits, cache = model.prefill(prompt)
    for count in range(1, tokens + 1):
        token = choose(logits, temperature, generator)
        yield token
        stopped |= token == (-1 if stop is None else stop)
        if count == tokens or (stop is not None and bool(stopped.all())):
            return
        logits, cache = model.step(token, cache)


def choose(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """One token (B,) for each row of logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)[:, 0]
