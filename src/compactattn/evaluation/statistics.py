"""What counts and seeds say about a probability: an interval for one run, and one for the mean of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True)
class Summary:
    """Shares of right answers over seeds: their mean and maximum, and an interval for the mean."""

    mean: float
    maximum: float
    low: float
    high: float
    seeds: int

    @property
    def interval(self) -> str:
        """Which interval it is, for a caption."""
        return "Wilson interval over samples" if self.seeds == 1 else "t interval of the mean over seeds"


def summarise(right: Sequence[int], samples: Sequence[int], level: float = LEVEL) -> Summary:
    """Mean and maximum of right/samples over runs, with a confidence interval.

    One run: the Wilson interval of a binomial share, which says how well the samples pin down this
    model. Two runs or more: Student's t interval of the mean over seeds, clipped to [0, 1], which
    says how well these seeds pin down the recipe; the runs' own sampling error is part of their spread.
    """
    if not right or len(right) != len(samples):
        raise ValueError(f"got {len(right)} counts and {len(samples)} numbers of samples; give one of each for every run")
    shares = [count / total for count, total in zip(right, samples, strict=True)]
    mean = math.fsum(shares) / len(shares)
    low, high = wilson_interval(right[0], samples[0], level) if len(shares) == 1 else t_interval(shares, level)
    return Summary(mean, max(shares), low, high, len(shares))


def wilson_interval(right: int, samples: int, level: float = LEVEL) -> tuple[float, float]:
    """(low, high) for the probability behind `right` of `samples`.

    The p with |p̂ − p| ≤ z·√(p(1−p)/n): (p̂ + z²/2n ± z·√(p̂(1−p̂)/n + z²/4n²)) / (1 + z²/n).
    """
    if samples < 1 or not 0 <= right <= samples:
        raise ValueError(f"{right} right of {samples} samples is no share; samples must be ≥ 1 and 0 ≤ right ≤ samples")
    z = _normal_quantile(level)
    share = right / samples
    centre = share + z * z / (2 * samples)
    reach = z * math.sqrt(share * (1 - share) / samples + (z / (2 * samples)) ** 2)
    scale = 1 + z * z / samples
    low, high = (centre - reach) / scale, (centre + reach) / scale
    return (0.0 if right == 0 else max(0.0, low)), (1.0 if right == samples else min(1.0, high))


def t_interval(shares: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """(low, high) for the mean of two or more shares, mean ± t·s/√n, clipped to [0, 1]."""
    low, high = mean_interval(shares, level)
    return max(0.0, low), min(1.0, high)


def mean_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """(low, high) for the mean of two or more numbers of any size, mean ± t·s/√n."""
    count = len(values)
    if count < 2:
        raise ValueError(f"{count} values have no spread; a t interval needs at least two")
    mean, variance = math.fsum(values) / count, _squares(values) / (count - 1)
    reach = _t_quantile(level, count - 1) * math.sqrt(variance / count)
    return mean - reach, mean + reach


def pooled_reach(groups: Sequence[Sequence[float]], first: int, second: int, level: float = LEVEL) -> float | None:
    """How far apart chance alone puts two means, of `first` and of `second` numbers: t·s·√(1/first + 1/second).

    s is the spread within all groups of two or more together, which is taken to be the same everywhere, so that it also
    judges a mean of a single number. None where no group has two.
    """
    freedom = sum(len(group) - 1 for group in groups if group)
    if not freedom:
        return None
    deviation = math.sqrt(math.fsum(_squares(group) for group in groups if group) / freedom)
    return _t_quantile(level, freedom) * deviation * math.sqrt(1 / first + 1 / second)


def _squares(values: Sequence[float]) -> float:
    """The sum of squared distances to the mean."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values)


def _normal_quantile(level: float) -> float:
    """z with P(|Z| ≤ z) = level."""
    return _bisect(lambda z: math.erf(z / math.sqrt(2)), level)


def _t_quantile(level: float, freedom: int) -> float:
    """t with P(|T| ≤ t) = level for Student's distribution of whole degrees of freedom."""
    return _bisect(lambda t: _t_mass(t, freedom), level)


def _t_mass(t: float, freedom: int) -> float:
    """P(|T| ≤ t), a finite sum in x = arctan(t/√ν) (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    x = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term, total = (math.cos(x) if odd else 1.0), 0.0
    for step in range(freedom // 2):
        total += term
        term *= math.cos(x) ** 2 * (2 * step + 1 + odd) / (2 * step + 2 + odd)
    return 2 / math.pi * (x + math.sin(x) * total) if odd else math.sin(x) * total


def _bisect(mass: Callable[[float], float], level: float) -> float:
    """The t ≥ 0 at which a growing function with mass(0) = 0 and mass(∞) = 1 reaches the level."""
    if not 0 < level < 1:
        raise ValueError(f"level = {level} must be between 0 and 1, for example 0.95")
    low, high = 0.0, 1.0
    while mass(high) < level:
        high *= 2
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return middle
        low, high = (middle, high) if mass(middle) < level else (low, middle)
