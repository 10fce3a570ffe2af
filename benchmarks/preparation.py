"""Text to tokens on one core of a CPU: the whole of `compactattn data`, from the file of text to the finished corpus.

One thread reads and writes, another makes tokens. The time of a core is what both were busy, so that overlaps count twice, and
neither the disk nor what else runs on the machine counts; the time that passed stands beside it.
The built-in stories are written to a file first, and read from there as any text is; files given on the command line follow.

python -m benchmarks.preparation [--ranks r50k_base.tiktoken] [FILE …]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import append, environment, spread
from compactattn.bench.results import find_version
from compactattn.data.preparation import prepare
from compactattn.data.sources import open_sources
from compactattn.data.stories import tell_stories
from compactattn.data.tokenizers import END_OF_TEXT, Tokenizer, load_tokenizer

STORIES, REPEATS = 10_000, 7
GOALS = {"gpt2": 10.0}  # MB of text in a second of one core
MEGABYTE = 1e6


def prepare_once(text: Path, tokenizer: Tokenizer) -> tuple[float, float, dict[str, Any]]:
    """Milliseconds of a core, milliseconds that passed, and what meta.json holds."""
    with tempfile.TemporaryDirectory() as folder:
        passed, busy = time.perf_counter(), time.process_time()
        meta = prepare(open_sources([text]), tokenizer, folder, workers=1)
        return 1e3 * (time.process_time() - busy), 1e3 * (time.perf_counter() - passed), meta


def measure(text: Path, tokenizer: Tokenizer) -> dict[str, object]:
    prepare_once(text, tokenizer)
    busy, passed, metas = zip(*(prepare_once(text, tokenizer) for _ in range(REPEATS)), strict=True)
    times, splits = spread(list(busy)), metas[0]["splits"].values()
    size = sum(split["bytes"] for split in splits)
    return {
        "text": text.name,
        "tokenizer": tokenizer.name,
        "megabytes": round(size / MEGABYTE, 1),
        "documents": sum(split["documents"] for split in splits),
        "mb_per_core_second": round(size / MEGABYTE / (times["median_ms"] / 1e3), 1),
        "goal": GOALS.get(tokenizer.name, ""),
        "mb_per_second": round(size / MEGABYTE / (statistics.median(passed) / 1e3), 1),
        **{f"core_{name}": value for name, value in times.items()},
    }


def load_tokenizers(ranks: Path | None) -> Iterator[Tokenizer]:
    yield load_tokenizer("bytes")
    try:
        yield load_tokenizer("gpt2", ranks)
    except ValueError as error:
        print(f"GPT-2 is left out: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=Path, help="the file r50k_base.tiktoken, in place of tiktoken's own download")
    parser.add_argument("texts", nargs="*", type=Path, metavar="FILE", help=".txt, .jsonl, or .gz of both")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        stories = Path(folder) / "demo-stories.txt"
        stories.write_text(f"\n{END_OF_TEXT}\n".join(story.text for story in tell_stories(0, 0, STORIES)))
        for tokenizer in load_tokenizers(given.ranks):
            for text in (stories, *given.texts):
                rows.append(measure(text, tokenizer))
                print(rows[-1], flush=True)
    facts = environment() | {"tiktoken": find_version("tiktoken")}
    print("rows added to", append("preparation", [row | facts for row in rows]))


if __name__ == "__main__":
    main()
