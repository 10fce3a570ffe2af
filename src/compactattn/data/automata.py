"""Random automata: drawn many at a time, made minimal, and told apart by their canonical form.

An automaton has edges (state, letter) → state, starts in state 0 and accepts in every state: its language is what its walks
spell. Two states are the same when the same walks leave them; the minimal automaton merges those and drops what no walk
reaches. Numbered breadth first from the start, letters in order, it is one table per language.

Shapes: N automata, S states, E edges of a state, A letters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from string import ascii_letters

import numpy as np

from compactattn.data.draws import Array, Draws

CHUNK = 4096  # automata drawn at one time
MOST = {"letters": 32, "states": 127}  # the legal letters of a state are the bits of a uint32; its number is an int8


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


@dataclass(frozen=True)
class RegularLanguages:
    """How languages and their examples are drawn, each number uniformly from its range (both ends included).

    The defaults are those of RegBench. A language uses some of the letters 0 … letters[1] − 1. The seed belongs to the data.
    """

    states: tuple[int, int] = (4, 12)  # before they are merged
    letters: tuple[int, int] = (4, 18)
    edges: tuple[int, int] = (1, 3)  # of each state, with distinct letters, to distinct other states
    strings: tuple[int, int] = (10, 19)  # in an example
    string_length: tuple[int, int] = (1, 49)
    seed: int = 0

    def __post_init__(self) -> None:
        if not _is_whole(self.seed):
            raise ValueError(f"seed = {self.seed!r} must be a whole number")
        for field in fields(self)[:-1]:
            ends = getattr(self, field.name)
            if not (isinstance(ends, tuple) and len(ends) == 2 and all(map(_is_whole, ends)) and 1 <= ends[0] <= ends[1]):
                raise ValueError(f"{field.name} = {ends!r} is no range; give two whole numbers 1 ≤ low ≤ high")
            low, high = ends
            if high > MOST.get(field.name, high):
                raise ValueError(f"{field.name} = ({low}, {high}) are too many; at most {MOST[field.name]} are supported")
        if self.edges[1] > self.letters[0]:
            raise ValueError(
                f"{self.edges[1]} edges of a state need as many distinct letters, but an automaton may have {self.letters[0]};"
                " raise the lower end of letters or lower the upper end of edges"
            )
        if self.edges[1] > self.states[0] - 1:
            raise ValueError(
                f"{self.edges[1]} edges of a state need as many other states, but an automaton may have {self.states[0]} states"
                " in all; raise the lower end of states or lower the upper end of edges"
            )
        if self.strings[0] == self.string_length[0] == 1:
            raise ValueError(
                "one string of one letter leaves nothing to predict; raise the lower end of strings or string_length"
            )

    @property
    def separator(self) -> int:
        return self.letters[1]

    @property
    def padding(self) -> int:
        return self.letters[1] + 1

    @property
    def vocab(self) -> int:
        return self.letters[1] + 2

    @property
    def longest(self) -> int:
        """Tokens of the longest possible example."""
        return self.strings[1] * (self.string_length[1] + 1) - 1

    @property
    def draws(self) -> Draws:
        return Draws(f"regbench|{self.seed}")

    @property
    def signs(self) -> str:
        """What each token is written as: letters from a on, | and the dot of padding."""
        return ascii_letters[: self.letters[1]] + "|."

    def render(self, tokens: Iterable[int]) -> str:
        return "".join(self.signs[token] for token in tokens)

    def read(self, text: str) -> list[int]:
        """The tokens of strings such as "cafca|caf|ch"; spaces say nothing."""
        text = text.replace(" ", "")
        for sign in text:
            if sign not in self.signs[:-1]:
                raise ValueError(f"{sign!r} in {text!r} is no letter from a to {self.signs[self.letters[1] - 1]}, nor |")
        return [self.signs.index(sign) for sign in text]


@dataclass(frozen=True, eq=False)
class Automata:
    """N automata as tables; the edges of a state are ordered by letter, and an edge that is not there is −1."""

    letters: Array  # (N, S, E) int8
    targets: Array  # (N, S, E) int8

    def __len__(self) -> int:
        return len(self.letters)

    def __getitem__(self, which: slice | Array) -> Automata:
        return Automata(self.letters[which], self.targets[which])

    @cached_property
    def degrees(self) -> Array:
        """Edges of each state, (N, S) int64; a state without any is not there."""
        return (self.letters >= 0).sum(2)

    @cached_property
    def sizes(self) -> Array:
        """States of each automaton, (N,) int64."""
        return (self.degrees > 0).sum(1)

    @cached_property
    def legal(self) -> Array:
        """The letters that may follow each state as the bits of a number, (N, S) uint32."""
        bits = np.left_shift(np.uint32(1), np.maximum(self.letters, 0).astype(np.uint32))
        return np.where(self.letters >= 0, bits, np.uint32(0)).sum(2, dtype=np.uint32)

    def tables(self, alphabet: int) -> Array:
        """The state that each letter leads to, (N, S, A) int8, or −1."""
        table = np.full((*self.letters.shape[:2], alphabet), -1, np.int8)
        there = self.letters >= 0
        automaton, state, _ = np.nonzero(there)
        table[automaton, state, self.letters[there]] = self.targets[there]
        return table

    def keys(self) -> list[bytes]:
        """One string of bytes for each automaton; equal keys mean equal tables."""
        flat = np.concatenate([self.letters, self.targets], 2).reshape(len(self), -1)
        return [row.tobytes() for row in flat]


def draw_automata(languages: RegularLanguages, samples: Array) -> Automata:
    """The automata numbered `samples` (N,) uint64 as drawn, not yet minimal. Each depends on its number alone."""
    draws, states, edges = languages.draws, languages.states[1], languages.edges[1]

    def between(bounds: tuple[int, int], purpose: str, samples: Array) -> Array:
        return bounds[0] + draws.below(bounds[1] - bounds[0] + 1, purpose, samples, 1)  # (N, 1)

    sizes = between(languages.states, "states", samples)
    letters = between(languages.letters, "letters", samples)
    everyone = np.full((len(samples), 1), languages.letters[1])
    alphabet = draws.ranking(everyone, languages.letters[1], "alphabet", samples)  # its first `letters` are used

    own = (samples[:, None] * np.uint64(states) + np.arange(states, dtype=np.uint64)).ravel()  # one number per state
    degrees = between(languages.edges, "edges", own).reshape(-1, states)
    degrees[np.arange(states) >= sizes] = 0
    there = np.arange(edges) < degrees[:, :, None]  # (N, S, E)

    chosen = draws.ranking(np.repeat(letters, states, 0), languages.letters[1], "edge letters", own)[:, :edges]
    chosen = np.take_along_axis(alphabet, np.minimum(chosen, languages.letters[1] - 1).reshape(len(samples), -1), 1)
    others = draws.ranking(np.repeat(sizes - 1, states, 0), states - 1, "edge targets", own)[:, :edges]
    others = others.reshape(-1, states, edges)
    others += others >= np.arange(states)[:, None]  # leave the state itself out

    spelled = np.where(there, chosen.reshape(there.shape), languages.letters[1])  # what is not there comes last
    order = np.argsort(spelled, 2, kind="stable")
    spelled = np.take_along_axis(np.where(there, spelled, -1), order, 2)
    targets = np.take_along_axis(np.where(there, others, -1), order, 2)
    return Automata(spelled.astype(np.int8), targets.astype(np.int8))


def minimise(automata: Automata) -> Automata:
    """The minimal automata of the same languages in canonical form (see above); all tables keep their shape."""
    count, states, edges = automata.letters.shape
    every = np.arange(count)
    merged = _merge(automata)
    number = np.full((count, states + 1), -1)
    number[:, 0] = 0
    queue, found = np.zeros((count, states), np.int64), np.ones(count, np.int64)
    for place in range(states):
        for edge in range(edges):
            target = merged[every, queue[:, place], edge]
            new = np.flatnonzero((place < found) & (target < states) & (number[every, target] < 0))
            number[new, target[new]] = queue_end = found[new]
            queue[new, queue_end] = target[new]
            found[new] += 1
    reached = (np.arange(states) < found[:, None])[:, :, None]
    letters = np.where(reached, automata.letters[every[:, None], queue], -1)
    targets = np.where(reached, number[every[:, None, None], merged[every[:, None], queue]], -1)
    return Automata(letters.astype(np.int8), targets.astype(np.int8))


def _merge(automata: Automata) -> Array:
    """The targets (N, S, E) with each state replaced by the first one that is the same; S where there is no edge.

    Moore's algorithm on pairs: two states are apart if other letters may follow, or if a letter leads to states that are apart.
    States with the same letters have them in the same order, so edge e of one is to be compared with edge e of the other.
    """
    count, states, _ = automata.letters.shape
    targets = np.where(automata.targets >= 0, automata.targets, states).astype(np.int64)
    apart = np.zeros((count, states + 1, states + 1), bool)
    apart[:, :states, :states] = automata.legal[:, :, None] != automata.legal[:, None, :]
    open_ = np.arange(count)  # automata that may still change
    while open_.size:
        near, old = targets[open_], apart[open_]
        here = np.arange(len(open_))[:, None, None, None]
        new = old.copy()
        new[:, :states, :states] |= old[here, near[:, :, None, :], near[:, None, :, :]].any(3)
        apart[open_] = new
        open_ = open_[(new != old).any((1, 2))]
    first = np.append(apart[:, :states, :states].argmin(2), np.full((count, 1), states), 1)  # (N, S + 1)
    return first[np.arange(count)[:, None, None], targets]


def distinct_automata(languages: RegularLanguages, count: int) -> tuple[Automata, Array]:
    """The first `count` different minimal automata (N = count) and their numbers (N,) uint64.

    An automaton is skipped if one with a smaller number has the same language, so fewer of them are a prefix of more.
    """
    parts: list[Automata] = []
    numbers: list[Array] = []
    missing = count
    for automata, samples in _fresh(languages, 20 * count + CHUNK):
        parts.append(automata[:missing])
        numbers.append(samples[:missing])
        missing -= len(parts[-1])
        if not missing:
            letters, targets = (np.concatenate([getattr(part, name) for part in parts]) for name in ("letters", "targets"))
            return Automata(letters, targets), np.concatenate(numbers)
    raise ValueError(
        f"only {count - missing} different automata were found among {20 * count + CHUNK} drawn, {count} are needed;"
        " ask for fewer examples or allow more states, letters or edges"
    )


def _fresh(languages: RegularLanguages, tries: int) -> Iterator[tuple[Automata, Array]]:
    """Minimal automata whose language did not occur before, with their numbers, out of the first `tries`."""
    seen: set[bytes] = set()
    for first in range(0, tries, CHUNK):
        samples = np.arange(first, min(first + CHUNK, tries), dtype=np.uint64)
        automata = minimise(draw_automata(languages, samples))
        fresh = []
        for place, key in enumerate(automata.keys()):
            if key not in seen:
                seen.add(key)
                fresh.append(place)
        chosen = np.array(fresh, dtype=np.int64)
        yield automata[chosen], samples[chosen]
