"""Commands that prepare text for language modelling."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from tyro.conf import Positional
from tyro.extras import SubcommandApp

from compactattn.cli.app import Stopped, UsageError, app, console, prepare_folder
from compactattn.cli.work import Lines, progress
from compactattn.data import babistories
from compactattn.data.meta import META
from compactattn.data.preparation import prepare
from compactattn.data.sources import Source, open_sources
from compactattn.data.stories import Stories
from compactattn.data.tokenizers import Name, RanksError, load_tokenizer

MEGABYTE = 1_000_000

data = SubcommandApp()
app.command(data, name="data", help="Prepare text to learn from: compactattn data demo-stories --help")

# -- commands ------------------------------------------------------------------------------------


@data.command(name="demo-stories")
def demo_stories(
    stories: int = 20_000,
    seed: int = 0,
    tokenizer: Name = "bytes",
    ranks: Path | None = None,
    held_out: float = 0.05,
    workers: int | None = None,
    out: Path = Path("data/demo-stories"),
) -> None:
    """Write stories of the built-in generator: unlimited, the same for the same seed, and with no download.

    compactattn data demo-stories --stories 50000

    Args:
        stories: How many; each has about 170 words.
        seed: Of the generator.
        tokenizer: bytes needs nothing; gpt2 needs its ranks.
        ranks: The file r50k_base.tiktoken, in place of tiktoken's own download.
        held_out: Share of the stories for validation.
        workers: Threads; one for each core if not given.
        out: Folder of the corpus.
    """
    with _told():
        _prepare([Stories(stories, seed)], tokenizer, ranks, held_out, workers, out, ("stories", 1))


@data.command
def text(
    files: Positional[tuple[Path, ...]],
    tokenizer: Name = "gpt2",
    ranks: Path | None = None,
    separator: str = "<|endoftext|>",
    held_out: float = 0.05,
    workers: int | None = None,
    out: Path = Path("data/text"),
) -> None:
    """Prepare any text: plain (documents between separator lines), .jsonl (a string or an object with "text"), or .gz of both.

    compactattn data text my-stories.txt --out data/stories

    compactattn data text book.txt --separator "" --tokenizer bytes

    After Ctrl-C the same command goes on. The files may be larger than memory.

    Args:
        files: In the order of their documents. Names that end in .jsonl or .ndjson hold JSON lines.
        tokenizer: gpt2 (50,257 tokens) or bytes (257).
        ranks: The file r50k_base.tiktoken; without it tiktoken fetches it once from the network, for gpt2.
        separator: The line between two documents of plain text; "" stands for blank lines.
        held_out: Share of the documents for validation, chosen by a hash of their number, or of a single document its last
            part; 1 keeps all of them from training.
        workers: Threads; one for each core if not given.
        out: Folder of the corpus.
    """
    if not files:
        raise UsageError("name at least one file, as in: compactattn data text my-stories.txt --out data/stories")
    with _told():
        _prepare(open_sources(list(files), separator), tokenizer, ranks, held_out, workers, out, ("MB", MEGABYTE))


@data.command(name="babistories")
def prepare_babistories(
    archive: Path | None = None,
    download: bool = False,
    ranks: Path | None = None,
    workers: int | None = None,
    out: Path = Path("data/babistories"),
) -> None:
    """Prepare BabiStories, the corpus of the paper, with GPT-2 tokens, from its archive in five parts.

    compactattn data babistories --download

    compactattn data babistories --archive MemoryMosaics/BabiStories/data

    Unpacking needs py7zr (pip install 'compactattn[babistories]'), 7z or bsdtar. After Ctrl-C the same command goes on.

    Args:
        archive: Folder with babistories-dataset.7z.001 … 005, or with traindataset.txt and valdataset.txt.
        download: Fetch the parts that are missing there (by default in OUT/archive); a broken download goes on.
        ranks: The file r50k_base.tiktoken, in place of tiktoken's own download.
        workers: Threads; one for each core if not given.
        out: Folder of the corpus.
    """
    if archive is None and not download:
        raise UsageError("name the folder of the archive with --archive DIR, or fetch it with --download")
    folder, unpacked = archive or out / "archive", out / "unpacked"
    with _told("give their file with --ranks FILE"):
        babistories.check_unpacker(folder, unpacked)  # before hours of download are spent on a corpus that cannot be made
        load_tokenizer("gpt2", ranks)
        if download:
            _download(folder)
        sources = babistories.find_stories(folder, unpacked, lambda: print(f"unpacking {folder} to {unpacked} …", flush=True))
        meta = _prepare(sources, "gpt2", ranks, 0, workers, out, ("MB", MEGABYTE))
    for split, tokens in babistories.PUBLISHED_TOKENS.items():
        if (found := meta["splits"][split]["tokens"]) != tokens:
            print(f"Note: {split} has {found:,} tokens; the published corpus has {tokens:,}.")


# -- work ----------------------------------------------------------------------------------------


@contextmanager
def _told(without_ranks: str = "give their file with --ranks FILE, or take --tokenizer bytes") -> Iterator[None]:
    """Turns what can go wrong with files and text into a sentence, with what to do where GPT-2's ranks are not to be had."""
    try:
        yield
    except BrokenPipeError:  # of the reader of our output, not of the text
        raise
    except RanksError as error:
        raise UsageError(str(RanksError(error.trouble, without_ranks))) from error
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    except KeyboardInterrupt:
        raise Stopped("stopped; what was done is kept, and the same command goes on from there") from None


def _prepare(
    sources: Sequence[Source], name: str, ranks: Path | None, held_out: float, workers: int | None, out: Path,
    units: tuple[str, int],
) -> dict[str, Any]:  # fmt: skip
    """Prepares the corpus with a bar, and prints what is in it."""
    if workers is not None and workers < 1:
        raise UsageError(f"workers = {workers} must be at least 1")
    tokenizer = load_tokenizer(name, ranks)
    new = [path for path in (out, *out.parents) if not path.exists()]
    prepare_folder(out)
    before, began = _written(out / META), time.monotonic()
    with progress() as bar:
        (unit, size), lines = units, Lines()
        task = bar.add_task(unit, total=None)

        def tell(done: int, total: int) -> None:
            done, total = -(-done // size), -(-total // size)
            bar.update(task, completed=done, total=total)
            lines.tell(lambda: f"{out}: {done:,} of {total:,} {unit}")

        try:
            meta = prepare(sources, tokenizer, out, held_out, workers, tell)
        except (ValueError, OSError):
            for path in new:  # what is not empty stays
                with suppress(OSError):
                    path.rmdir()
            raise
    there = before == _written(out / META)
    print("Nothing to do: the corpus is there already." if there else f"Done in {time.monotonic() - began:.1f} s.")
    _show(meta)
    if meta.get("tail"):
        print("\nThis is a single document: its last part is held out for validation.")
    print(f"\nCorpus: {out}")
    _note_short_splits(meta)
    return meta


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _show(meta: dict[str, Any]) -> None:
    table = Table("split", "documents", "tokens", "bytes of text", "bytes per token", box=box.SIMPLE_HEAD, show_edge=False)
    for split, held in meta["splits"].items():
        share = f"{held['bytes'] / held['tokens']:.2f}" if held["tokens"] else "–"
        table.add_row(split, *(f"{held[key]:,}" for key in ("documents", "tokens", "bytes")), share)
    console().print(table)


def _note_short_splits(meta: dict[str, Any]) -> None:
    """Says on stderr which split is too short for any window. The other may serve all the same, as for `evaluate`."""
    found = {split: held["tokens"] for split, held in meta["splits"].items() if held["tokens"] < 2}
    if few := [f"{split} has {tokens or 'no'} token{'' if tokens == 1 else 's'}" for split, tokens in found.items()]:
        print(f"Note: {' and '.join(few)}; `compactattn train lm` needs at least 2 in each split.", file=sys.stderr)


def _download(folder: Path) -> None:
    with progress() as bar:
        tasks: dict[str, Any] = {}
        lines = Lines()

        def tell(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"{name}, MB", total=None)
            done, total = done // MEGABYTE, total // MEGABYTE
            bar.update(tasks[name], completed=done, total=total or None)
            lines.tell(lambda: f"{name}: {done:,}{f' of {total:,}' if total else ''} MB")

        babistories.download_archive(folder, tell)
