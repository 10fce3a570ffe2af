"""Random numbers are pure functions of what they are for, evenly spread, and the same everywhere."""

import numpy as np
import pytest

from compactattn.data.draws import GOLDEN, Draws, mix

SAMPLES = np.arange(4096, dtype=np.uint64)
BITS = [[2099793577411807295, 5487980438683972036], [16726390558000283654, 5235848535021652727]]
BELOW = [[1138, 2975, 7736], [9067, 2838, 2780]]


def is_even(counts):
    """Whether counts could come from equally likely cells: chi-square within four deviations of its mean."""
    counts = np.asarray(counts, dtype=float)
    expected = counts.sum() / counts.size
    assert expected >= 5, "too few draws to tell"
    freedom = counts.size - 1
    return ((counts - expected) ** 2 / expected).sum() <= freedom + 4 * np.sqrt(2 * freedom)


def test_the_measure_of_evenness_sees_a_small_bias():
    assert is_even([1000, 1010, 990, 1000])
    assert not is_even([1000, 1200, 1000, 1000])


def test_mix_is_the_finaliser_of_splitmix64():
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    states = np.uint64(1234567) + np.arange(1, 6, dtype=np.uint64) * GOLDEN
    assert mix(states).tolist() == known


def test_the_numbers_are_frozen():
    assert Draws("a").bits("b", np.array([0, 7], np.uint64), 2).tolist() == BITS
    assert Draws("a").below(10_000, "b", np.array([0, 7], np.uint64), 3).tolist() == BELOW


def test_a_number_depends_on_name_purpose_attempt_sample_and_position_and_on_nothing_else():
    whole = Draws("a").bits("b", SAMPLES, 5)
    assert np.array_equal(Draws("a").bits("b", SAMPLES[1000:1010], 3), whole[1000:1010, :3])
    for other in (Draws("c").bits("b", SAMPLES, 5), Draws("a").bits("c", SAMPLES, 5), Draws("a").bits("b", SAMPLES, 5, 1)):
        assert not np.intersect1d(whole, other).size
    assert np.unique(whole).size == whole.size


@pytest.mark.parametrize("first", [0, 2**40, 2**63])
def test_every_bit_is_fair_and_independent_of_its_neighbours(first):
    numbers = Draws("a").bits("b", SAMPLES + np.uint64(first), 64)
    for words in (numbers, numbers[1:] ^ numbers[:-1], numbers[:, 1:] ^ numbers[:, :-1]):
        bits = np.unpackbits(words.view(np.uint8)).reshape(-1, 64)
        deviation = 0.5 / np.sqrt(len(bits))
        assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * deviation


@pytest.mark.parametrize("bound", [1, 2, 3, 32, 33, 256, 10_000])
def test_integers_below_a_bound_are_uniform(bound):
    drawn = Draws("a").below(bound, "b", SAMPLES, 64)
    assert drawn.dtype == np.int64
    assert drawn.min() == 0
    assert drawn.max() == bound - 1
    assert bound == 1 or is_even(np.bincount(drawn.ravel()))


def test_each_sample_can_have_its_own_bound():
    bounds = np.array([[1], [5], [2**32]])
    drawn = Draws("a").below(bounds, "b", SAMPLES[:3], 2000)
    assert drawn[0].max() == 0
    assert np.array_equal(np.unique(drawn[1]), np.arange(5))
    assert drawn[2].max() > 2**31
    assert (drawn < bounds).all()


# pairs of numbers on either side of the change from drawing again to ranking, and the extremes
@pytest.mark.parametrize(
    ("bound", "count"), [(1, 1), (7, 1), (2, 2), (6, 3), (5, 3), (10_000, 8), (9_900, 100), (9_899, 100), (50, 50)]
)
def test_distinct_integers_are_distinct_and_within_bounds(bound, count):
    drawn = Draws("a").distinct(bound, "b", SAMPLES[:500], count)
    assert drawn.shape == (500, count)
    assert drawn.min() >= 0
    assert drawn.max() < bound
    assert all(np.unique(row).size == count for row in drawn)


@pytest.mark.parametrize(("bound", "count"), [(12, 4), (11, 4)])  # drawn again, ranked
def test_every_arrangement_of_distinct_integers_is_equally_likely(bound, count):
    samples = np.arange(60_000, dtype=np.uint64)
    drawn = Draws("a").distinct(bound, "b", samples, count)
    for one, other in ((0, 1), (1, 3), (3, 2)):
        cells = np.bincount(drawn[:, one] * bound + drawn[:, other], minlength=bound**2).reshape(bound, bound)
        assert not np.diag(cells).any()
        assert is_even(cells[~np.eye(bound, dtype=bool)])


@pytest.mark.parametrize(("bound", "count"), [(60, 8), (20, 8)])
def test_distinct_integers_do_not_depend_on_the_other_samples(bound, count):
    whole = Draws("a").distinct(bound, "b", SAMPLES[:300], count)
    alone = [Draws("a").distinct(bound, "b", SAMPLES[i : i + 1], count)[0] for i in range(300)]
    assert np.array_equal(whole, alone)


def test_a_ranking_holds_the_integers_below_the_size_of_each_sample():
    sizes = np.array([[1], [4], [9], [16]])
    ranking = Draws("a").ranking(sizes, 16, "b", SAMPLES[:4])
    for row, (size,) in zip(ranking, sizes, strict=True):
        assert sorted(row[:size]) == list(range(size))


def test_a_ranking_is_uniform_for_samples_of_any_size():
    samples = np.arange(24_000, dtype=np.uint64)
    sizes = np.where(samples % np.uint64(2), 5, 3)[:, None]
    ranking = Draws("a").ranking(sizes, 5, "b", samples)
    for size in (3, 5):
        rows = ranking[sizes[:, 0] == size]
        for place in range(size):
            assert is_even(np.bincount(rows[:, place], minlength=size))


def test_no_samples_and_no_numbers_are_fine():
    assert Draws("a").distinct(10, "b", SAMPLES[:0], 3).shape == (0, 3)
    assert Draws("a").below(10, "b", SAMPLES[:2], 0).shape == (2, 0)
    assert Draws("a").ranking(np.zeros((0, 1), int), 4, "b", SAMPLES[:0]).shape == (0, 4)
