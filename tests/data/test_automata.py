"""Automata are drawn as told, made minimal without a change of language, and never counted twice."""

from itertools import combinations

import numpy as np
import pytest
from regular_oracle import reachable, to_dictionary, words

from compactattn.data import automata as module
from compactattn.data.automata import Automata, RegularLanguages, distinct_automata, draw_automata, minimise

DEFAULT = RegularLanguages()
SMALL = RegularLanguages(states=(2, 4), letters=(1, 2), edges=(1, 1))
MIXED = RegularLanguages(states=(3, 5), letters=(2, 3), edges=(1, 2))


def draw(languages, count):
    return draw_automata(languages, np.arange(count, dtype=np.uint64))


def test_an_automaton_is_drawn_within_its_bounds():
    drawn = draw(DEFAULT, 500)
    for which in range(500):
        edges = to_dictionary(drawn, which)
        assert 4 <= len(edges) <= 12
        assert sorted(edges) == list(range(len(edges)))
        assert len({letter for leaving in edges.values() for letter in leaving}) <= 18
        for state, leaving in edges.items():
            assert 1 <= len(leaving) <= 3  # the letters of a dictionary are distinct
            assert list(leaving) == sorted(leaving)
            assert len(set(leaving.values())) == len(leaving)
            assert set(leaving.values()) <= set(edges) - {state}
    assert drawn.degrees.sum() == (drawn.letters >= 0).sum()


def within(counts, expected):
    """Whether counts are those of a binomial distribution, each within five standard deviations."""
    return (np.abs(np.asarray(counts) - expected) < 5 * np.sqrt(expected)).all()


def test_sizes_degrees_letters_and_targets_are_uniform():
    drawn = draw(DEFAULT, 9000)
    assert within(np.bincount(drawn.sizes)[4:], 1000)
    degrees = drawn.degrees[drawn.degrees > 0]
    assert within(np.bincount(degrees)[1:], len(degrees) / 3)
    letters = drawn.letters[:, 0, :]
    assert within(np.bincount(letters[letters >= 0]), (letters >= 0).sum() / 18)
    largest = drawn[drawn.sizes == 12]
    targets = largest.targets[:, 5, :]
    assert within(np.delete(np.bincount(targets[targets >= 0]), 5), (targets >= 0).sum() / 11)


def test_the_alphabet_of_an_automaton_has_4_to_18_letters_with_the_same_probability():
    often = RegularLanguages(states=(120, 120))  # so many edges that every letter is used
    used = [int(np.bitwise_or.reduce(row)).bit_count() for row in draw(often, 300).legal]
    assert within(np.bincount(used)[4:], 20)


@pytest.mark.parametrize("languages", [SMALL, MIXED], ids=["small", "mixed"])
def test_minimising_keeps_the_language_and_no_two_states_are_the_same(languages):
    drawn = draw(languages, 150)
    minimal = minimise(drawn)
    merged = 0
    for which in range(150):
        before, after = to_dictionary(drawn, which), to_dictionary(minimal, which)
        length = len(before) + len(after) - 1  # two automata that differ do so on a word this short
        assert words(before, 0, length) == words(after, 0, length)
        residuals = {words(before, state, len(before)) for state in reachable(before)}
        assert len(after) == len(residuals)
        merged += len(after) < len(reachable(before))
        assert reachable(after) == list(range(len(after)))  # all of them, numbered breadth first
    assert merged > 10


def test_a_chain_is_taken_apart_from_its_end():
    """States of one and the same letter that differ only in what comes eleven steps later."""
    same, letters, targets = (np.zeros((1, 13, 1), np.int8) for _ in range(3))
    targets[0, :, 0] = [*range(1, 13), 0]
    assert minimise(Automata(same, targets)).sizes.tolist() == [1]
    letters[0, 12] = 1
    assert minimise(Automata(letters, targets)).sizes.tolist() == [13]


def test_two_automata_have_the_same_key_exactly_if_they_have_the_same_language():
    minimal = minimise(draw(SMALL, 60))
    keys, languages = minimal.keys(), [words(to_dictionary(minimal, which), 0, 8) for which in range(60)]
    same = 0
    for one, other in combinations(range(60), 2):
        assert (keys[one] == keys[other]) == (languages[one] == languages[other])
        same += keys[one] == keys[other]
    assert 0 < same < 60 * 59 / 2


def test_the_key_does_not_depend_on_how_states_were_numbered():
    drawn = draw(DEFAULT, 200)
    order = np.array([0, *(1 + np.random.default_rng(0).permutation(11))])  # the start stays
    targets = np.where(drawn.targets >= 0, np.argsort(order)[np.maximum(drawn.targets, 0)], -1)
    renamed = Automata(drawn.letters[:, order], targets[:, order].astype(np.int8))
    assert renamed.keys() != drawn.keys()
    assert minimise(renamed).keys() == minimise(drawn).keys()


def test_tables_and_legal_letters_say_what_the_edges_say():
    minimal = minimise(draw(DEFAULT, 50))
    tables = minimal.tables(18)
    for which in range(50):
        edges = to_dictionary(minimal, which)
        assert minimal.sizes[which] == len(edges)
        for state in range(12):
            leaving = edges.get(state, {})
            assert {a: int(t) for a, t in enumerate(tables[which, state]) if t >= 0} == leaving
            assert minimal.legal[which, state] == sum(1 << letter for letter in leaving)


def test_no_language_comes_twice_and_fewer_are_a_prefix_of_more():
    few, more = distinct_automata(MIXED, 30), distinct_automata(MIXED, 300)
    assert len(set(more[0].keys())) == 300
    assert few[0].keys() == more[0].keys()[:30]
    assert few[1].tolist() == more[1].tolist()[:30]
    every = minimise(draw(MIXED, int(more[1][-1]) + 1)).keys()
    firsts = [place for place, key in enumerate(every) if key not in every[:place]]
    assert more[1].tolist() == firsts
    assert len(every) > 300  # some were skipped


def test_how_many_are_drawn_at_a_time_changes_nothing(monkeypatch):
    automata, numbers = distinct_automata(MIXED, 200)
    monkeypatch.setattr(module, "CHUNK", 37)
    again, same = distinct_automata(MIXED, 200)
    assert again.keys() == automata.keys()
    assert same.tolist() == numbers.tolist()


def test_another_seed_draws_others():
    assert draw(DEFAULT, 20).keys() != draw(RegularLanguages(seed=1), 20).keys()


def test_too_few_languages_are_said_with_their_number():
    with pytest.raises(ValueError) as error:
        distinct_automata(RegularLanguages(states=(2, 2), letters=(1, 2), edges=(1, 1)), 9)
    assert str(error.value) == (
        "only 4 different automata were found among 4276 drawn, 9 are needed;"
        " ask for fewer examples or allow more states, letters or edges"
    )  # aaa…, bbb…, abab…, baba…


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"letters": (2, 18)},
            "3 edges of a state need as many distinct letters, but an automaton may have 2;"
            " raise the lower end of letters or lower the upper end of edges",
        ),
        (
            {"states": (3, 12)},
            "3 edges of a state need as many other states, but an automaton may have 3 states in all;"
            " raise the lower end of states or lower the upper end of edges",
        ),
        ({"states": (4.5, 6)}, "states = (4.5, 6) is no range; give two whole numbers 1 ≤ low ≤ high"),
        ({"states": (4, 5, 6)}, "states = (4, 5, 6) is no range; give two whole numbers 1 ≤ low ≤ high"),
        ({"states": 5}, "states = 5 is no range; give two whole numbers 1 ≤ low ≤ high"),
        ({"seed": "a"}, "seed = 'a' must be a whole number"),
        ({"edges": (0, 3)}, "edges = (0, 3) is no range; give two whole numbers 1 ≤ low ≤ high"),
        ({"strings": (5, 4)}, "strings = (5, 4) is no range; give two whole numbers 1 ≤ low ≤ high"),
        ({"letters": (4, 33)}, "letters = (4, 33) are too many; at most 32 are supported"),
        ({"states": (4, 128)}, "states = (4, 128) are too many; at most 127 are supported"),
        (
            {"strings": (1, 4)},
            "one string of one letter leaves nothing to predict; raise the lower end of strings or string_length",
        ),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError) as error:
        RegularLanguages(**changes)
    assert str(error.value) == message


def test_the_most_letters_that_are_allowed_work():
    drawn = draw(RegularLanguages(letters=(32, 32)), 100)
    assert drawn.legal.max() >= 2**31
    for which in range(100):
        edges = to_dictionary(drawn, which)
        assert drawn.legal[which, 0] == sum(1 << letter for letter in edges[0])
