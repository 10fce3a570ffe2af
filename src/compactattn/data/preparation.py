"""Documents to files of tokens: all cores work, an interrupted command goes on, and the bytes are always the same.

One thread reads blocks and writes their tokens in order, several make the tokens: tiktoken lets them run side by side. A
journal beside the files says how far they are good; what lies behind its last mark is cut off and done again. `meta.json`
is written last of all: a folder without it is unfinished.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from compactattn.data.differences import list_differences
from compactattn.data.draws import Array, Draws
from compactattn.data.meta import JOURNAL, MARK, META, RANKS, SPLITS, TALLY, VERSION, find_defect, parse_record, read_meta
from compactattn.data.sources import Block, Source, hash_file
from compactattn.data.tokenizers import Tokenizer

Progress = Callable[[int, int], None]  # how much of how much

WIDEST = 1 << 16  # ids are stored in 16 bits
CHUNK = 1 << 16  # tokens of a tail that are held at a time
SECONDS_BETWEEN_MARKS = 1.0
SHOWN = 4  # differences between two corpora that are told one by one


@dataclass(frozen=True)
class Tally:
    """What one split holds."""

    documents: int = 0
    tokens: int = 0  # with the end of each document
    bytes: int = 0  # of UTF-8 text, without separators

    def add(self, documents: int, tokens: int, size: int) -> Tally:
        return Tally(self.documents + documents, self.tokens + tokens, self.bytes + size)


@dataclass(frozen=True)
class Mark:
    """How far the work is done: up to a place in a source, with what is in the files by then."""

    source: int = 0
    place: int = 0
    opens: bool = True  # no document is open there
    begun: int = 0  # documents so far
    train: Tally = field(default_factory=Tally)
    validation: Tally = field(default_factory=Tally)


class Encoded(NamedTuple):
    """A block as tokens. The parts (N,) are its documents, or what it has of them."""

    tokens: Array  # uint16
    lengths: Array  # (N,) tokens of each part
    sizes: Array  # (N,) bytes of each part


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    out: str | Path,
    held_out: float = 0.05,
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Writes train.bin, validation.bin (both uint16) and meta.json to the folder, and returns what meta.json holds.

    Documents are numbered through all sources, and the share `held_out` of them, by a hash of the number, is validation; 0
    and 1 are allowed. Of a single document it is the last part, and meta.json says so ("tail"). Sources that name their split
    keep it. Each document is followed by the end-of-text token. If the folder holds the beginning of the same work, it goes on
    from there; if it holds another corpus, a ValueError says so.
    """
    folder = Path(out)
    if not 0 <= held_out <= 1:
        raise ValueError(f"held_out = {held_out} is no share; choose a number from 0 to 1, as in 0.05")
    if tokenizer.vocab > WIDEST:
        raise ValueError(
            f"tokenizer {tokenizer.name!r} has {tokenizer.vocab} ids, more than the {WIDEST} that 16 bits tell apart"
        )
    if not sources:
        raise ValueError("no source of text was given; name at least one file")
    settings = {
        "version": VERSION,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.hash, "vocab": tokenizer.vocab, "end": tokenizer.end},
        "held_out": None if all(source.split for source in sources) else held_out,
        "sources": [source.describe() for source in sources],
    }
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        if (meta := _finished(folder, settings)) is not None:
            return meta
        mark = _begin(folder, settings)
        try:
            mark = _write_tokens(folder, sources, tokenizer, held_out, mark, workers or os.cpu_count() or 1, progress)
            if settings["held_out"] not in (None, 0, 1) and mark.begun == 1:
                mark, settings = _hold_out_tail(folder, tokenizer, held_out, mark), settings | {"tail": True}
            _check_splits(mark, settings)
        except ValueError:  # of this text no corpus can be made: leave the folder free for another
            for path in (*_paths(folder), folder / JOURNAL):
                path.unlink(missing_ok=True)
            raise
        return _finish(folder, settings, mark, tokenizer)


# -- the work ------------------------------------------------------------------------------------


def is_held_out(numbers: Array, share: float) -> Array:
    """Whether the documents of these numbers (N,) are held out: a pure function, the same in every corpus. (N,) bool."""
    bits = Draws("corpus").bits("held out", numbers.astype(np.uint64), 1)[:, 0]
    return (bits >> np.uint64(11)) < share * 2.0**53


def encode_block(source: Source, block: Block, tokenizer: Tokenizer) -> Encoded:
    """The documents of a block as tokens, each with the end-of-text token if it ends here."""
    parts, lengths, sizes = [], [], []
    documents = source.documents(block)
    end = np.array([tokenizer.end], np.uint32)
    for number, text in enumerate(documents):
        ids = tokenizer.encode_array(text)
        if ids.size and int(ids.max()) >= tokenizer.vocab:
            raise ValueError(
                f"{source.name}: tokenizer {tokenizer.name!r} gave id {ids.max()}, but its vocabulary has {tokenizer.vocab};"
                " its file is damaged"
            )
        ends = block.ends or number < len(documents) - 1
        parts += [ids, end] if ends else [ids]
        lengths.append(ids.size + ends)
        sizes.append(len(text) if text.isascii() else len(text.encode()))
    tokens = np.concatenate(parts, dtype="<u2", casting="unsafe") if parts else np.empty(0, "<u2")
    return Encoded(tokens, np.array(lengths, np.int64), np.array(sizes, np.int64))


def _write_tokens(
    folder: Path, sources: Sequence[Source], tokenizer: Tokenizer, held_out: float, mark: Mark, workers: int,
    progress: Progress | None,
) -> Mark:  # fmt: skip
    """Does what is left after the mark, and returns the last one."""
    total, before = sum(source.size for source in sources), [0]
    for source in sources:
        before.append(before[-1] + source.size)
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(open(folder / f"{split}.bin", "ab")) for split in SPLITS]
        journal = stack.enter_context(open(folder / JOURNAL, "ab"))
        pool = stack.enter_context(ThreadPoolExecutor(workers, "tokens"))
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        marked = time.monotonic()
        for number, block, encoded in _in_order(pool, sources, tokenizer, mark, 2 * workers):
            mark = _append(files, encoded, block, number, sources[number], held_out, mark)
            if time.monotonic() > marked + SECONDS_BETWEEN_MARKS:
                _keep(files, journal, mark)
                marked = time.monotonic()
            if progress is not None:
                progress(before[number] + block.read, total)
        _keep(files, journal, mark)
    return mark


def _in_order(
    pool: ThreadPoolExecutor, sources: Sequence[Source], tokenizer: Tokenizer, mark: Mark, ahead: int
) -> Iterator[tuple[int, Block, Encoded]]:
    """Blocks after the mark, each with the number of its source and its tokens; at most `ahead` are held at a time."""
    waiting: deque[tuple[int, Block, Future[Encoded]]] = deque()
    for number, source in enumerate(sources[mark.source :], start=mark.source):
        place = (mark.place, mark.opens) if number == mark.source else (0, True)
        for block in source.blocks(*place):
            waiting.append((number, block, pool.submit(encode_block, source, block, tokenizer)))
            if len(waiting) >= ahead:
                number_done, block_done, future = waiting.popleft()
                yield number_done, block_done, future.result()
    while waiting:
        number_done, block_done, future = waiting.popleft()
        yield number_done, block_done, future.result()


def _append(
    files: Sequence[BinaryIO], encoded: Encoded, block: Block, number: int, source: Source, held_out: float, mark: Mark
) -> Mark:
    """Writes a block's tokens to the files of their splits."""
    first = mark.begun - (0 if block.opens else 1)
    numbers = np.arange(first, first + len(encoded.lengths))
    held = is_held_out(numbers, held_out) if source.split is None else np.full(len(numbers), source.split == "validation")
    new = numbers >= mark.begun
    tallies = []
    for file, chosen, tally in zip(files, (~held, held), (mark.train, mark.validation), strict=True):
        tokens = encoded.tokens[np.repeat(chosen, encoded.lengths)]
        file.write(tokens.tobytes())
        tallies.append(tally.add(int((new & chosen).sum()), len(tokens), int(encoded.sizes[chosen].sum())))
    return Mark(number, block.stop, block.ends, first + len(numbers), *tallies)


def _hold_out_tail(folder: Path, tokenizer: Tokenizer, share: float, mark: Mark) -> Mark:
    """Leaves the first tokens of the only document in training and the share of the last ones in validation."""
    train, validation = _paths(folder)
    if not mark.train.documents:  # it was held out as a whole
        _forget_marks(folder / JOURNAL)  # they tell of the validation file that is written over below
        os.replace(validation, train)
    whole = mark.train if mark.train.documents else mark.validation
    first = min(max(1, round((1 - share) * whole.tokens)), whole.tokens - 1)
    counts = _copy_tail(train, validation, first, tokenizer.vocab)
    os.truncate(train, 2 * first)
    ids = [token for token in counts.nonzero()[0].tolist() if token != tokenizer.end]
    size = sum(int(counts[token]) * len(tokenizer.to_bytes([token])) for token in ids)
    return replace(mark, train=Tally(1, first, whole.bytes - size), validation=Tally(1, int(counts.sum()), size))


def _copy_tail(source: Path, target: Path, first: int, vocab: int) -> Array:
    """Copies the tokens from the `first` on, and returns how often each id is among them (vocab,)."""
    counts = np.zeros(vocab, np.int64)
    with open(source, "rb") as tokens, open(target, "wb") as tail:
        tokens.seek(2 * first)
        while part := tokens.read(2 * CHUNK):
            tail.write(part)
            counts += np.bincount(np.frombuffer(part, "<u2"), minlength=vocab)
    return counts


# -- the folder ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps a second process out of the folder while this one writes; the system lets go when a process dies."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process is preparing a corpus in {str(folder)!r}; wait for it, or choose another folder with --out"
            ) from None
        yield
    finally:
        os.close(handle)


def _finished(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What meta.json holds if the work has been done already; where a file is missing or cut short, all is done again."""
    if not (folder / META).is_file():
        return None
    meta = read_meta(folder)
    _compare(folder, {key: meta.get(key) for key in settings}, settings)
    sizes = [path.stat().st_size if path.is_file() else None for path in _paths(folder)]
    if sizes == [2 * meta["splits"][split]["tokens"] for split in SPLITS]:
        return meta
    for path in (*_paths(folder), folder / JOURNAL, folder / META):  # meta.json last: it says whose files these are
        path.unlink(missing_ok=True)
    return None


def _begin(folder: Path, settings: dict[str, Any]) -> Mark:
    """The last mark that the files bear out, after cutting off what lies behind it, in the journal too."""
    journal, mark = folder / JOURNAL, Mark()
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.is_file() else []  # what follows the last line end is torn
    if lines:
        _compare(folder, parse_record(journal, lines[0]), settings)
        sizes = [path.stat().st_size if path.is_file() else 0 for path in _paths(folder)]
        good = len(lines[0]) + 1
        for line in lines[1:]:
            found = _read_mark(line)
            if found is None or sizes[0] < 2 * found.train.tokens or sizes[1] < 2 * found.validation.tokens:
                break
            mark, good = found, good + len(line) + 1
        with open(journal, "ab") as file:  # else the next mark would end a torn line
            file.truncate(good)
    elif any(path.exists() for path in _paths(folder)):
        raise ValueError(
            f"{str(folder)!r} holds {SPLITS[0]}.bin or {SPLITS[1]}.bin of something else; choose another folder with --out"
        )
    else:
        journal.write_text(json.dumps(settings) + "\n")
    for path, tally in zip(_paths(folder), (mark.train, mark.validation), strict=True):
        with open(path, "ab") as file:
            file.truncate(2 * tally.tokens)
    return mark


def _compare(folder: Path, found: dict[str, Any], settings: dict[str, Any]) -> None:
    settings = json.loads(json.dumps(settings))
    if found != settings:
        changed = list_differences(found, settings)
        more = [f"{len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        raise ValueError(
            f"{str(folder)!r} holds a corpus made otherwise ({'; '.join(changed[:SHOWN] + more)}); delete it, or choose another"
            " folder with --out"
        )


def _keep(files: Sequence[BinaryIO], journal: BinaryIO, mark: Mark) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())
    journal.write(json.dumps(asdict(mark)).encode() + b"\n")
    journal.flush()
    os.fsync(journal.fileno())


def _forget_marks(journal: Path) -> None:
    """Leaves the settings alone: an interrupted command begins again."""
    with open(journal, "r+b") as file:
        file.truncate(len(file.readline()))
        os.fsync(file.fileno())


def _read_mark(line: bytes) -> Mark | None:
    """The mark of a line, or None where it is damaged."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if find_defect(found, MARK):
        return None
    train, validation = (Tally(*(found[split][name] for name in TALLY)) for split in SPLITS)
    return Mark(found["source"], found["place"], found["opens"], found["begun"], train, validation)


def _check_splits(mark: Mark, settings: dict[str, Any]) -> None:
    names = ", ".join(str(source.get("file", "the generator")) for source in settings["sources"])
    if mark.begun == 0:
        raise ValueError(f"there is no document in {names}; give files with text in them")
    share = settings["held_out"]
    if share is not None and ((share > 0 and not mark.validation.documents) or (share < 1 and not mark.train.documents)):
        empty = "validation" if not mark.validation.documents else "training"
        cut = ' cut text at its blank lines with --separator "",' if any("separator" in s for s in settings["sources"]) else ""
        raise ValueError(
            f"{mark.begun} documents in {names} leave none for {empty} at a held-out share of {share}; give more documents,"
            f"{cut} or choose another --held-out (0 for no validation)"
        )


def _finish(folder: Path, settings: dict[str, Any], mark: Mark, tokenizer: Tokenizer) -> dict[str, Any]:
    """Writes the ranks and, last of all, meta.json."""
    if tokenizer.ranks is not None:
        (folder / RANKS).write_bytes(tokenizer.ranks)
    splits = {}
    for split, path, tally in zip(SPLITS, _paths(folder), (mark.train, mark.validation), strict=True):
        splits[split] = asdict(tally) | {"file": path.name, "sha256": hash_file(path)}
    meta = settings | {"splits": splits}
    temporary = folder / f"{META}.tmp"
    with open(temporary, "w") as file:
        file.write(json.dumps(meta, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / META)
    (folder / JOURNAL).unlink()
    return json.loads(json.dumps(meta))


def _paths(folder: Path) -> list[Path]:
    return [folder / f"{split}.bin" for split in SPLITS]
