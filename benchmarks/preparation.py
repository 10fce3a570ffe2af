"""Text to tokens on one core of a CPU: the whole of `compactattn data`, from the file of text to the finished corpus.

The built-in stories are written to a file first, and read from there as any text is; files given on the command line follow.

python -m benchmarks.preparation [--ranks r50k_base.tiktoken] [FILE …]
"""

from __future__ import annotations

import argparse
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


def prepare_once(text: Path, tokenizer: Tokenizer) -> tuple[float, dict[str, Any]]:
    """Milliseconds of one core, and what meta.json holds. One thread reads and one makes tokens: at once, they count twice."""
    with tempfile.TemporaryDirectory() as folder:
        wall, busy = time.perf_counter(), time.process_time()
        meta = prepare(open_sources([text]), tokenizer, folder, workers=1)
        return 1e3 * max(time.perf_counter() - wall, time.process_time() - busy), meta


def measure(text: Path, tokenizer: Tokenizer) -> dict[str, object]:
    prepare_once(text, tokenizer)
    found = [prepare_once(text, tokenizer) for _ in range(REPEATS)]
    times, splits = spread([taken for taken, _ in found]), found[0][1]["splits"].values()
    size = sum(split["bytes"] for split in splits)
    return {
        "text": text.name,
        "tokenizer": tokenizer.name,
        "megabytes": round(size / MEGABYTE, 1),
        "documents": sum(split["documents"] for split in splits),
        "mb_per_second": round(size / MEGABYTE / (times["median_ms"] / 1e3), 1),
        "goal": GOALS.get(tokenizer.name, ""),
        **times,
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
