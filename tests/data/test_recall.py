"""Associative recall is written as published: pairs, spaces, queries, and answers that follow from the prompt."""

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from compactattn.data.draws import Draws
from compactattn.data.recall import Recall, draw_words
from compactattn.data.sequences import TASKS, Sequences, TestSet

MQMTAR = TASKS["mqmtar"]
SHARED = Recall(layout="shared")
LAYOUTS = {"published": MQMTAR, "shared": SHARED}
SMALL = Recall(symbols=8, words=8, width=1, queries=2)


def draw(task, lengths, longest=None):
    lengths = np.array(lengths)
    return task.tokens(Draws("test"), np.arange(len(lengths), dtype=np.uint64), lengths, longest or lengths.max())


def parse(task, row):
    """Keys, values, space runs before, between and after the pairs, and queried keys, by pattern matching on the text."""
    word = " ".join([r"\d+"] * task.width)
    source = task.render(row).split(" <sep> ")[0].removeprefix("<bos> ")
    source, queries = re.fullmatch(rf"(.*?)((?: \[2\] {word})+)", source).groups()
    assert re.fullmatch(rf"(?:\[0\] )*(?:{word} \[1\] {word} \[0\] ?(?:\[0\] ?)*)*", source)
    pairs = re.findall(rf"({word}) \[1\] ({word}) \[0\]", source)
    runs = [run.count("[0]") for run in re.split(rf"{word} \[1\] {word} \[0\]", source)]
    return [k for k, _ in pairs], [v for _, v in pairs], runs, re.findall(rf"\[2\] ({word})", queries)


def use(tokens, task=MQMTAR):
    """The words that samples are written with, as {"keys": set of texts, "values": set of texts}."""
    parsed = [parse(task, row) for row in tokens]
    return {kind: {word for sample in parsed for word in sample[part]} for part, kind in enumerate(("keys", "values"))}


def chi_square_is_small(counts):
    counts = np.asarray(counts, dtype=float)
    expected, freedom = counts.mean(), counts.size - 1
    return ((counts - expected) ** 2 / expected).sum() <= freedom + 4 * np.sqrt(2 * freedom)


def test_the_published_numbers():
    assert (MQMTAR.symbols, MQMTAR.words, MQMTAR.width, MQMTAR.queries, MQMTAR.density) == (256, 10_000, 2, 4, 0.8)
    assert [MQMTAR.pairs(n) for n in (32, 64, 128, 4096, 65_536)] == [4, 8, 17, 546, 8738]
    # 0.8 · 64 / 6 = 8 pairs of 6 tokens; prompt = <bos> + 64 + four queries of 3 + <sep>; answer = four times 3 + <eos>
    assert (MQMTAR.prompt_length(64), MQMTAR.answer_length(64)) == (78, 13)


def test_pairs_are_counted_exactly_as_the_density_is_written():
    lengths = np.arange(1, 70_000)
    assert np.array_equal(MQMTAR.pairs(lengths), 8 * lengths // 60)
    tenth = Recall(symbols=4, words=4, width=1, queries=1, density=0.3)
    assert np.array_equal(tenth.pairs(lengths), 3 * lengths // 40)
    third = Recall(density=1 / 3)
    assert np.array_equal(third.pairs(lengths), lengths // 18)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_a_vocabulary_is_ten_thousand_different_words_spread_over_all_symbols(kind):
    words = MQMTAR.spell(kind, "test")
    assert words.shape == (10_000, 2)
    assert np.unique(words, axis=0).shape == (10_000, 2)
    assert words.min() == 3
    assert words.max() == 258
    for place in range(2):
        assert chi_square_is_small(np.bincount(words[:, place] - 3, minlength=256))


def test_keys_and_values_have_vocabularies_of_their_own():
    for task in LAYOUTS.values():
        keys, values = task.spell("keys", "test"), task.spell("values", "test")
        assert not np.array_equal(keys, values)
        assert not np.array_equal(keys, replace(task, vocabulary=1).spell("keys", "test"))
    with pytest.raises(ValueError, match="read-only"):
        draw_words("keys", "words", 8, 8, 1)[0] = 1


def test_a_vocabulary_can_hold_every_word_there_is():
    assert sorted(map(tuple, draw_words("keys", "words", 27, 3, 3))) == [(i // 9, i // 3 % 3, i % 3) for i in range(27)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[32], [64] * 300, [*range(32, 65)] * 9, [400] * 20, [1024] * 5])
def test_a_sample_is_pairs_and_spaces_then_queries(lengths, layout):
    task = LAYOUTS[layout]
    vocabulary = {kind: {task.render(word) for word in task.spell(kind, "test")} for kind in ("keys", "values")}
    for row, n in zip(draw(task, lengths), lengths, strict=True):
        keys, values, runs, queried = parse(task, row)
        assert len(keys) == len(values) == int(0.8 * n / 6)
        assert len(set(keys)) == len(keys)
        assert vocabulary["keys"].issuperset(keys)
        assert vocabulary["values"].issuperset(values)
        assert 6 * len(keys) + sum(runs) == n
        assert len(queried) == 4
        assert set(queried) <= set(keys)
        answer = MQMTAR.render(row).split(" <sep> ")[1].split(" <eos>")
        assert answer[0] == " ".join(f"[2] {values[keys.index(key)]}" for key in queried)
        assert set(answer[1].split()) <= {"<pad>"}


def test_the_values_of_a_sample_differ_and_its_queries_may_repeat():
    parsed = [parse(MQMTAR, row) for row in draw(MQMTAR, [64] * 2000)]
    assert all(len(set(values)) == 8 for _, values, _, _ in parsed)
    assert all(len(set(values)) == 682 for _, values, _, _ in [parse(MQMTAR, row) for row in draw(MQMTAR, [5120] * 5)])
    different = np.mean([len(set(queried)) == 4 for *_, queried in parsed])
    assert different == pytest.approx(8 * 7 * 6 * 5 / 8**4, abs=0.05)  # four independent queries of eight pairs


def test_shared_words_have_values_that_may_repeat_and_queries_that_do_not():
    small = Recall(symbols=8, words=8, width=1, queries=4, layout="shared")
    parsed = [parse(small, row) for row in draw(small, [40] * 200)]
    assert any(len(set(values)) < 8 for _, values, _, _ in parsed)
    assert all(len(set(queried)) == 4 for *_, queried in parsed)


SETTINGS = [
    (MQMTAR, 64),
    (MQMTAR, 4096),
    (MQMTAR, 65_536),
    (SMALL, 40),
    (Recall(symbols=16, words=256, queries=1), 24),
    (Recall(symbols=6, words=30, width=3, queries=2, density=1), 240),
    (Recall(symbols=16, words=16, width=1, queries=3, density=0.5), 33),
    (Recall(symbols=8, words=8, width=1, queries=5), 6),  # one pair, asked for five times
    (SHARED, 64),
    (SHARED, 4096),
]


@pytest.mark.parametrize(("task", "length"), SETTINGS)
def test_the_solver_of_recall_agrees_with_the_labels(task, length):
    for row in draw(task, [length] * max(2, min(1000, 40_000 // length))):
        prompt, answer = task.split(row)
        assert len(prompt) == task.prompt_length(length)
        assert len(answer) == task.answer_length(length)
        assert task.solve(prompt) == answer


def test_the_solver_of_recall_agrees_with_the_labels_of_mixed_lengths():
    for row in Sequences(MQMTAR, 5).tokens(0, 1000)[0]:
        prompt, answer = MQMTAR.split(row)
        assert MQMTAR.solve(prompt) == answer


def test_the_solver_knows_the_drawn_example():
    sample = next(line.strip() for line in Recall.__doc__.splitlines() if "<bos>" in line)
    prompt, answer = MQMTAR.split(MQMTAR.read(sample))
    assert MQMTAR.solve(prompt) == answer
    assert MQMTAR.render(answer) == "[2] 250 13 [2] 5 88 <eos>"


def test_only_the_symbols_of_values_are_judged():
    lengths = np.array([32, 40])
    tokens = draw(MQMTAR, lengths)
    counted, judged = MQMTAR.masks(lengths, tokens.shape[1] - 1)
    for row, counts, judges in zip(tokens, counted, judged, strict=True):
        answer = MQMTAR.split(row)[1]
        assert row[1:][counts].tolist() == answer
        assert row[1:][judges].tolist() == [token for token in answer if 3 <= token < 259]
        assert judges.sum() == 8
        assert counts.sum() == 13


def test_a_key_is_bound_to_another_value_in_another_sample():
    seen = {}
    for row in draw(SMALL, [40] * 50):
        for key, value in zip(*parse(SMALL, row)[:2], strict=True):
            seen.setdefault(key, set()).add(value)
    assert all(len(values) == 8 for values in seen.values())
    assert len(seen) == 8


def test_spaces_fall_evenly_before_between_and_after_the_pairs():
    runs = np.array([parse(MQMTAR, row)[2] for row in draw(MQMTAR, [64] * 2000)])  # 16 spaces over 9 gaps
    assert runs.shape == (2000, 9)
    assert chi_square_is_small(runs.sum(axis=0))
    # sixteen independent spaces of chance 1/9 each, not one arrangement for all samples
    assert abs(runs.var() - 16 * 1 / 9 * 8 / 9) < 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_pair_is_asked_for_equally_often_and_in_any_order(layout):
    places = []
    for row in draw(LAYOUTS[layout], [64] * 2000):
        keys, _, _, queried = parse(MQMTAR, row)
        places.append([keys.index(key) for key in queried])
    for column in np.array(places).T:
        assert chi_square_is_small(np.bincount(column, minlength=8))


def test_every_word_is_used_equally_often():
    task = Recall(symbols=4, words=16, queries=1)
    parsed = [parse(task, row) for row in draw(task, [64] * 500)]
    for part in (0, 1):
        _, counts = np.unique([words for sample in parsed for words in sample[part]], return_counts=True)
        assert counts.size == 16
        assert chi_square_is_small(counts)


def test_training_and_every_test_have_words_of_their_own():
    files = [use(Sequences(MQMTAR, seed, 64, 64).tokens(0, 400)[0]) for seed in (0, 1)]
    files += [use(TestSet(MQMTAR, n, seed=seed).tokens(0, 3200 // (n // 8))) for n, seed in ((64, 0), (64, 1), (128, 0))]
    for one, other in combinations(files, 2):
        for kind in ("keys", "values"):
            chance = len(one[kind]) * len(other[kind]) / 256**2  # about 112; of the same 10,000 words it would be 730
            assert len(one[kind] & other[kind]) == pytest.approx(chance, abs=6 * np.sqrt(chance))


def test_a_file_keeps_its_words_from_its_first_sample_to_its_last():
    task = Recall(symbols=16, words=20, queries=1)
    for draw_from in (
        lambda first: Sequences(task, 1).tokens(first, 200)[0],
        lambda first: TestSet(task, 64).tokens(first, 200),
    ):
        early, late = use(draw_from(0), task), use(draw_from(800), task)
        assert early == late
        assert len(early["keys"]) == len(early["values"]) == 20


def test_shared_words_are_the_same_in_training_and_tests():
    task = Recall(symbols=16, words=20, queries=1, layout="shared")
    words = {kind: {task.render(word) for word in task.spell(kind, "any")} for kind in ("keys", "values")}
    sets = (Sequences(task, 1).tokens(0, 200)[0], Sequences(task, 2).tokens(0, 200)[0], TestSet(task, 64).tokens(0, 200))
    for tokens in sets:
        assert use(tokens, task) == words


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"words": 0}, "words = 0 must be at least 1"),
        ({"width": 0}, "width = 0 must be at least 1"),
        ({"queries": 0}, "queries = 0 must be at least 1"),
        ({"symbols": 0}, "symbols = 0 must be at least 1"),
        ({"density": 0}, "density = 0 must lie between 0.001 and 1"),
        ({"density": 1.1}, "density = 1.1 must lie between"),
        ({"density": float("nan")}, "density = nan must lie between"),
        (
            {"symbols": 16},
            "16 symbols spell only 256 different words of width 2, not 10000; lower words or raise symbols or width",
        ),
        ({"layout": "fresh"}, "layout = 'fresh' is unknown; choose published or shared"),
        ({"width": 4}, "256 symbols to the power of width 4 exceed 2^24 words; lower one of the two"),
    ],
)
def test_an_impossible_task_is_refused_with_its_numbers(settings, message):
    with pytest.raises(ValueError) as error:
        Recall(**settings)
    assert message in str(error.value)


def test_a_source_too_short_for_its_queries_names_the_least_length():
    with pytest.raises(ValueError) as error:
        SHARED.check(29)
    assert "holds 3 pairs, too few for 4 queries; use a length of at least 30 or fewer queries" in str(error.value)
    SHARED.check(30)
    with pytest.raises(ValueError) as error:
        MQMTAR.check(7)
    assert str(error.value).endswith("holds 0 pairs, too few for 4 queries; use a length of at least 8")
    MQMTAR.check(8)


def test_a_source_with_more_pairs_than_words_is_refused():
    MQMTAR.check(75_000)
    with pytest.raises(ValueError) as error:
        MQMTAR.check(75_008)
    assert "holds 10001 pairs, but there are only 10000 words for their keys; shorten it or raise words" in str(error.value)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("1 2 [1] 3 4 [0] [2] 1 3", "the query '[2] 1 3' asks for an unknown key"),
        ("1 2 [1] 3 4 [0] 1 2 [1] 5 6 [0]", "the key '1 2' is bound twice"),
        ("1 2 [1] 3 4 5", "'1 2 [1] 3 4 5' is not a pair"),
        ("1 2 [1] 3 4", "'1 2 [1] 3 4' is not a pair"),
        ("1 2 [0] 3 4 [0]", "is not a pair `key [1] value [0]`"),
        ("1 2 [1] 3", "expected 2 symbols, got '3' at token 4"),
        ("1 [1] 3 4 [0]", "expected 2 symbols, got '1 [1]' at token 1"),
        ("[2] 1", "expected 2 symbols, got '1' at token 2"),
    ],
)
def test_the_solver_refuses_a_malformed_prompt(prompt, message):
    with pytest.raises(ValueError) as error:
        MQMTAR.solve(MQMTAR.read_prompt(prompt))
    assert message in str(error.value)


def test_a_word_that_is_no_token_names_what_is():
    with pytest.raises(ValueError) as error:
        MQMTAR.read("17 [3]")
    assert "word 2, '[3]', is not a token of mqmtar; write numbers from 0 to 255, [0] to [2], <bos>" in str(error.value)
