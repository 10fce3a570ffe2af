"""A prepared corpus: two streams of tokens on disk, and the windows that training and evaluation cut out of them.

    stream    … story . <end> another story . <end> …      documents one after another
    inputs        story . <end> another                     a window of T tokens, wherever it falls
    targets             . <end> another story               the token that follows each of them

Shapes: B batch, T time.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compactattn.data.batches import Batch
from compactattn.data.draws import Array, Draws
from compactattn.data.meta import JOURNAL, META, RANKS, SPLITS, VERSION, read_meta
from compactattn.data.sources import hash_file, name_corpus
from compactattn.data.tokenizers import RanksError, Tokenizer, load_tokenizer

TOKENS_AT_ONCE = 1 << 24
OPENING = 256  # tokens that tell a document from others


@dataclass(frozen=True, eq=False)
class Corpus:
    """A folder of `compactattn data`. The streams are read from disk as they are needed."""

    folder: Path
    train: Array = field(repr=False)  # (tokens,) uint16
    validation: Array = field(repr=False)  # (tokens,) uint16
    meta: dict[str, Any] = field(repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Corpus:
        """Reads meta.json and checks the size of the streams against it; `verify` checks every byte."""
        folder = Path(folder)
        try:
            meta = read_meta(folder)
        except NotADirectoryError:
            raise ValueError(
                f"{str(folder)!r} is a file, not a prepared corpus; prepare it:"
                f" compactattn data text {shlex.quote(str(folder))} --out {shlex.quote(f'data/{name_corpus(folder)}')}"
            ) from None
        except FileNotFoundError:
            if (folder / JOURNAL).is_file():
                raise ValueError(f"the corpus in {str(folder)!r} is unfinished; run the command that began it again") from None
            if not folder.exists():
                raise ValueError(
                    f"{str(folder)!r} does not exist; name the folder of a prepared corpus, or make one, as in:"
                    f" compactattn data demo-stories --out {shlex.quote(str(folder))}"
                ) from None
            raise ValueError(
                f"{str(folder)!r} is no prepared corpus: it has no {META}; make one, as in: compactattn data demo-stories"
            ) from None
        if meta.get("version") != VERSION:
            raise ValueError(
                f"{str(folder)!r} has version {meta.get('version')} of the format, this is version {VERSION}; prepare it again"
            )
        train, validation = (_open_stream(folder, meta["splits"][split]) for split in SPLITS)
        return cls(folder, train, validation, meta)

    @property
    def tokenizer(self) -> str:
        return self.meta["tokenizer"]["name"]

    @property
    def vocab(self) -> int:
        return self.meta["tokenizer"]["vocab"]

    @property
    def end(self) -> int:
        """The token after each document."""
        return self.meta["tokenizer"]["end"]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text for each token of the validation stream (of training, if there is none), document ends included.

        loss in nats / (ln 2 · bytes_per_token) is in bits per byte, which compares between tokenizers.
        """
        splits = self.meta["splits"]
        split = splits["validation"] if splits["validation"]["tokens"] else splits["train"]
        return split["bytes"] / split["tokens"]

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, from the folder's own copy of its ranks."""
        tokenizer = load_tokenizer_of(self.folder, self.tokenizer)
        self.require(tokenizer)
        return tokenizer

    def require(self, tokenizer: Tokenizer) -> None:
        """Raises a ValueError unless the tokens are of this tokenizer."""
        if (tokenizer.name, tokenizer.hash) != (self.tokenizer, self.meta["tokenizer"]["sha256"]):
            raise ValueError(
                f"the tokens in {str(self.folder)!r} are of tokenizer {self.tokenizer!r}"
                f" ({self.meta['tokenizer']['sha256'][:8]}…), not of {tokenizer.name!r} ({tokenizer.hash[:8]}…);"
                " prepare the text with that one"
            )

    def verify(self, splits: Sequence[str] = SPLITS) -> None:
        """Reads every byte, and raises a ValueError unless all are as they were written and each id is in the vocabulary."""
        streams = dict(zip(SPLITS, (self.train, self.validation), strict=True))
        for split in splits:
            stream = streams[split]
            path = self.folder / self.meta["splits"][split]["file"]
            if hash_file(path) != self.meta["splits"][split]["sha256"]:
                raise _damaged(path, "its checksum is not the one in meta.json")
            for first in range(0, len(stream), TOKENS_AT_ONCE):
                if (largest := int(stream[first : first + TOKENS_AT_ONCE].max())) >= self.vocab:
                    raise _damaged(path, f"it holds id {largest}, and the vocabulary has {self.vocab}")

    def windows(self, length: int, seed: int) -> Windows:
        """Random windows of the training stream."""
        return Windows(self.train, length, seed, self.vocab)


def _open_stream(folder: Path, split: dict[str, Any]) -> Array:
    path = folder / split["file"]
    if not path.is_file():
        raise _damaged(path, "it is missing")
    if (size := path.stat().st_size) != 2 * split["tokens"]:
        raise _damaged(path, f"it has {size} bytes, not the {2 * split['tokens']} of its {split['tokens']} tokens")
    return np.memmap(path, "<u2", "r") if size else np.empty(0, "<u2")  # no file of 0 bytes can be mapped


def _damaged(path: Path, why: str) -> ValueError:
    return ValueError(f"{str(path)!r} is not as it was prepared: {why}; delete the folder and prepare the corpus again")


def load_tokenizer_of(folder: Path, name: str) -> Tokenizer:
    """The tokenizer of a corpus: from the ranks beside its tokens, or wherever tiktoken keeps them."""
    ranks = folder / RANKS
    try:
        return load_tokenizer(name, ranks if name != "bytes" and ranks.is_file() else None)
    except RanksError as error:
        raise RanksError(error.trouble, f"put the published r50k_base.tiktoken at {str(ranks)!r}") from error


def read_openings(tokens: Array, end: int) -> Iterator[bytes]:
    """The first tokens of each document of a stream, the last one's too if it has no end."""
    tokens, first = np.asarray(tokens), 0  # slices of a memory map take several times as long
    for last in (*np.flatnonzero(tokens == end).tolist(), len(tokens)):
        if last > first:
            yield tokens[first : min(last, first + OPENING)].tobytes()
        first = last + 1


# -- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Windows:
    """An endless stream of random windows. Sample i starts at a hash of (seed, i), and every position counts."""

    tokens: Array  # (tokens,), kept on disk
    length: int  # T
    seed: int
    ids: int = 0  # in the vocabulary; 0 takes the largest that occurs + 1

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.length)
        if not self.ids:
            object.__setattr__(self, "ids", int(self.tokens.max()) + 1)

    @property
    def vocab(self) -> int:
        return self.ids

    def starts(self, first: int, count: int) -> Array:
        """Where samples first … first + count − 1 begin, (B,) int64."""
        if first < 0 or count < 0:
            raise ValueError(f"samples are numbered from 0, got {count} samples from number {first}")
        samples = np.arange(first, first + count, dtype=np.uint64)
        bits = Draws(f"windows|{self.seed}").bits("start", samples, 1)[:, 0]
        return (bits % np.uint64(len(self.tokens) - self.length)).view(np.int64)

    def batch(self, first: int, count: int) -> Batch:
        """Samples first … first + count − 1."""
        return cut_windows(self.tokens, self.starts(first, count), self.length)


def fixed_windows(tokens: Array, length: int, count: int) -> Batch:
    """`count` windows spread evenly from the beginning of the stream to its end, always the same: for validation.

    They overlap where count · length is more than the stream has.
    """
    _check_length(tokens, length)
    if count < 1:
        raise ValueError(f"count = {count} windows are none; choose at least 1")
    last = len(tokens) - length - 1
    starts = np.array([last * number // max(count - 1, 1) for number in range(count)], np.int64)
    return cut_windows(tokens, starts, length)


def cut_windows(tokens: Array, starts: Array, length: int) -> Batch:
    """The windows that begin at `starts` (B,), each of `length` tokens, with the tokens that follow."""
    whole = torch.from_numpy(tokens[starts[:, None] + np.arange(length + 1)].astype(np.int64))  # (B, T + 1)
    counted = torch.ones(len(starts), length, dtype=torch.bool)
    return Batch(whole[:, :-1].contiguous(), whole[:, 1:].contiguous(), counted, counted.clone())


def _check_length(tokens: Array, length: int) -> None:
    if length < 1:
        raise ValueError(f"a window of {length} tokens is empty; choose a length of at least 1")
    if len(tokens) <= length:
        count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
        shorter = f", or train on windows of at most {len(tokens) - 1} tokens" if len(tokens) > 1 else ""
        raise ValueError(
            f"a stream of {count} is too short for a window of {length} and the token after it; give more text{shorter}"
        )
