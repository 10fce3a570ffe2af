"""Tasks of length generalisation: how a sample is written, drawn, solved and read by people.

Every sample is `<bos> source <sep> target <eos>`. The prompt runs up to and including `<sep>`, the answer from there up to
and including `<eos>`. The loss counts the whole answer; an exact match judges only what a solver has to work out.

Shapes: B samples, T tokens, N source length, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np

from compactattn.data.draws import Array, Draws

Length = TypeVar("Length", int, Array)


@dataclass(frozen=True)
class Task:
    """Ids 0 … utilities − 1 structure a source, the `symbols` fill it, and <bos>, <sep>, <eos>, <pad> are the last four."""

    symbols: int
    name: ClassVar[str]
    utilities: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.symbols < 1:
            raise ValueError(f"symbols = {self.symbols} must be at least 1")

    @property
    def bos(self) -> int:
        return self.utilities + self.symbols

    @property
    def sep(self) -> int:
        return self.bos + 1

    @property
    def eos(self) -> int:
        return self.bos + 2

    @property
    def pad(self) -> int:
        return self.bos + 3

    @property
    def vocab(self) -> int:
        return self.bos + 4

    def prompt_length(self, length: Length) -> Length:
        """Tokens of the prompt for a source of `length`, with <bos> and <sep>."""
        raise NotImplementedError

    def answer_length(self, length: Length) -> Length:
        """Tokens of the answer for a source of `length`, with <eos>."""
        raise NotImplementedError

    def check(self, length: int) -> None:
        """Raises a ValueError unless sources of `length` can be drawn."""
        if length < 1:
            raise ValueError(f"a source of length {length} is empty; choose a length of at least 1")

    def tokens(self, draws: Draws, samples: Array, lengths: Array, longest: int) -> Array:
        """Samples with sources of `lengths` (B,), each padded as if its source had the `longest` length, (B, T) int32."""
        prompts, answers = self.prompt_length(lengths), self.answer_length(lengths)
        columns = np.arange(self.prompt_length(longest) + self.answer_length(longest))
        tokens = np.where(columns < (prompts + answers)[:, None], np.int32(0), np.int32(self.pad))
        rows = np.arange(len(samples))
        tokens[:, 0] = self.bos
        tokens[rows, prompts - 1] = self.sep
        tokens[rows, prompts + answers - 1] = self.eos
        self.fill(tokens, draws, samples, lengths, longest)
        return tokens

    def fill(self, tokens: Array, draws: Draws, samples: Array, lengths: Array, longest: int) -> None:
        """Writes sources and targets between <bos>, <sep> and <eos>."""
        raise NotImplementedError

    def masks(self, lengths: Array, width: int) -> tuple[Array, Array]:
        """Which of `width` positions are counted and which are judged, each (B, T) bool.

        The position before a token predicts it, so the answer's first token belongs to the position of <sep>.
        """
        offsets = np.arange(width) - (self.prompt_length(lengths)[:, None] - 1)
        last = self.answer_length(lengths)[:, None] - 1
        counted = (offsets >= 0) & (offsets <= last)
        return counted, counted & (offsets < last) & self.judges(offsets)

    def judges(self, offsets: Array) -> Array:
        """Whether an exact match depends on the token at each offset of the target."""
        return np.ones_like(offsets, dtype=bool)

    def split(self, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
        """Prompt, with <bos> and <sep>, and answer, with <eos> and without padding."""
        words = [int(token) for token in tokens]
        if self.sep not in words:
            raise ValueError(f"no <sep> (token {self.sep}) in a sequence of {len(words)} tokens; it ends the prompt")
        end = words.index(self.sep) + 1
        answer = words[end:]
        return words[:end], answer[: answer.index(self.eos) + 1] if self.eos in answer else answer

    def solve(self, prompt: Sequence[int]) -> list[int]:
        """The right answer to a prompt, with <eos>, read off the prompt alone."""
        return [*self.target(self._inside(prompt)), self.eos]

    def target(self, source: list[int]) -> list[int]:
        """What follows <sep> for what stands between <bos> and <sep>; plain code that shares nothing with `fill`."""
        raise NotImplementedError

    def render(self, tokens: Sequence[int]) -> str:
        """Tokens as text: symbols as the numbers 0, 1, …, utility tokens in brackets, as in `<bos> 17 3 [1] 9 40 [0]`."""
        return " ".join(self._word(int(token)) for token in tokens)

    def read(self, text: str) -> list[int]:
        """Tokens of a text as `render` writes it."""
        ids = {self._word(token): token for token in range(self.vocab)}
        tokens = []
        for place, word in enumerate(text.split(), start=1):
            if word not in ids:
                brackets = f", [0] to [{self.utilities - 1}]" if self.utilities else ""
                raise ValueError(
                    f"word {place}, {word!r}, is not a token of {self.name}; "
                    f"write numbers from 0 to {self.symbols - 1}{brackets}, <bos>, <sep>, <eos> or <pad>"
                )
            tokens.append(ids[word])
        return tokens

    def read_prompt(self, text: str) -> list[int]:
        """Tokens of a prompt; a person may leave out <bos> and <sep>."""
        tokens = self.read(text)
        start = [] if tokens[:1] == [self.bos] else [self.bos]
        end = [] if tokens[-1:] == [self.sep] else [self.sep]
        prompt = [*start, *tokens, *end]
        if not self._inside(prompt):
            raise ValueError(f"the prompt {text!r} holds no source; write at least one symbol")
        return prompt

    def _inside(self, prompt: Sequence[int]) -> list[int]:
        """What stands between <bos> and <sep>."""
        tokens = [int(token) for token in prompt]
        if len(tokens) < 2 or tokens[0] != self.bos or tokens[-1] != self.sep:
            ends = self.render([*tokens[:1], *tokens[-1:]])
            raise ValueError(f"a prompt runs from <bos> to <sep>, got {len(tokens)} tokens that begin and end with {ends!r}")
        for token in tokens[1:-1]:
            if token >= self.bos:
                raise ValueError(f"{self._word(token)} cannot stand inside a prompt, between <bos> and <sep>")
        return tokens[1:-1]

    def _word(self, token: int) -> str:
        if not 0 <= token < self.vocab:
            raise ValueError(f"token {token} is not one of the {self.vocab} tokens of {self.name} (0 to {self.vocab - 1})")
        if token < self.utilities:
            return f"[{token}]"
        if token < self.bos:
            return str(token - self.utilities)
        return ("<bos>", "<sep>", "<eos>", "<pad>")[token - self.bos]


@dataclass(frozen=True)
class Rearrangement(Task):
    """A source of independent symbols, and a target of the same symbols in another order."""

    symbols: int = 32

    def prompt_length(self, length: Length) -> Length:
        return length + 2

    def answer_length(self, length: Length) -> Length:
        return length + 1

    def fill(self, tokens: Array, draws: Draws, samples: Array, lengths: Array, longest: int) -> None:
        sources = draws.below(self.symbols, "symbols", samples, longest)  # (B, N)
        inside = np.arange(longest) < lengths[:, None]
        tokens[:, 1 : longest + 1][inside] = sources[inside]
        starts = np.arange(len(samples)) * tokens.shape[1] + self.prompt_length(lengths)
        tokens.reshape(-1)[(starts[:, None] + np.arange(longest))[inside]] = self.arrange(sources, lengths)[inside]

    def arrange(self, sources: Array, lengths: Array) -> Array:
        """The targets of sources (B, N), of which only the first `lengths` symbols count."""
        raise NotImplementedError


@dataclass(frozen=True)
class Copy(Rearrangement):
    """The target is the source:

    <bos> 7 31 0 7 2 <sep> 7 31 0 7 2 <eos>
    """

    name: ClassVar[str] = "copy"

    def arrange(self, sources: Array, lengths: Array) -> Array:
        return sources

    def target(self, source: list[int]) -> list[int]:
        return source


@dataclass(frozen=True)
class Reverse(Rearrangement):
    """The target is the source backwards:

    <bos> 7 31 0 7 2 <sep> 2 7 0 31 7 <eos>
    """

    name: ClassVar[str] = "reverse"

    def arrange(self, sources: Array, lengths: Array) -> Array:
        backwards = lengths[:, None] - 1 - np.arange(sources.shape[1])
        return np.take_along_axis(sources, backwards.clip(0), axis=1)

    def target(self, source: list[int]) -> list[int]:
        return source[::-1]


@dataclass(frozen=True)
class Sort(Rearrangement):
    """The target is the source in ascending order, repetitions included:

    <bos> 7 31 0 7 2 <sep> 0 2 7 7 31 <eos>
    """

    name: ClassVar[str] = "sort"

    def arrange(self, sources: Array, lengths: Array) -> Array:
        beyond = np.arange(sources.shape[1]) >= lengths[:, None]
        return np.sort(np.where(beyond, self.symbols, sources).astype(np.int32), axis=1)

    def target(self, source: list[int]) -> list[int]:
        return sorted(source)
