"""Tokens after tokens, with a cache, and the text that they spell.

Shapes: B prompts, T time, V vocabulary.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from compactattn.models.language_model import LanguageModel

SEEDS = 2**62  # of rows: more than anyone will draw


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits z, in this order; the likeliest token always stays.

    temperature: p = softmax(z / temperature). At 0 the likeliest token is taken, whatever the others say.
    top_k: the k likeliest tokens stay, and those that tie with the last of them. 0 keeps all.
    top_p: of what is left, renormalised, the fewest likeliest tokens whose mass reaches top_p stay. 1 keeps all.
    min_p: of what is left, tokens with p ≥ min_p · max p stay. 0 keeps all.
    The token is drawn from what stayed, in proportion to p.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature} must be 0 (the likeliest token) or a positive number")
        if self.top_k != int(self.top_k) or self.top_k < 0:
            raise ValueError(f"top_k = {self.top_k} must be a whole number: 0 (all tokens) or how many to keep")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p = {self.top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p = {self.min_p} must lie between 0 (all tokens) and 1")

    def probabilities(self, logits: Tensor) -> Tensor:
        """What a token is drawn from (B, V), in fp64, for a temperature above 0."""
        z = logits.double()
        z = (z - z.amax(-1, keepdim=True)) / self.temperature  # at most 0: no temperature overflows
        if 0 < self.top_k < z.shape[-1]:
            z = z.masked_fill(z < z.topk(self.top_k).values[:, -1:], -math.inf)
        if self.top_p < 1:
            z = z.masked_fill(~_nucleus(z.softmax(-1), self.top_p), -math.inf)
        if self.min_p > 0:
            z = z.masked_fill(z < math.log(self.min_p), -math.inf)  # z = log(p / max p)
        return z.softmax(-1)


def _nucleus(p: Tensor, mass: float) -> Tensor:
    """The fewest likeliest tokens whose probabilities reach `mass`: those with less than it before them."""
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked
    return torch.zeros_like(p, dtype=torch.bool).scatter(-1, order, before < mass)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor | None = None) -> Tensor:
    """One token (B,) for each row of logits (B, V): the likeliest, or the one that `uniform` (B,) in [0, 1) falls on."""
    if sampling.temperature == 0 or uniform is None:
        return logits.argmax(-1)
    reached = sampling.probabilities(logits).cumsum(-1)
    # the first token whose sum is above the mark: none of probability 0 is
    return torch.searchsorted(reached, uniform[:, None] * reached[:, -1:], right=True)[:, 0]


# -- tokens --------------------------------------------------------------------------------------


def generate(
    model: LanguageModel,
    prompt: Tensor | Sequence[Sequence[int]],
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    stop: int | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yields the next token (B,) of every prompt, `tokens` times or until every row has stopped.

    Args:
        model: in evaluation mode.
        prompt: token ids (B, T), or a list of B lists, which may differ in length.
        tokens: the most to write after each prompt.
        temperature: 0 takes the likeliest token, 1 draws as the model believes; see `Sampling`, also for top_k, top_p, min_p.
        stop: a row that has written this token has stopped, and is padded with it.
        seed: of the draws. Each row has draws of its own, by its number: neither the other rows nor the device matter.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    groups = _group(model, prompt)
    if tokens < 1:
        raise ValueError(f"tokens = {tokens} must be at least 1")
    if stop is not None and not 0 <= stop < model.config.vocab:
        raise ValueError(f"stop = {stop} is not one of the model's {model.config.vocab} tokens (0 to {model.config.vocab - 1})")
    return _generate(model, groups, tokens, sampling, stop, seed)


Group = tuple[Tensor, Tensor]  # numbers of the rows (b,), and their prompts of one length (b, T)


def _group(model: LanguageModel, prompt: Tensor | Sequence[Sequence[int]]) -> list[Group]:
    """Prompts of equal length together, on the model's device: padding would be seen by a model that knows none."""
    device = model.embedding.weight.device
    if isinstance(prompt, Tensor):
        if prompt.ndim != 2 or 0 in prompt.shape:
            shape = tuple(prompt.shape)
            raise ValueError(f"a prompt is (batch, time) with at least one row and one token, got shape {shape}")
        groups = [(torch.arange(len(prompt), device=device), prompt.to(device))]
    else:
        lengths: dict[int, list[int]] = {}
        for row, ids in enumerate(prompt):
            lengths.setdefault(len(ids), []).append(row)
        if not lengths or 0 in lengths:
            given = f"prompt {lengths[0][0]} is empty" if lengths else "no prompt was given"
            raise ValueError(f"{given}; give at least one prompt, each with at least one token")
        groups = [
            (torch.tensor(rows, device=device), torch.tensor([list(prompt[row]) for row in rows], device=device))
            for rows in lengths.values()
        ]
    for _, prompts in groups:
        _check(model, prompts)
    return groups


def _check(model: LanguageModel, ids: Tensor) -> None:
    vocab, longest = model.config.vocab, model.config.longest
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"a prompt holds token ids, which are whole numbers, got {ids.dtype}")
    low, high = (int(x) for x in ids.aminmax())
    if low < 0 or high >= vocab:
        wrong = low if low < 0 else high
        raise ValueError(f"token {wrong} of a prompt is not one of the model's {vocab} tokens (0 to {vocab - 1})")
    if model.positions is not None and ids.shape[1] > longest:
        raise ValueError(
            f"a prompt of {ids.shape[1]} tokens is longer than the {longest} this model learned positions for; shorten it"
        )


@torch.inference_mode()
def _generate(
    model: LanguageModel, groups: list[Group], tokens: int, sampling: Sampling, stop: int | None, seed: int
) -> Iterator[Tensor]:
    device, rows = groups[0][1].device, sum(len(numbers) for numbers, _ in groups)
    sources = _seed_rows(rows, seed) if sampling.temperature > 0 else []
    going = torch.ones(rows, dtype=torch.bool, device=device)
    active = [(numbers, *model.prefill(ids)) for numbers, ids in groups]
    token = torch.full((rows,), 0 if stop is None else stop, device=device)
    for count in range(1, tokens + 1):
        uniform = _draw(sources, device) if sources else None
        for numbers, logits, _ in active:
            chosen = choose(logits, sampling, None if uniform is None else uniform[numbers])
            token[numbers] = torch.where(going[numbers], chosen, token[numbers])  # a stopped row stays at its stop
        yield token.clone()
        if stop is not None:
            going &= token != stop
            active = [part for part in active if bool(going[part[0]].any())]
        if count == tokens or not active:
            return
        active = [(numbers, *model.step(token[numbers], cache)) for numbers, _, cache in active]


def _seed_rows(rows: int, seed: int) -> list[torch.Generator]:
    """A source of draws for each row, the same however many rows there are."""
    seeds = torch.randint(SEEDS, (rows,), generator=torch.Generator().manual_seed(seed))
    return [torch.Generator().manual_seed(int(seed)) for seed in seeds]


def _draw(sources: list[torch.Generator], device: torch.device) -> Tensor:
    return torch.stack([torch.rand((), generator=source, dtype=torch.float64) for source in sources]).to(device)


# -- text ----------------------------------------------------------------------------------------


class Tokenizer(Protocol):
    """What text is made of, as tokens."""

    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int:
        """The token after every text."""
        ...

    def encode(self, text: str, /) -> list[int]: ...
    def to_bytes(self, tokens: list[int], /) -> bytes: ...


class TextStream(Iterator[str]):
    """Text as a model writes it: iterate for pieces of whole characters, which joined are the text.

    A token may end inside a character, whose other bytes then come with later tokens; the piece waits for them.
    Bytes that are no UTF-8 read as U+FFFD. The text stops at the end token, or shows it and goes on if told not to.
    """

    def __init__(self, written: Iterator[Tensor] | Iterator[int], tokenizer: Tokenizer, stop: bool = True) -> None:
        self.tokens: list[int] = []  # written so far, the end token included
        self.ended = False  # whether the model itself ended the text
        self._pieces = self._read(written, tokenizer, stop)

    def __next__(self) -> str:
        return next(self._pieces)

    def _read(self, written: Iterator[Tensor] | Iterator[int], tokenizer: Tokenizer, stop: bool) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in written:
            self.tokens.append(int(token))
            ends = self.tokens[-1] == tokenizer.end
            self.ended = self.ended or ends
            if ends and stop:
                break
            if piece := decoder.decode(tokenizer.to_bytes(self.tokens[-1:])):
                yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece


def stream_text(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str = "",
    tokens: int = 256,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> TextStream:
    """How a model goes on with a text, piece by piece, until it ends it or has written `tokens` tokens.

    An empty prompt starts a new text: the end token stands before each in training. The prompt is not repeated.
    """
    if tokenizer.vocab != model.config.vocab:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab} tokens and the model {model.config.vocab}; use the one it was trained with"
        )
    ids = tokenizer.encode(prompt) or [tokenizer.end]
    written = generate(
        model, [ids], tokens,
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, stop=tokenizer.end, seed=seed,
    )  # fmt: skip
    return TextStream(written, tokenizer)
