"""Every example belongs to its automaton, no split depends on another's size, and a seed means the same bytes everywhere."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from regular_oracle import legal_after, to_dictionary, words

from compactattn.data import regbench
from compactattn.data.automata import RegularLanguages
from compactattn.data.regbench import Epochs, Examples, load_regbench

SMALL = RegularLanguages(states=(3, 5), letters=(2, 5), edges=(1, 2), strings=(2, 4), string_length=(1, 6))
CHECKSUMS = {  # of the held-out sets of 500 at the defaults; raise regbench.VERSION when they change
    "test": "43aa6d48d50416b95c555c50901e951955ebd962d7be39d47719c5b6eedfa17a",
    "validation": "8ccc8943f258a4d08014c6cb9045a635d94689e0691a8674658efa4a977d1f78",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def small(folder):
    return load_regbench(60, SMALL, validation=20, test=20, folder=folder)


@pytest.fixture(scope="module")
def default(folder):
    return load_regbench(50, folder=folder)


def strings_of(examples, which):
    """The strings of an example, as lists of letters."""
    parts = [[]]
    for token in examples.tokens[which, : examples.lengths[which]].tolist():
        if token == examples.languages.separator:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


def letters_of(mask):
    return {letter for letter in range(32) if int(mask) >> letter & 1}


def joined(batches):
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


def equal(batch, other):
    return all(torch.equal(part, same) for part, same in zip(batch, other, strict=True))


def test_every_string_is_a_word_of_its_automaton(small):
    for examples in small:
        for which in range(examples.samples):
            edges = to_dictionary(examples.automata, which)
            language = words(edges, 0, 6)
            assert all(tuple(string) in language for string in strings_of(examples, which))


@pytest.mark.parametrize("name", ["small", "default"])
def test_the_legal_letters_are_those_that_a_walk_allows(name, request):
    examples = request.getfixturevalue(name).test
    legal = examples.legal(0, 20)
    for which in range(20):
        edges = to_dictionary(examples.automata, which)
        expected = []
        for index, string in enumerate(strings_of(examples, which)):
            starts = range(1 if index == 0 else 0, len(string) + 1)  # nothing comes before the very first letter
            expected += [legal_after(edges, string[:end]) for end in starts]
        expected.pop()  # after the last letter nothing is predicted
        assert [letters_of(mask) for mask in legal[which, : len(expected)]] == expected
        assert len(expected) == examples.lengths[which] - 1
        assert not legal[which, len(expected) :].any()


def test_the_numbers_and_lengths_of_strings_are_uniform_on_their_ranges(folder):
    examples = load_regbench(4000, folder=folder, validation=1, test=1).train
    numbers = (examples.tokens == 18).sum(1) + 1
    counts = np.bincount(numbers, minlength=20)
    assert counts[:10].sum() == 0
    assert (np.abs(counts[10:] - 400) < 5 * 20).all()
    lengths = np.bincount([len(string) for which in range(500) for string in strings_of(examples, which)])
    assert (lengths[0], len(lengths)) == (0, 50)
    expected = lengths.sum() / 49
    assert (np.abs(lengths[1:] - expected) < 5 * np.sqrt(expected)).all()
    assert examples.tokens.max() == 19
    assert abs(examples.lengths.mean() - (14.5 * 25 + 13.5)) < 5 * examples.lengths.std() / np.sqrt(4000)


def test_every_legal_letter_is_equally_likely_to_follow(default):
    examples = default.test
    legal, targets = examples.legal(0, 500), examples.batch(0, 500).targets.numpy()
    masks, following = legal[targets < 18], targets[targets < 18]
    ordered = [sorted(letters_of(mask)) for mask in masks]
    for size in (2, 3):
        rank = [may.index(letter) for may, letter in zip(ordered, following, strict=True) if len(may) == size]
        counts = np.bincount(rank)
        assert len(counts) == size
        assert (np.abs(counts - len(rank) / size) < 5 * np.sqrt(len(rank) / size)).all()


def test_no_language_is_shared_between_or_within_splits(small, default):
    for splits in (small, default):
        keys = [key for examples in splits for key in examples.automata.keys()]  # noqa: SIM118
        assert len(set(keys)) == len(keys) == sum(examples.samples for examples in splits)


def test_held_out_sets_are_the_same_for_every_number_of_training_examples(small, folder):
    more = load_regbench(150, SMALL, validation=20, test=20, folder=folder)
    assert more.test.checksum() == small.test.checksum()
    assert more.validation.checksum() == small.validation.checksum()
    assert np.array_equal(more.train.lengths[:60], small.train.lengths)
    for which in range(60):
        assert strings_of(more.train, which) == strings_of(small.train, which)
        assert to_dictionary(more.train.automata, which) == to_dictionary(small.train.automata, which)


def test_the_held_out_sets_are_the_published_ones_byte_for_byte(default):
    assert {examples.split: examples.checksum() for examples in default[1:]} == CHECKSUMS


def test_how_many_are_drawn_at_a_time_changes_nothing(small, monkeypatch, tmp_path):
    monkeypatch.setattr(regbench, "EXAMPLES_AT_ONCE", 7)
    again = load_regbench(60, SMALL, validation=20, test=20, folder=tmp_path)
    assert [examples.checksum() for examples in again] == [examples.checksum() for examples in small]


def test_the_checksum_sees_tokens_and_legal_letters(small):
    tokens, states = small.test.tokens.copy(), small.test.states.copy()
    tokens[3, 1] = 0 if tokens[3, 1] else 1
    assert replace(small.test, tokens=tokens).checksum() != small.test.checksum()
    states[4, 0] = next(s for s in range(5) if small.test.automata.legal[4, s] != small.test.automata.legal[4, states[4, 0]])
    assert replace(small.test, states=states).checksum() != small.test.checksum()
    whole = hashlib.sha256(f"20 {small.test.width}\n".encode())
    whole.update(small.test.tokens.tobytes() + small.test.legal(0, 20).astype("<u4").tobytes())
    assert small.test.checksum() == whole.hexdigest()


def test_what_is_cached_is_read_back_the_same_and_another_seed_is_not_it(small, folder, monkeypatch):
    monkeypatch.setattr(regbench, "_draw", pytest.fail)
    again = load_regbench(60, SMALL, validation=20, test=20, folder=folder)
    assert [examples.checksum() for examples in again] == [examples.checksum() for examples in small]
    monkeypatch.undo()
    other = load_regbench(60, replace(SMALL, seed=1), validation=20, test=20, folder=folder)
    assert other.test.checksum() != small.test.checksum()


def test_exactly_letters_are_counted(small):
    examples = small.train
    batch = examples.batch(0, 60)
    assert all(part.shape == (60, examples.width) and part.is_contiguous() for part in batch)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal(batch.counted, batch.judged)
    for which in range(60):
        strings = strings_of(examples, which)
        letters = [letter for string in strings for letter in string]
        assert batch.targets[which][batch.counted[which]].tolist() == letters[1:]
        assert int(batch.inputs[which, 0]) == letters[0]
        assert (examples.legal(which, 1)[0] != 0).sum() == len(letters) - 1 + len(strings) - 1
        assert (batch.targets[which, examples.lengths[which] - 1 :] == examples.languages.padding).all()


def test_ids_are_letters_then_separator_then_padding():
    languages = RegularLanguages()
    assert (languages.separator, languages.padding, languages.vocab, languages.longest) == (18, 19, 20, 949)


def test_an_epoch_visits_every_example_once_and_each_in_its_own_order(small):
    stream, size = Epochs(small.train, 0), 60
    known = {row.tobytes(): which for which, row in enumerate(small.train.batch(0, size).inputs.numpy())}
    orders = [[known[row.tobytes()] for row in stream.batch(epoch * size, size).inputs.numpy()] for epoch in range(3)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(size))}) == 4
    other = [known[row.tobytes()] for row in Epochs(small.train, 1).batch(0, size).inputs.numpy()]
    assert other != orders[0]


def test_a_sample_does_not_depend_on_its_batch(small):
    stream = Epochs(small.train, 3)
    assert stream.vocab == 7
    whole = stream.batch(0, 200)
    assert equal(whole, joined([stream.batch(i, 1) for i in range(200)]))
    assert equal(whole, joined([stream.batch(0, 59), stream.batch(59, 100), stream.batch(159, 41)]))
    assert equal(small.test.batch(0, 20), joined(small.test.batches(7)))


def test_every_batch_has_the_width_that_was_asked_for(small):
    wide, plain = Epochs(small.train, 0, width=40).batch(50, 20), Epochs(small.train, 0).batch(50, 20)
    narrow = small.train.width
    assert all(part.shape == (20, 40) for part in wide)
    assert torch.equal(wide.inputs[:, :narrow], plain.inputs)
    assert (wide.targets[:, narrow:] == 6).all()
    assert torch.equal(wide.counted[:, :narrow], plain.counted)
    assert not wide.counted[:, narrow:].any()


def test_bad_numbers_are_refused(small, folder):
    for wrong, message in [
        (lambda: Epochs(small.train, 0, width=5), f"width = 5 is too small for examples of {small.train.width} positions"),
        (lambda: Epochs(small.train, 0).batch(-1, 5), "samples are numbered from 0, got 5 samples from number -1"),
        (lambda: small.test.batch(18, 3), "the test split has 20 examples, got 3 from number 18"),
        (lambda: next(small.test.batches(0)), "a batch of 0 examples is empty; choose a size of at least 1"),
        (lambda: load_regbench(0, SMALL, folder=folder), "train = 0 must be at least 1 example"),
    ]:
        with pytest.raises(ValueError) as error:
            wrong()
        assert str(error.value) == message


def test_a_file_with_other_arrays_is_damaged(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(regbench, "_draw", lambda languages, count: {"tokens": np.zeros(3)})
    with pytest.raises(ValueError, match="is damaged"):
        load_regbench(5, SMALL, folder=tmp_path)


def test_examples_cannot_be_changed_by_accident(small):
    assert isinstance(small.test, Examples)
    with pytest.raises(ValueError, match="read-only"):
        small.test.tokens[0, 0] = 1
