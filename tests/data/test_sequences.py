"""Samples are numbered: no batch size, worker or rank can change them, and the test sets are frozen byte for byte."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from compactattn.data import sequences
from compactattn.data.frozen import CHECKSUMS
from compactattn.data.recall import Recall
from compactattn.data.sequences import FROZEN, TASKS, Sequences, TestSet, choose_task

NAMES = list(TASKS)
TRAINING = {  # digests of inputs, counted and judged of samples 1000 … 1255 of seed 7
    "mqmtar": "583a9330cea2d00ff609c12c593b10e01a3a3bcabd3b3349f2a0d430bfdef133",
    "mqmtar, shared words": "eca379f9eb21c361abc338e7366106b00fda62b38c7b59b85563fe6f9f55f062",
    "sort": "3a59519d7f909fb4cd7b2d0caa19afe126634ff17708cb488ce303613d441b8a",
    "reverse": "57b2b7d8cd10837491e367d7ef3a829e7d760040c0a5ffae7f58d242c9840539",
    "copy": "6f739676eadbb69e6989f5672bd464c40cf2ed46d0534dfbd0c69fe5499a7712",
}


def equal(batch, other):
    return all(torch.equal(part, same) for part, same in zip(batch, other, strict=True))


def joined(batches):
    return [torch.cat(parts) for parts in zip(*batches, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_targets_are_the_inputs_one_step_ahead(name):
    stream = Sequences(TASKS[name], 0)
    batch = stream.batch(0, 64)
    tokens, lengths = stream.tokens(0, 64)
    width = TASKS[name].prompt_length(64) + TASKS[name].answer_length(64) - 1
    assert all(part.shape == (64, width) for part in batch)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert batch.counted.dtype == batch.judged.dtype == torch.bool
    assert all(part.is_contiguous() for part in batch)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert np.array_equal(batch.inputs[:, 0], tokens[:, 0])
    assert np.array_equal(batch.targets, tokens[:, 1:])
    assert 32 <= lengths.min() < lengths.max() <= 64


@pytest.mark.parametrize("name", NAMES)
def test_exactly_what_follows_sep_is_counted(name):
    task = TASKS[name]
    batch = Sequences(task, 0).batch(0, 200)
    for inputs, targets, counted, judged in zip(*batch, strict=True):
        prompt, answer = task.split([*inputs.tolist(), int(targets[-1])])
        assert targets[counted].tolist() == answer == task.solve(prompt)
        assert int(inputs[counted][0]) == task.sep
        assert int(targets[counted][-1]) == task.eos
        assert set(targets[judged].tolist()) <= set(range(task.utilities, task.bos))
        assert not (judged & ~counted).any()
        assert task.pad not in targets[counted]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_its_batch(name):
    stream = Sequences(TASKS[name], 3)
    whole = stream.batch(0, 256)
    assert equal(whole, joined([stream.batch(i, 1) for i in range(256)]))
    assert equal(whole, joined([stream.batch(0, 100), stream.batch(100, 156)]))
    test = TestSet(TASKS[name], 64, 100)
    assert equal(test.batch(0, 100), joined(test.batches(7)))
    assert equal(test.batch(0, 100), joined(test.batches(1000)))


def test_a_sample_that_had_to_be_drawn_again_does_not_depend_on_its_batch():
    task = Recall(symbols=8, words=60, queries=1)  # 8 keys of 60 repeat in four samples of ten
    stream = Sequences(task, 3)
    assert equal(stream.batch(0, 256), joined([stream.batch(i, 1) for i in range(256)]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_a_batch_without_changing_it(ranks):
    stream, size, step = Sequences(TASKS["mqmtar"], 0), 64, 17
    share = size // ranks
    parts = [Sequences(TASKS["mqmtar"], 0).batch(step * size + rank * share, share) for rank in range(ranks)]
    assert equal(stream.batch(step * size, size), joined(parts))


def test_lengths_are_uniform_on_the_whole_range():
    _, lengths = Sequences(TASKS["copy"], 0, shortest=32, longest=64).tokens(0, 33_000)
    counts = np.bincount(lengths, minlength=66)
    assert counts[:32].sum() == counts[65:].sum() == 0
    assert ((counts[32:65] - 1000) ** 2 / 1000).sum() < 32 + 4 * np.sqrt(64)


def test_a_stream_of_one_length_and_an_empty_batch_are_fine():
    assert set(Sequences(TASKS["sort"], 0, 5, 5).tokens(0, 50)[1]) == {5}
    assert Sequences(TASKS["sort"], 0).batch(10, 0).inputs.shape == (0, 130)
    assert Sequences(TASKS["mqmtar"], 0).batch(10, 0).inputs.shape == (0, 90)


def test_samples_far_into_a_stream_are_still_new():
    stream = Sequences(TASKS["mqmtar"], 0)
    assert not equal(stream.batch(0, 4), stream.batch(2**32, 4))
    assert not equal(stream.batch(0, 4), stream.batch(2**62, 4))


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_repeats_within_or_across_seeds_training_and_tests(name):
    task = TASKS[name]
    sets = [Sequences(task, seed, 64, 64).tokens(0, 3000)[0] for seed in (0, 1, -1)]
    sets += [TestSet(task, 64, 1000).tokens(0, 1000), TestSet(task, 64, 1000, seed=1).tokens(0, 1000)]
    rows = [row.tobytes() for tokens in sets for row in tokens]
    assert len(set(rows)) == len(rows) == 11_000


def test_test_sets_of_two_lengths_do_not_share_their_sources():
    short, long = TestSet(TASKS["copy"], 64).tokens(0, 100), TestSet(TASKS["copy"], 128).tokens(0, 100)
    assert not (short[:, 1:65] == long[:, 1:65]).all(axis=1).any()


@pytest.mark.parametrize(("name", "length", "samples"), CHECKSUMS)
def test_the_published_test_sets_are_frozen(name, length, samples):
    TestSet(FROZEN[name], length, samples).verify()


def test_every_length_of_the_tables_and_up_to_65536_is_published():
    lengths = {name: {n for task, n, samples in CHECKSUMS if task == name and samples == 1000} for name in FROZEN}
    assert all(lengths[name] >= {64 * 2**i for i in range(7)} for name in FROZEN)
    assert 96 in lengths["reverse"]
    assert all((name, 64 * 2**i, 16) in CHECKSUMS for name in FROZEN for i in range(7, 11))


def test_a_checksum_is_the_digest_of_the_shape_and_the_tokens():
    test = TestSet(TASKS["mqmtar"], 64, 30)
    text = b"30 91\n" + test.tokens(0, 30).astype("<i4").tobytes()
    assert test.checksum() == hashlib.sha256(text).hexdigest()
    assert TestSet(TASKS["mqmtar"], 64, 29).checksum() != test.checksum()


@pytest.mark.parametrize("name", FROZEN)
def test_the_training_batches_are_frozen(name):
    batch = Sequences(FROZEN[name], 7).batch(1000, 256)
    digest = hashlib.sha256(batch.inputs.numpy().astype("<i4").tobytes())
    for mask in (batch.counted, batch.judged):
        digest.update(np.packbits(mask.numpy()).tobytes())
    assert digest.hexdigest() == TRAINING[name]


def test_a_changed_test_set_is_noticed(monkeypatch):
    test = TestSet(TASKS["sort"], 64)
    monkeypatch.setitem(CHECKSUMS, ("sort", 64, 1000), "0" * 64)
    with pytest.raises(ValueError) as error:
        test.verify()
    assert "sort at length 64 with 1000 samples is not the published test set" in str(error.value)
    assert "expected 000000000000" in str(error.value)


def test_a_set_that_is_not_the_published_one_has_no_checksum_on_record():
    for other in (
        TestSet(TASKS["mqmtar"], 64, 999),
        TestSet(TASKS["mqmtar"], 64, seed=1),
        TestSet(replace(TASKS["mqmtar"], density=0.7), 64),
    ):
        assert other.published is None
        with pytest.raises(ValueError, match="no checksum is on record for mqmtar at length 64"):
            other.verify()
    assert TestSet(replace(FROZEN["mqmtar, shared words"], density=0.7), 64).published is None


def test_each_layout_of_mqmtar_has_checksums_of_its_own():
    assert TestSet(TASKS["mqmtar"], 64).published == CHECKSUMS["mqmtar", 64, 1000]
    older = TestSet(choose_task("mqmtar", layout="shared"), 64).published
    assert older == CHECKSUMS["mqmtar, shared words", 64, 1000]
    assert older.startswith("7220631bb4e9")  # as in results/length-gen/mqmtar.jsonl


def test_a_test_set_says_where_its_prompts_end():
    for name in NAMES:
        test = TestSet(TASKS[name], 100, 5)
        tokens = test.tokens(0, 5)
        assert (tokens[:, test.prompt_length - 1] == test.task.sep).all()
        assert tokens.shape[1] == test.prompt_length + test.answer_length
        assert (tokens[:, -1] == test.task.eos).all()
        assert test.vocab == Sequences(test.task, 0).vocab == test.task.vocab


def test_a_task_is_chosen_by_name_and_changed_by_setting():
    small = choose_task("mqmtar", symbols=16, words=100, density=1)
    assert small == Recall(symbols=16, words=100, density=1)
    assert choose_task("reverse") is not None
    assert choose_task("reverse") == TASKS["reverse"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_task("srot"), "task 'srot' is unknown; choose one of mqmtar, sort, reverse, copy"),
        (lambda: choose_task("sort", words=3), "sort has no setting 'words'; it has symbols"),
        (lambda: choose_task("sort", symbols="3"), "symbols of sort must be a whole number, got '3'"),
        (lambda: choose_task("sort", symbols=3.5), "symbols of sort must be a whole number, got 3.5"),
        (lambda: choose_task("mqmtar", density=True), "density of mqmtar must be a number, got True"),
        (lambda: Sequences(TASKS["sort"], 0, 9, 8), "shortest = 9 is above longest = 8"),
        (lambda: Sequences(TASKS["sort"], 0, 0, 8), "a source of length 0 is empty"),
        (lambda: choose_task("mqmtar", layout=1), "layout of mqmtar must be text, got 1"),
        (lambda: Sequences(TASKS["mqmtar"], 0, 7, 64), "holds 0 pairs, too few for 4 queries"),
        (lambda: Sequences(FROZEN["mqmtar, shared words"], 0, 8, 64), "holds 1 pairs, too few for 4 queries"),
        (lambda: Sequences(choose_task("mqmtar", words=5), 0), "holds 8 pairs, but there are only 5 words"),
        (lambda: Sequences(TASKS["sort"], 0).batch(-1, 4), "samples are numbered from 0, got 4 samples from number -1"),
        (lambda: TestSet(TASKS["mqmtar"], 80_000), "holds 10666 pairs, but there are only 10000 words"),
        (lambda: TestSet(TASKS["sort"], 64, 0), "samples = 0 must be at least 1"),
        (lambda: TestSet(TASKS["sort"], 64, 10).batch(8, 3), "the test set has 10 samples, got 3 from number 8"),
        (lambda: next(TestSet(TASKS["sort"], 64).batches(0)), "a batch of 0 samples is empty"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_its_numbers(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_drawing_leaves_the_global_random_states_alone():
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1]  # noqa: NPY002
    sequences.Sequences(TASKS["mqmtar"], 0).batch(0, 8)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
