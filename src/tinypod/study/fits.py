"""Curves through what variants reached: power laws of size, the critical batch size, the Pareto front.

Both laws are fitted to logarithms, because seeds scatter by a share of the value and not by a fixed amount. An interval
comes from the covariance of the least-squares fit, with the t distribution of the points less the two parameters.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

from tinypod.study.results import Direction
from tinypod.study.statistics import CONFIDENCE

MIN_LEVELS = 3  # two points lie on any curve of two parameters
_BENDS_P = 0.05
_FAR = 10.0  # a critical batch this many times outside the batches tried is a guess


@dataclass(frozen=True)
class Interval:
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class PowerLaw:
    """value = scale · size^exponent."""

    scale: float
    exponent: Interval
    num_points: int
    num_levels: int
    bends_p: float | None  # of the lack-of-fit test; None without seeds to compare with
    covariance: np.ndarray  # of (log scale, exponent)
    df: int

    @property
    def bends(self) -> bool:
        """The levels leave the line by more than the seeds explain."""
        return self.bends_p is not None and self.bends_p < _BENDS_P

    def band(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The curve, with the interval of its mean."""
        design = _design(sizes)
        centre = np.log(self.scale) + self.exponent.value * np.log(sizes)
        reach = _t(self.df) * np.sqrt(np.einsum("ni,ij,nj->n", design, self.covariance, design))
        return np.exp(centre), np.exp(centre - reach), np.exp(centre + reach)


def fit_power_law(sizes: Sequence[float], values: Sequence[float]) -> PowerLaw | None:
    """Of positive values, one a run. None for fewer than three sizes.

    Where there are seeds, the lack-of-fit F test asks whether the sizes' means lie on the line. If they do not, runs of
    one size err together, so the fit goes through the means of the sizes alone: its interval is wider.
    """
    x, y = np.log(np.asarray(sizes, np.float64)), np.log(np.asarray(values, np.float64))
    levels, index = np.unique(x, return_inverse=True)
    if len(levels) < MIN_LEVELS:
        return None
    means = np.bincount(index, y) / np.bincount(index)
    coefficients, covariance, df = _line(x, y)
    bends_p = _lack_of_fit(y - np.stack([np.ones_like(x), x], 1) @ coefficients, y - means[index], len(levels))
    if bends_p is not None and bends_p < _BENDS_P:
        coefficients, covariance, df = _line(levels, means)
    reach = _t(df) * float(np.sqrt(covariance[1, 1]))
    slope = float(coefficients[1])
    exponent = Interval(slope, slope - reach, slope + reach)
    return PowerLaw(float(np.exp(coefficients[0])), exponent, len(x), len(levels), bends_p, covariance, df)


@dataclass(frozen=True)
class CriticalBatch:
    """steps(batch) = steps_min · (1 + batch_crit / batch): McCandlish et al. 2018 (arXiv 1812.06162)."""

    steps_min: Interval
    batch_crit: Interval
    num_points: int
    determined: bool  # the batches tried reach from one end of the curve to the other

    def at(self, batches: np.ndarray) -> np.ndarray:
        return self.steps_min.value * (1 + self.batch_crit.value / batches)


def fit_critical_batch(batches: Sequence[float], steps: Sequence[float]) -> CriticalBatch | None:
    """Of the steps that runs needed to reach the target. None for fewer than three batch sizes, or no fit."""
    x, y = np.asarray(batches, np.float64), np.log(np.asarray(steps, np.float64))
    if len(np.unique(x)) < MIN_LEVELS:
        return None

    def law(batch: np.ndarray, log_steps: float, log_crit: float) -> np.ndarray:
        return log_steps + np.logaddexp(0.0, log_crit - np.log(batch))

    start = (float(y.min()) - np.log(2.0), float(np.log(np.median(x))))
    # Far outside the batches the curve is a straight line and its bend could lie anywhere: bounds keep exp() finite.
    limits = np.log([x.min() / 1e4, x.max() * 1e4])
    bounds = ([-np.inf, limits[0]], [np.inf, limits[1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optimize.OptimizeWarning)  # no covariance: infinite, and so not determined
        try:
            found, covariance = optimize.curve_fit(law, x, y, p0=start, bounds=bounds, max_nfev=10_000)
        except RuntimeError:  # it does not converge
            return None
    steps_min, batch_crit = (_from_log(found[i], covariance[i, i], len(x) - 2) for i in (0, 1))
    inside = x.min() / _FAR <= batch_crit.value <= x.max() * _FAR
    known = np.isfinite(batch_crit.high) and batch_crit.high <= _FAR**2 * batch_crit.low
    determined = bool(inside and known)
    return CriticalBatch(steps_min, batch_crit, len(x), determined)


def pareto_front(costs: Sequence[float], values: Sequence[float], direction: Direction) -> list[bool]:
    """Which points no other beats: none is at least as good for at most the cost, and better in one of the two."""
    sign = 1.0 if direction == "max" else -1.0
    points = [(cost, -sign * value) for cost, value in zip(costs, values, strict=True)]
    return [not any(o[0] <= p[0] and o[1] <= p[1] and o != p for o in points) for p in points]


def _design(sizes: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(sizes), np.log(sizes)], 1)


def _line(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    design = np.stack([np.ones_like(x), x], 1)
    coefficients = np.linalg.lstsq(design, y)[0]
    df = len(x) - 2
    variance = float(((y - design @ coefficients) ** 2).sum()) / df
    return coefficients, variance * np.linalg.inv(design.T @ design), df


def _lack_of_fit(residuals: np.ndarray, within: np.ndarray, num_levels: int) -> float | None:
    """The p-value; None where no size has two runs that differ."""
    pure, pure_df = float((within**2).sum()), len(within) - num_levels
    lack, lack_df = float((residuals**2).sum()) - pure, num_levels - 2
    if pure_df == 0 or pure <= 1e-20:
        return None
    return float(stats.f.sf(max(0.0, lack) / lack_df / (pure / pure_df), lack_df, pure_df))


def _from_log(log_value: float, variance: float, df: int) -> Interval:
    with np.errstate(over="ignore"):
        reach = _t(df) * np.sqrt(variance)
        return Interval(*(float(np.exp(log_value + part)) for part in (0.0, -reach, reach)))


def _t(df: int) -> float:
    return float(stats.t.ppf(0.5 + CONFIDENCE / 2, df))
