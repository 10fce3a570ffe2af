"""Where documents come from: files read block by block, so that a corpus may be larger than memory.

A block is a stretch of a source that can be turned into documents on its own: it ends at the end of a document, or inside a
very long one where GPT-2 cuts words in any case, so that the tokens of the parts are those of the whole.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

Split = Literal["train", "validation"]

BLOCK = 1 << 21  # bytes: a tenth of a second of work with GPT-2 tokens
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
BLANKS = rb"[ \t\r]*(?=\n)"  # up to the end of a line
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
JSON_LINES = (".jsonl", ".ndjson")


class Block(NamedTuple):
    """A stretch of a source, in its own units: bytes of text, or numbers of stories."""

    start: int
    stop: int
    data: bytes
    opens: bool  # its first document begins here, and is not the rest of the one before
    ends: bool  # its last document ends here
    read: int  # how much of the source's size is behind us after it, for the display


class Source(Protocol):
    """Documents in a fixed order. Blocks are read by one thread, and turned into documents by many."""

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int:
        """Bytes of a file, or the number of stories."""
        ...

    @property
    def split(self) -> Split | None:
        """Where all of its documents belong; None leaves it to the number of each."""
        ...

    def describe(self) -> dict[str, Any]:
        """What the documents depend on, for the record."""
        ...

    def blocks(self, start: int = 0, opens: bool = True) -> Iterator[Block]:
        """The blocks from `start` on, which is where a block of this source has stopped before."""
        ...

    def documents(self, block: Block) -> list[str]:
        """The documents of a block; where it does not open, the first is the rest of the one before."""
        ...


@dataclass(frozen=True)
class _File:
    """A file of UTF-8 text, gzip or not."""

    path: Path
    split: Split | None = None

    def __post_init__(self) -> None:
        if not self.path.is_file():
            raise ValueError(f"cannot read {str(self.path)!r}: {'a folder' if self.path.is_dir() else 'there is no such file'}")
        with open(self.path, "rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                raise ValueError(f"{str(self.path)!r} is a Git LFS pointer, not the file itself; fetch it with: git lfs pull")

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def size(self) -> int:
        return self.path.stat().st_size

    @cached_property
    def sha256(self) -> str:
        return hash_file(self.path)

    def describe(self) -> dict[str, Any]:
        return {"file": self.name, "bytes": self.size, "sha256": self.sha256, "split": self.split}

    def blocks(self, start: int = 0, opens: bool = True) -> Iterator[Block]:
        with self._open() as (text, file):
            text.seek(start)
            rest = bytearray()
            while True:
                more = text.read(BLOCK)
                rest += more
                cut, ends = (len(rest), True) if not more else self._cut(rest)
                if cut:
                    data = bytes(rest[:cut])
                    yield Block(start, start + cut, data, opens, ends, self.size if not more else min(file.tell(), self.size))
                    start, opens = start + cut, ends
                    del rest[:cut]
                if not more:
                    return

    def _cut(self, rest: bytearray) -> tuple[int, bool]:
        """Where the block ends (0: not yet) and whether a document ends there."""
        raise NotImplementedError

    @contextmanager
    def _open(self) -> Iterator[tuple[io.BufferedReader, io.BufferedReader]]:
        """The text as bytes, and the file behind it."""
        with open(self.path, "rb") as file:
            packed = file.peek(2)[:2] == GZIP
            try:
                yield (io.BufferedReader(gzip.GzipFile(fileobj=file)) if packed else file), file
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{str(self.path)!r} is a damaged gzip file ({error}); fetch it again") from error

    def _decode(self, block: Block) -> str:
        try:
            text = block.data.decode()
        except UnicodeDecodeError as error:
            line = self._line(block.start + error.start)
            raise ValueError(
                f"{str(self.path)!r} is not UTF-8 text: byte 0x{block.data[error.start]:02x} in line {line};"
                " convert it, as in: iconv -f latin1 -t utf-8 FILE > NEW"
            ) from None
        return text.removeprefix("\ufeff") if block.start == 0 else text

    def _line(self, position: int) -> int:
        """Number of the line that holds a position."""
        with self._open() as (text, _):
            line = 1
            while position > 0 and (part := text.read(min(position, BLOCK))):
                line += part.count(b"\n")
                position -= len(part)
        return line


@dataclass(frozen=True)
class TextFile(_File):
    """Documents between lines that hold the separator and nothing else; an empty separator stands for blank lines.

    Blank documents are left out. A document keeps its own line ends, but for the one before the separator or at the end.
    """

    separator: str = "<|endoftext|>"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator != self.separator.strip() or len(self.separator.splitlines()) > 1:
            raise ValueError(f"the separator {self.separator!r} must be one line, without blanks around it")

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"format": "text", "separator": self.separator}

    def documents(self, block: Block) -> list[str]:
        text = self._decode(block)
        if block.start == 0:
            text = "\n" + text  # each line then follows a line end
        if block.ends and not text.endswith("\n"):
            text += "\n"
        parts = re.split(rf"\n{re.escape(self.separator)}[ \t\r]*(?=\n)", text)
        if block.ends:
            parts[-1] = parts[-1].removesuffix("\n")
        found = []
        for number, part in enumerate(parts):
            first, last = number == 0 and not block.opens, number == len(parts) - 1 and not block.ends
            part = part if first else part.removeprefix("\n")
            part = part if last else part.removesuffix("\r")
            if first or last or part.strip():
                found.append(part)
        return found

    def _cut(self, rest: bytearray) -> tuple[int, bool]:
        separator = b"\n" + self.separator.encode()
        line, at = re.compile(re.escape(separator) + BLANKS), len(rest)
        while (at := rest.rfind(separator, 0, at)) >= 0:
            if found := line.match(rest, at):
                return found.end(), True
        # the first line of the file follows no line end; anywhere else the rest begins with one, or with a blank
        if self.separator and (found := re.match(rb"(?:%b)?" % BOM + re.escape(separator[1:]) + BLANKS, rest)):
            return found.end(), True
        end = rest.rfind(b"\n") + 1 if self._may_separate(rest) else len(rest)
        return _last_end_of_word(rest, b"\n", end) or _last_end_of_word(rest, b" ", end), False

    def _may_separate(self, rest: bytearray) -> bool:
        """Whether the last line, of which more is to come, may turn out to be a separator."""
        line, separator = bytes(rest[rest.rfind(b"\n") + 1 :]).removeprefix(BOM), self.separator.encode()
        return separator.startswith(line) or (line.startswith(separator) and not line[len(separator) :].strip(b" \t\r"))


def _last_end_of_word(text: bytearray, mark: bytes, end: int) -> int:
    """Position of the last mark before the end that follows something other than space, else 0.

    No token of GPT-2 spans such a place.
    """
    at = end
    while (at := text.rfind(mark, 0, at)) > 0:
        before = text[max(0, at - 4) : at].decode(errors="ignore")
        if before and not before[-1].isspace() and before[-1] != BOM.decode():
            return at
    return 0


@dataclass(frozen=True)
class JsonLines(_File):
    """A document in each line: a JSON string, or an object whose "text" is one. An empty string is a document too."""

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"format": "json lines"}

    def documents(self, block: Block) -> list[str]:
        self._decode(block)
        found, position = [], block.start
        for line in block.data.removeprefix(BOM).split(b"\n"):
            if line.strip():
                found.append(self._read(line, position))
            position += len(line) + 1
        return found

    def _read(self, line: bytes, position: int) -> str:
        try:
            value = json.loads(line)
            text = value.get("text") if isinstance(value, dict) else value
            if isinstance(text, str):
                text.encode()  # raises where half of a surrogate pair stands alone, which is no text
                return text
            why = "it holds something else"
        except ValueError as error:
            why = str(error)
        raise ValueError(
            f"line {self._line(position)} of {str(self.path)!r} is not a JSON string, nor an object with one as its"
            f' "text" ({why}): {line[:60].decode(errors="replace")}'
        )

    def _cut(self, rest: bytearray) -> tuple[int, bool]:
        return rest.rfind(b"\n") + 1, True


def open_sources(paths: list[Path], separator: str = "<|endoftext|>") -> list[Source]:
    """A source for each file: JSON lines by the name's ending (.jsonl or .ndjson, also before .gz), else plain text."""
    return [
        JsonLines(path) if path.name.lower().removesuffix(".gz").endswith(JSON_LINES) else TextFile(path, separator=separator)
        for path in paths
    ]


def name_corpus(path: Path) -> str:
    """What the corpus of a file is called: its name without the endings."""
    return Path(path.name.removesuffix(".gz")).stem


def identify(described: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells the text of a described source from that of others: a file's checksum, or a generator and its seed."""
    return tuple(described.get(key) for key in ("sha256", "generator", "grammar", "seed"))


def hash_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
