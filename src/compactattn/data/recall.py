"""Associative recall: a task of length generalisation.

Shapes: B samples, T tokens, P pairs, S spaces, Q queries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import numpy as np

from compactattn.data.draws import Array, Draws
from compactattn.data.tasks import Length, Task

SPACE, BINDS, ASKS = 0, 1, 2  # the utility tokens
LAYOUTS = ("published", "shared")


def check_layout(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r} is unknown; choose {' or '.join(LAYOUTS)}")


@lru_cache(maxsize=8)
def draw_words(kind: str, name: str, words: int, symbols: int, width: int) -> Array:
    """`words` different rows of `width` numbers below `symbols`, (words, width) int32; another name draws other rows."""
    spellings = symbols**width
    codes = Draws(name).ranking(np.array([[spellings]]), spellings, kind, np.zeros(1, np.uint64))[0, :words]
    rows = codes[:, None] // symbols ** np.arange(width)[::-1] % symbols
    rows = rows.astype(np.int32)
    rows.flags.writeable = False  # every caller shares them
    return rows


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query multi-token associative recall: keys are bound to values, then some keys are asked for.

    <bos> 17 203 [1] 5 88 [0] [0] [0] 91 4 [1] 250 13 [0] [2] 91 4 [2] 17 203 <sep> [2] 250 13 [2] 5 88 <eos>

    Keys and values are words of `width` symbols. There are two vocabularies, each of `words` different words.
    A source of length n holds ⌊density · n / (2 · width + 2)⌋ pairs `key [1] value [0]`. All keys of a sample differ.
    The rest are spaces [0], each put before, between or after the pairs with equal chances. The queries follow the source
    and add to its length. An exact match judges the symbols of the values, not the [2] before each.

    The layout says what files share. A file is a training stream or a test set, known by the name of its draws.

    | layout    | words of a file                 | values of a sample | queries of a sample        |
    |-----------|---------------------------------|--------------------|----------------------------|
    | published | its own                         | all differ         | may repeat                 |
    | shared    | those of training and all tests | may repeat         | no pair is asked for twice |

    "published" is the paper's data. "shared" is easier: the test words are known from training. Older runs have it.
    """

    symbols: int = 256
    words: int = 10_000
    width: int = 2  # symbols of a key, and of a value
    queries: int = 4
    density: float = 0.8  # share of a source that is pairs
    vocabulary: int = 0  # the seed of the words
    layout: str = "published"
    name: ClassVar[str] = "mqmtar"
    utilities: ClassVar[int] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_layout(self.layout)
        for name in ("words", "width", "queries"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        if not 0.001 <= self.density <= 1:
            raise ValueError(f"density = {self.density} must lie between 0.001 and 1")
        spellings = self.symbols**self.width
        if spellings > 2**24:
            raise ValueError(
                f"{self.symbols} symbols to the power of width {self.width} exceed 2^24 words; lower one of the two"
            )
        if self.words > spellings:
            raise ValueError(
                f"{self.symbols} symbols spell only {spellings} different words of width {self.width}, not {self.words}; "
                f"lower words or raise symbols or width"
            )

    @property
    def block(self) -> int:
        """Tokens of a pair `key [1] value [0]`."""
        return 2 * self.width + 2

    @property
    def share(self) -> Fraction:
        """The density as it is written, 0.8 = 4/5, so that no rounding can cost a pair."""
        return Fraction(str(self.density)).limit_denominator(1_000_000)

    def pairs(self, length: Length) -> Length:
        """Pairs in a source of `length`."""
        return length * self.share.numerator // (self.share.denominator * self.block)

    def prompt_length(self, length: Length) -> Length:
        return length + 2 + self.queries * (self.width + 1)

    def answer_length(self, length: Length) -> Length:
        return 0 * length + self.queries * (self.width + 1) + 1

    def check(self, length: int) -> None:
        super().check(length)
        pairs, needed = self.pairs(length), self.queries if self.layout == "shared" else 1
        if pairs < needed:
            least, remedy = math.ceil(needed * self.block / self.share), " or fewer queries" if needed > 1 else ""
            raise ValueError(
                f"a source of length {length} at density {self.density} holds {pairs} pairs, too few for "
                f"{self.queries} queries; use a length of at least {least}{remedy}"
            )
        if pairs > self.words:
            raise ValueError(
                f"a source of length {length} at density {self.density} holds {pairs} pairs, but there are only "
                f"{self.words} words for their keys; shorten it or raise words"
            )

    def fill(self, tokens: Array, draws: Draws, samples: Array, lengths: Array, longest: int) -> None:
        pairs, most, row = self.pairs(lengths), self.pairs(longest), tokens.shape[1]
        bound, asked = self.choose(draws, samples, pairs, most)
        keys = self.spell("keys", draws.name)[draws.distinct(self.words, "keys", samples, most)]  # (B, P, width)
        values = self.spell("values", draws.name)[bound]
        heads = np.arange(len(samples))[:, None] * row  # where each sample starts in the flat array
        flat = tokens.reshape(-1)

        written = np.full((len(samples), most, self.block), SPACE, dtype=np.int32)
        written[:, :, : self.width] = keys
        written[:, :, self.width] = BINDS
        written[:, :, self.width + 1 : -1] = values
        places = heads + 1 + self.places(draws, samples, lengths, longest)  # (B, P)
        inside = np.arange(most) < pairs[:, None]
        flat[places[inside][:, None] + np.arange(self.block)] = written[inside]

        steps = np.arange(self.queries)[:, None] * (self.width + 1) + np.arange(self.width + 1)  # (Q, width + 1)
        for start, answers in ((lengths + 1, keys), (self.prompt_length(lengths), values)):
            words = np.full((len(samples), self.queries, self.width + 1), ASKS, dtype=np.int32)
            words[:, :, 1:] = np.take_along_axis(answers, asked[:, :, None], axis=1)
            flat[(heads + start[:, None])[:, :, None] + steps] = words

    def choose(self, draws: Draws, samples: Array, pairs: Array, most: int) -> tuple[Array, Array]:
        """The number of each pair's value word (B, P), and which pairs are asked for (B, Q)."""
        if self.layout == "shared":
            asked = draws.ranking(pairs[:, None], most, "queries", samples)[:, : self.queries]
            return draws.below(self.words, "values", samples, most), asked
        asked = draws.below(pairs[:, None], "queries", samples, self.queries)
        return draws.distinct(self.words, "values", samples, most), asked

    def places(self, draws: Draws, samples: Array, lengths: Array, longest: int) -> Array:
        """Where each pair starts within its source, (B, P): after the pairs before it and the spaces of the gaps before it."""
        pairs, most = self.pairs(lengths), self.pairs(longest)
        spaces = lengths - pairs * self.block
        count = int(spaces.max(initial=0))
        gaps = draws.below(pairs[:, None] + 1, "spaces", samples, count)  # (B, S), the gap of each space
        gaps = np.where(np.arange(count) < spaces[:, None], gaps, most + 1)  # a space too many counts nowhere
        cells = gaps + np.arange(len(samples))[:, None] * (most + 2)
        counts = np.bincount(cells.reshape(-1), minlength=len(samples) * (most + 2)).reshape(len(samples), most + 2)
        return np.arange(most) * self.block + np.cumsum(counts[:, :most], axis=1)

    def spell(self, kind: str, file: str) -> Array:
        """The tokens of every word of a file's vocabulary, "keys" or "values", (words, width)."""
        name = f"words|{self.vocabulary}" if self.layout == "shared" else f"words|{self.vocabulary}|{file}"
        return draw_words(kind, name, self.words, self.symbols, self.width) + np.int32(self.utilities)

    def judges(self, offsets: Array) -> Array:
        return offsets % (self.width + 1) != 0

    def target(self, source: list[int]) -> list[int]:
        bound: dict[tuple[int, ...], tuple[int, ...]] = {}
        answer: list[int] = []
        place = 0
        while place < len(source):
            token = source[place]
            if token == SPACE:
                place += 1
            elif token == ASKS:
                key = self._word_at(source, place + 1)
                if key not in bound:
                    raise ValueError(
                        f"the query {self.render(source[place : place + 1 + self.width])!r} asks for an unknown key"
                    )
                answer += [ASKS, *bound[key]]
                place += 1 + self.width
            else:
                key = self._word_at(source, place)
                value = self._word_at(source, place + self.width + 1)
                if source[place + self.width] != BINDS or source[place + 2 * self.width + 1 :][:1] != [SPACE]:
                    raise ValueError(f"{self.render(source[place : place + self.block])!r} is not a pair `key [1] value [0]`")
                if key in bound:
                    raise ValueError(f"the key {self.render(key)!r} is bound twice")
                bound[key] = value
                place += self.block
        return answer

    def _word_at(self, source: list[int], place: int) -> tuple[int, ...]:
        word = tuple(source[place : place + self.width])
        if len(word) < self.width or min(word) < self.utilities:
            raise ValueError(f"expected {self.width} symbols, got {self.render(word)!r} at token {place + 1} of the source")
        return word
