"""Text to token ids and back: UTF-8 bytes, which need nothing, and the byte pairs of GPT-2, through tiktoken.

    text      H e l l o   w o r l d
    bytes     72 101 108 108 111 32 119 111 114 108 100     and 256 at the end of a document
    gpt2      15496 995                                     and 50256 at the end of a document

Text is only ever text: the words `<|endoftext|>` inside a document become ordinary tokens, never the end of a document.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterable
from pathlib import Path
from textwrap import shorten
from typing import Literal, Protocol, get_args

import numpy as np

from compactattn.data.draws import Array

Name = Literal["gpt2", "bytes"]
NAMES: tuple[str, ...] = get_args(Name)
END_OF_TEXT = "<|endoftext|>"  # how the end of a document is shown to people
GPT2_URL = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
GPT2_SHA256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
LONGEST_REASON = 100  # characters
# how GPT-2 cuts text into words before it merges pairs; what follows a + is never given back, which is faster
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


class RanksError(ValueError):
    """The ranks of GPT-2 are not to be had. The file and its checksum stand on lines of their own, to be copied."""

    def __init__(self, trouble: str, remedy: str = "give the published file r50k_base.tiktoken") -> None:
        super().__init__(f"{trouble}; {remedy}\n  file     {GPT2_URL}\n  SHA-256  {GPT2_SHA256}")
        self.trouble = trouble


class Tokenizer(Protocol):
    """A vocabulary with its way there and back. The end of a document has an id of its own, the last one."""

    @property
    def name(self) -> str: ...

    @property
    def vocab(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def hash(self) -> str:
        """SHA-256 of what the ids depend on: two tokenizers with the same hash agree on every text."""
        ...

    @property
    def ranks(self) -> bytes | None:
        """The file it was made from, if any; `load_tokenizer(name, ranks=FILE)` reads it back."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_array(self, text: str) -> Array:
        """The same ids as an array of unsigned integers (T,): the fast way."""
        ...

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes behind the ids; they may begin or end inside a character."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text, with � for bytes that make no character."""
        ...


class Bytes:
    """The bytes of UTF-8 as they are."""

    name = "bytes"
    vocab = 257
    end = 256
    hash = hashlib.sha256(b"the bytes of UTF-8, then 256 at the end of a document").hexdigest()
    ranks = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> Array:
        return np.frombuffer(text.encode(), np.uint8)

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        ids = check_ids(ids, self.vocab)
        return b"".join(END_OF_TEXT.encode() if i == self.end else bytes([i]) for i in ids)

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


class BytePairs:
    """Words cut as GPT-2 cuts them, whose bytes are merged pair by pair, the pair of the lowest rank first."""

    def __init__(self, name: str, ranks: bytes) -> None:
        import tiktoken  # takes a moment, and only text needs it

        merges = read_ranks(ranks)
        self.name, self.ranks = name, ranks
        self.hash = hashlib.sha256(ranks).hexdigest()
        self.end, self.vocab = len(merges), len(merges) + 1
        self._encoding = tiktoken.Encoding(
            name, pat_str=GPT2_WORDS, mergeable_ranks=merges, special_tokens={END_OF_TEXT: self.end}
        )

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> Array:
        return self._encoding.encode_to_numpy(text, disallowed_special=())

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return self._encoding.decode_bytes(check_ids(ids, self.vocab))

    def decode(self, ids: Iterable[int]) -> str:
        return self.to_bytes(ids).decode(errors="replace")


def load_tokenizer(name: str, ranks: str | Path | None = None) -> Tokenizer:
    """The tokenizer of that name. GPT-2 reads its ranks from a file if one is given, else from tiktoken's cache or download.

    Either way the ranks must have the published checksum, so that ids mean the same everywhere.
    """
    if name not in NAMES:
        raise ValueError(f"tokenizer {name!r} is unknown; choose one of {', '.join(NAMES)}")
    if name == "bytes":
        if ranks is not None:
            raise ValueError(f"tokenizer 'bytes' has no ranks, but {str(ranks)!r} was given; leave it out, or choose 'gpt2'")
        return Bytes()
    content = _fetch_ranks() if ranks is None else _read_file(Path(ranks))
    if (found := hashlib.sha256(content).hexdigest()) != GPT2_SHA256:
        where = "what tiktoken fetched" if ranks is None else repr(str(ranks))
        raise RanksError(f"{where} is not the ranks of GPT-2: its SHA-256 is {found}")
    return BytePairs(name, content)


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RanksError(f"cannot read the ranks {str(path)!r} ({error.strerror})") from error


def _fetch_ranks() -> bytes:
    from tiktoken.load import read_file_cached

    try:
        return read_file_cached(GPT2_URL, GPT2_SHA256)
    except Exception as error:  # of the network, of the disk, or of the file: tiktoken names no class for it
        raise RanksError(f"the ranks of GPT-2 could not be fetched ({_find_reason(error)})") from error


def _find_reason(error: BaseException) -> str:
    """Why a download failed, in a few words: those of the first trouble, without what libraries have wrapped around it."""
    first: BaseException | None = error
    while first is not None:
        error = first if isinstance(first, OSError) else error
        first = first.__cause__ or first.__context__
    return shorten(getattr(error, "strerror", None) or str(error) or type(error).__name__, LONGEST_REASON)


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Token by rank from lines of `base64 rank`, the ranks 0, 1, 2 … with every single byte among them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} of the ranks is {line[:40]!r}, not a token in base64 and its rank") from None
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([i]) not in ranks for i in range(256)):
        raise ValueError(f"the ranks of {len(ranks)} tokens are not 0, 1, 2 … with all 256 single bytes; the file is damaged")
    return ranks


def check_ids(ids: Iterable[int], vocab: int) -> list[int]:
    """The ids as a list; raises a ValueError for one outside the vocabulary."""
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < vocab:
            raise ValueError(f"id {i} is outside the vocabulary 0 … {vocab - 1}; the ids are of another tokenizer")
    return ids
