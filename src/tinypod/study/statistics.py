"""What seeds say: means with their spread, and differences with intervals.

Intervals are Welch's: two variants need not have the same spread nor the same number of seeds. Every interval is at
95 % by itself; `holm` is for the verdict over many of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
POWER = 0.8
MOST_SEEDS = 1000  # more are not searched for


@dataclass(frozen=True)
class Spread:
    """Of values over seeds; sd is that of a sample (divided by n − 1), None for fewer than two values."""

    n: int
    mean: float
    sd: float | None


def spread(values: Sequence[float]) -> Spread | None:
    """None for no values."""
    if not len(values):
        return None
    return Spread(len(values), float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


@dataclass(frozen=True)
class Difference:
    """Second mean less the first, with Welch's interval."""

    difference: float
    low: float
    high: float
    p: float  # of no difference, two-sided
    df: float

    @property
    def tells_apart(self) -> bool:
        return not self.low <= 0.0 <= self.high


def welch(first: Spread, second: Spread) -> Difference | None:
    """None where there is no spread to judge by: fewer than two values in either, or all equal in both."""
    if first.sd is None or second.sd is None:
        return None
    parts = first.sd**2 / first.n, second.sd**2 / second.n
    error = math.sqrt(sum(parts))
    difference = second.mean - first.mean
    if error <= 1e-12 * max(abs(first.mean), abs(second.mean)):  # also where equal values differ in their last bit
        return None
    df = sum(parts) ** 2 / (parts[0] ** 2 / (first.n - 1) + parts[1] ** 2 / (second.n - 1))
    reach = float(stats.t.ppf(0.5 + CONFIDENCE / 2, df)) * error
    p = 2 * float(stats.t.sf(abs(difference) / error, df))
    return Difference(difference, difference - reach, difference + reach, p, df)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: below 0.05 for any of them, with at most 5 % chance where there is no difference."""
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def seeds_needed(difference: float, first_sd: float, second_sd: float) -> int | None:
    """Seeds of each variant to tell a true difference of this size apart four times in five. None: over a thousand.

    The power of the t test at these sds, by the noncentral t distribution.
    """
    if difference == 0.0:
        return None
    variance = first_sd**2 + second_sd**2
    counts = np.arange(2, MOST_SEEDS + 1, dtype=np.float64)
    df = (counts - 1) * variance**2 / (first_sd**4 + second_sd**4)
    centre = abs(difference) / np.sqrt(variance / counts)
    limit = stats.t.ppf(0.5 + CONFIDENCE / 2, df)
    # From the far side comes nothing that matters, and scipy's noncentral cdf there may be nan.
    enough = np.flatnonzero((stats.nct.sf(limit, df, centre) >= POWER) | (centre - limit > 8))
    return int(counts[enough[0]]) if len(enough) else None
