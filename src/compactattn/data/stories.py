"""Stories of our own, as many as you like: a language to learn with no download.

    Near a cold lake lived a shy girl. Her name was Una. … "I will bring you a sweet plum," Una promised, "before sunset." …
    "Here is your sweet plum," said Una, just before sunset. …

Each tells of a child, an animal, a thing, a place and a promise. All of them come back later in the story in the very words
that introduced them, so that a model has to look back for them. Story n of a seed is a pure function of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from compactattn.data import grammar
from compactattn.data.draws import Draws
from compactattn.data.sources import Block, Split

CHOICES = 32  # random numbers that a story has at hand
AT_ONCE = 1024  # stories in a block
THINGS = ("animal", "toy", "place", "spot", "gift", "helper")


class Story(NamedTuple):
    """A text, and the words that stand in its slots."""

    text: str
    slots: dict[str, str]


def tell_stories(seed: int, first: int, count: int) -> list[Story]:
    """Stories first … first + count − 1 of a seed."""
    if first < 0 or count < 0:
        raise ValueError(f"stories are numbered from 0, got {count} stories from number {first}")
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return [_tell(row) for row in Draws(f"stories|{grammar.VERSION}|{seed}").below(1 << 32, "words", numbers, CHOICES).tolist()]


def _tell(numbers: Sequence[int]) -> Story:
    """The story that 32 random numbers below 2³² stand for."""
    rest = iter(numbers)

    def pick(among: Sequence[Any]) -> Any:
        return among[next(rest) * len(among) >> 32]

    slots = _cast(pick)
    problem, attempt, solution = pick(grammar.PLOTS)
    shape = pick(grammar.SHAPES)
    paragraphs = (
        (pick(grammar.OPENING), pick(grammar.COMPANION), pick(grammar.TREASURE)),
        (pick(grammar.PROMISE), pick(grammar.SETTING_OUT), problem, attempt * shape[0]),
        (pick(grammar.MEETING), solution, pick(grammar.THANKS) * shape[1]),
        (pick(grammar.MEMORY) * shape[2], pick(grammar.FINDING), pick(grammar.KEEPING), pick(grammar.ENDING)),
    )
    text = "\n\n".join(" ".join(filter(None, paragraph)) for paragraph in paragraphs)
    return Story(text.format_map(slots), slots)


def _cast(pick: Any) -> dict[str, str]:
    """Who and what the story is about, with their articles and pronouns."""
    girl = pick((True, False))
    slots = {
        "hero": pick(grammar.GIRLS if girl else grammar.BOYS),
        "child": "girl" if girl else "boy",
        "trait": pick(grammar.TRAITS),
        "friend": pick(grammar.PETS),
        "animal": pick(grammar.ANIMALS),
        "toy": f"{pick(grammar.COLOURS)} {pick(grammar.TOYS)}",
        "place": pick(grammar.PLACES),
        "spot": pick(grammar.SPOTS),
        "gift": pick(grammar.GIFTS),
        "elder": pick(grammar.ELDERS),
        "helper": pick(grammar.HELPERS),
        "time": pick(grammar.TIMES),
        "day": pick(grammar.DAYS),
    }
    for name, word in zip(("he", "him", "his"), ("she", "her", "her") if girl else ("he", "him", "his"), strict=True):
        slots |= {name: word, name.capitalize(): word.capitalize()}
    for name in THINGS:
        article = "an" if slots[name][0] in "aeiou" else "a"
        slots |= {f"a_{name}": f"{article} {slots[name]}", f"A_{name}": f"{article.capitalize()} {slots[name]}"}
    return slots


@dataclass(frozen=True)
class Stories:
    """The first `count` stories of a seed, as a source for `prepare`."""

    count: int
    seed: int = 0
    split: Split | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"stories = {self.count} are none; choose at least 1")

    @property
    def name(self) -> str:
        return "demo-stories"

    @property
    def size(self) -> int:
        return self.count

    def describe(self) -> dict[str, Any]:
        return {
            "generator": self.name,
            "grammar": grammar.VERSION,
            "seed": self.seed,
            "stories": self.count,
            "split": self.split,
        }

    def blocks(self, start: int = 0, opens: bool = True) -> Iterator[Block]:
        for first in range(start, self.count, AT_ONCE):
            stop = min(first + AT_ONCE, self.count)
            yield Block(first, stop, b"", True, True, stop)

    def documents(self, block: Block) -> list[str]:
        return [story.text for story in tell_stories(self.seed, block.start, block.stop - block.start)]
