"""The few statistics that a benchmark needs: percentiles, intervals of means and of ratios, and the crossover."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table, the normal's is close enough.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ratio:
    """`value` = mean of one side over mean of the other; low and high bound it at 95 %, None without repeats."""

    value: float
    low: float | None
    high: float | None

    @property
    def within_noise(self) -> bool | None:
        """Whether no difference is as good an explanation; None when one run a side cannot tell."""
        if self.low is None or self.high is None:
            return None
        return self.low <= 1.0 <= self.high


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between neighbours, as numpy's default."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def t_quantile(degrees: float) -> float:
    """95 % two-sided; rounds the degrees of freedom down, which widens the interval."""
    whole = max(1, math.floor(degrees))
    return _T95[whole - 1] if whole <= len(_T95) else 1.96


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean; None for a single value."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * math.sqrt(_variance(values) / len(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """Ratio of two means with Welch's interval on the logarithms; all values positive."""
    value = mean(over) / mean(under)
    if len(over) < 2 or len(under) < 2:
        return Ratio(value, None, None)
    logs = [[math.log(v) for v in side] for side in (over, under)]
    parts = [_variance(side) / len(side) for side in logs]
    total = sum(parts)
    if total == 0:
        return Ratio(value, value, value)
    degrees = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True))
    centre, half = mean(logs[0]) - mean(logs[1]), t_quantile(degrees) * math.sqrt(total)
    return Ratio(value, math.exp(centre - half), math.exp(centre + half))


def crossover(speedups: Mapping[int, float]) -> float | None:
    """The concurrency at which a falling speedup passes 1, between two rungs on logarithmic axes.

    None when it stays above 1 on the whole ladder; the lowest rung when it is below 1 there already.
    """
    rungs = sorted(speedups)
    start = len(rungs)  # of the ladder's upper part in which nothing pays
    while start and speedups[rungs[start - 1]] < 1:
        start -= 1
    if start == len(rungs):
        return None
    if start == 0:
        return float(rungs[0])
    below, above = rungs[start - 1], rungs[start]
    gain, loss = math.log(speedups[below]), math.log(speedups[above])
    return math.exp(math.log(below) + gain / (gain - loss) * (math.log(above) - math.log(below)))


def _variance(values: Sequence[float]) -> float:
    centre = mean(values)
    return sum((v - centre) ** 2 for v in values) / (len(values) - 1)
