"""The points of reference are what they claim: recomputed with dictionaries, and blind to what comes later."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from compactattn.data.automata import RegularLanguages
from compactattn.data.regbench import load_regbench
from compactattn.evaluation.predictors import PREDICTORS, filter_states, predict_ngrams
from compactattn.evaluation.regbench import evaluate_predictor

SMALL = RegularLanguages(states=(3, 6), letters=(2, 5), edges=(1, 2), strings=(3, 6), string_length=(1, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(folder):
    return load_regbench(5, SMALL, validation=5, test=40, folder=folder).test


def strings_so_far(tokens, separator):
    parts = [[]]
    for token in tokens:
        parts.append([]) if token == separator else parts[-1].append(token)
    return parts


def ngram_slowly(tokens, separator, order):
    """From all strings so far, counted anew: what followed the last letters of the current one; `^` pads its start."""
    padded = [["^"] * (order - 1) + string for string in strings_so_far(tokens, separator)]
    estimate = dict.fromkeys(range(separator), 1 / separator)
    for size in range(order):
        context = tuple(padded[-1][len(padded[-1]) - size :])
        followers = Counter(
            string[end]
            for string in padded
            for end in range(order - 1, len(string))
            if tuple(string[end - size : end]) == context
        )
        total = sum(followers.values())
        estimate = {letter: (followers[letter] + p) / (total + 1) for letter, p in estimate.items()}
    return [estimate[letter] for letter in range(separator)]


def filter_slowly(table, tokens, separator):
    """Every state as a start, each path weighted by its probability."""
    string = strings_so_far(tokens, separator)[-1]
    states = [state for state in range(len(table)) if max(table[state]) >= 0]
    total = np.zeros(separator)
    for start in states:
        state, weight = start, 1.0
        for letter in string:
            weight /= sum(target >= 0 for target in table[state])
            state = table[state][letter]
            if state < 0:
                break
        else:
            may = [target >= 0 for target in table[state]]
            total += weight * np.array(may) / sum(may)
    return total / total.sum()


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_ngrams_are_those_of_counting_anew_at_every_position(small, order):
    found = predict_ngrams(small, 5, 8, order)
    for row, which in enumerate(range(5, 13)):
        for time in range(int(small.lengths[which]) - 1):
            expected = ngram_slowly(small.tokens[which, : time + 1].tolist(), 5, order)
            assert found[row, time, :5] == pytest.approx(expected, rel=1e-12), (which, time)


def test_the_state_filter_is_the_sum_over_all_starts(small):
    found = filter_states(small, 5, 12)
    tables = small.automata.tables(5).tolist()
    for row, which in enumerate(range(5, 17)):
        for time in range(int(small.lengths[which]) - 1):
            expected = filter_slowly(tables[which], small.tokens[which, : time + 1].tolist(), 5)
            assert found[row, time, :5] == pytest.approx(expected, rel=1e-9, abs=1e-12), (which, time)


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_predictor_gives_probabilities_and_no_separator(small, name):
    found = PREDICTORS[name](small, 3, 10)
    assert found.shape == (10, small.width, small.vocab)
    there = small.legal(3, 10) != 0
    assert found[there].sum(1) == pytest.approx(np.ones(there.sum()))
    assert (found >= 0).all()
    if name != "uniform":
        assert not found[:, :, small.languages.separator :].any()


@pytest.mark.parametrize("name", PREDICTORS)
def test_no_predictor_reads_what_comes_later(small, name):
    cut = 12
    tokens = small.tokens.copy()
    tokens[:, cut:] = np.random.default_rng(0).permuted(tokens[:, cut:], axis=0)
    changed = replace(small, tokens=tokens)
    before, after = PREDICTORS[name](small, 0, 40), PREDICTORS[name](changed, 0, 40)
    assert np.array_equal(before[:, :cut], after[:, :cut])


@pytest.mark.parametrize("name", PREDICTORS)
def test_an_example_does_not_depend_on_its_chunk(small, name):
    whole = PREDICTORS[name](small, 0, 40)
    parts = [PREDICTORS[name](small, first, count) for first, count in [(0, 1), (1, 30), (31, 9)]]
    assert np.allclose(whole, np.concatenate(parts), rtol=1e-13, atol=0)


def test_more_knowledge_scores_better_on_the_published_test_set(folder):
    examples = load_regbench(5, folder=folder).test
    part = replace(
        examples, tokens=examples.tokens[:100], states=examples.states[:100], lengths=examples.lengths[:100],
        automata=examples.automata[:100],
    )  # fmt: skip
    scores = [evaluate_predictor(PREDICTORS[name], part) for name in ("uniform", "2-gram", "3-gram", "state filter", "oracle")]
    for worse, better in pairwise(scores):
        assert worse.every.accuracy < better.every.accuracy
        assert worse.every.tvd > better.every.tvd
        assert worse.loss > better.loss


def test_an_order_below_one_is_refused(small):
    with pytest.raises(ValueError) as error:
        predict_ngrams(small, 0, 1, 0)
    assert str(error.value) == "order = 0 must be at least 1"
