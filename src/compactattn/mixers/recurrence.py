"""What the recurrent mixers share: a state carried along time, in parallel for training and step by step for generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Recurrence(nn.Module):
    """A mixer y, state = f(x, state). A subclass gives its definition, `step`, and the same in parallel, `advance`.

    A state is a tuple of tensors (B, …), or None before the first position.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C), parallel in time."""
        return self.advance(x, None)[0]

    def advance(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        """The answer at new positions (B, T, C) that follow the past, and the state after them; no loop over time."""
        raise NotImplementedError

    def step(self, x: Tensor, past: Any) -> tuple[Tensor, Any]:
        """The definition: the answer at one position (B, C), and the state after it."""
        raise NotImplementedError

    def recur(self, x: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """`advance` by its definition, one position after another."""
        answers = []
        for x_t in x.unbind(1):
            y, past = self.step(x_t, past)
            answers.append(y)
        return torch.stack(answers, 1), past

    # -- what a block asks of every mixer: here nothing stands between features and answer

    def features(self, x: Tensor, past: Any, keep: bool = True) -> tuple[tuple[Tensor, ...], Any]:
        if x.shape[1] == 1 and past is not None:
            y, past = self.step(x[:, 0], past)
            return (y[:, None],), past
        y, past = self.advance(x, past)
        return (y,), past if keep else None

    def regress(self, y: Tensor) -> Tensor:
        return y

    def answer(self, y: Tensor) -> Tensor:
        return y
