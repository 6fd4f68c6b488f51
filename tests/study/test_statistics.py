import numpy as np
import pytest
from scipy import stats

from tinypod.study.statistics import Spread, holm, seeds_needed, spread, welch

# Student's sleep data (R's `sleep`): hours gained with two drugs. R: t.test(extra ~ group).
FIRST = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
SECOND = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def test_mean_and_sd_of_a_sample() -> None:
    assert spread([2.0, 4.0, 9.0]) == Spread(3, 5.0, pytest.approx(13.0**0.5))  # (9 + 1 + 16) / 2
    assert spread([0.25]) == Spread(1, 0.25, None)
    assert spread([]) is None


def test_welch_gives_what_r_prints_for_the_sleep_data() -> None:
    found = welch(spread(FIRST), spread(SECOND))
    assert found.difference == pytest.approx(1.58)
    assert found.df == pytest.approx(17.776, abs=5e-4)
    assert found.p == pytest.approx(0.07939, abs=5e-6)
    assert (found.low, found.high) == pytest.approx((-0.2054832, 3.3654832), abs=5e-8)
    assert not found.tells_apart


@pytest.mark.parametrize("sizes", [(2, 2), (3, 5), (7, 2)])
def test_welch_is_scipys_with_unequal_spreads_and_numbers(sizes: tuple[int, int]) -> None:
    random = np.random.default_rng(sum(sizes))
    first, second = random.normal(0, 1, sizes[0]), random.normal(1, 4, sizes[1])
    found = welch(spread(first), spread(second))
    wanted = stats.ttest_ind(second, first, equal_var=False)
    interval = wanted.confidence_interval()
    assert (found.p, found.df) == pytest.approx((wanted.pvalue, wanted.df))
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_no_interval_without_a_spread() -> None:
    assert welch(Spread(1, 0.5, None), Spread(3, 0.6, 0.1)) is None
    assert welch(Spread(3, 0.5, 0.1), Spread(1, 0.6, None)) is None
    assert welch(spread([0.1] * 3), spread([0.3] * 3)) is None  # all equal, but for the last bit of a sum
    assert welch(spread([1.0, 1.0]), spread([0.5, 0.6])) is not None


def test_welch_covers_the_truth_19_times_in_20() -> None:
    random, covered = np.random.default_rng(0), 0
    for _ in range(1000):
        found = welch(spread(random.normal(0, 1, 4)), spread(random.normal(2, 3, 6)))
        covered += found.low <= 2.0 <= found.high
    assert 930 <= covered <= 970  # 950 ± 3 standard errors


def test_holm_by_hand() -> None:
    # Sorted: 0.005·4, 0.01·3, 0.03·2, and 0.04·1 raised to the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("effect", "seeds"), [(0.5, 64), (0.8, 26), (1.0, 17)])  # Cohen's tables for 80 % power
def test_seeds_needed_are_those_of_power_tables(effect: float, seeds: int) -> None:
    assert seeds_needed(effect, 1.0, 1.0) == seeds
    assert seeds_needed(-effect * 0.01, 0.01, 0.01) == seeds


def test_seeds_needed_at_the_ends() -> None:
    assert seeds_needed(0.0, 1.0, 1.0) is None
    assert seeds_needed(0.001, 1.0, 1.0) is None
    assert seeds_needed(1000.0, 1.0, 1.0) == 2
    assert seeds_needed(1.0, 0.0, 0.2) is not None
