"""Intervals agree with published values and cover what they should."""

import math
import statistics

import pytest

from compactattn.evaluation.statistics import mean_interval, pooled_reach, summarise, t_interval, wilson_interval


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.95, 1, 12.706205), (0.95, 2, 4.302653), (0.95, 9, 2.262157), (0.95, 30, 2.042272), (0.99, 4, 4.604095)],
)
def test_t_interval_has_the_tabulated_quantile(level, freedom, expected):
    shares = [0.5 + 0.01 * (-1) ** i for i in range(freedom + 1)]
    low, high = t_interval(shares, level)
    spread = statistics.stdev(shares) / math.sqrt(len(shares))
    assert (high - low) / 2 / spread == pytest.approx(expected, abs=1e-5)
    assert (high + low) / 2 == pytest.approx(statistics.fmean(shares))


@pytest.mark.parametrize(
    ("right", "samples", "expected"),
    [
        (81, 263, (0.2553, 0.3662)),  # Newcombe (1998), Table I, method 3
        (15, 148, (0.0624, 0.1605)),
        (0, 20, (0.0, 0.1611)),
        (1, 29, (0.0061, 0.1718)),
    ],
)
def test_wilson_interval_is_the_published_one(right, samples, expected):
    assert wilson_interval(right, samples) == pytest.approx(expected, abs=5e-5)


def test_wilson_interval_stays_within_bounds_and_is_symmetric():
    for samples in (1, 7, 1000):
        for right in range(0, samples + 1, max(1, samples // 7)):
            low, high = wilson_interval(right, samples)
            assert 0 <= low <= right / samples <= high <= 1
            assert wilson_interval(samples - right, samples) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    assert wilson_interval(1000, 1000)[1] == 1
    assert wilson_interval(0, 1000)[0] == 0


def test_one_run_gets_the_interval_of_its_samples():
    summary = summarise([81], [263])
    assert (summary.mean, summary.maximum, summary.seeds) == (81 / 263, 81 / 263, 1)
    assert (summary.low, summary.high) == wilson_interval(81, 263)
    assert summary.interval == "Wilson interval over samples"


def test_several_runs_get_the_interval_of_their_mean():
    summary = summarise([900, 950, 700], [1000, 1000, 1000])
    assert (summary.mean, summary.maximum, summary.seeds) == (pytest.approx(0.85), 0.95, 3)
    assert (summary.low, summary.high) == t_interval([0.9, 0.95, 0.7])
    assert summary.high == 1  # clipped
    assert summary.interval == "t interval of the mean over seeds"


def test_runs_that_agree_have_no_spread():
    assert t_interval([1.0, 1.0, 1.0]) == (1, 1)
    assert t_interval([0.25, 0.25]) == (0.25, 0.25)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarise([], []), "got 0 counts and 0 numbers of samples; give one of each for every run"),
        (lambda: summarise([1], [2, 3]), "got 1 counts and 2 numbers of samples; give one of each for every run"),
        (lambda: wilson_interval(3, 2), "3 right of 2 samples is no share; samples must be ≥ 1 and 0 ≤ right ≤ samples"),
        (lambda: t_interval([0.5]), "1 values have no spread; a t interval needs at least two"),
        (lambda: wilson_interval(1, 2, level=1.0), "level = 1.0 must be between 0 and 1, for example 0.95"),
    ],
)
def test_what_has_no_interval_is_refused(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert str(error.value) == message


def test_an_interval_of_numbers_of_any_size_is_not_clipped():
    low, high = mean_interval([2.5, 2.6, 2.55])
    assert (low + high) / 2 == pytest.approx(2.55)
    assert high - low == pytest.approx(2 * 4.3027 * 0.05 / 3**0.5, rel=1e-4)
    assert t_interval([0.5, 0.9]) == (0.0, 1.0)


def test_the_reach_of_chance_pools_the_spread_within_groups():
    groups = [[1.0, 2.0, 3.0], [10.0, 12.0], [7.0]]  # squares 2 and 2 over three degrees of freedom
    assert pooled_reach(groups, 1, 1) == pytest.approx(3.1824 * (4 / 3) ** 0.5 * 2**0.5, rel=1e-4)
    assert pooled_reach(groups, 4, 4) == pytest.approx(pooled_reach(groups, 1, 1) / 2)
    assert pooled_reach([[1.0], [2.0], []], 1, 1) is None
