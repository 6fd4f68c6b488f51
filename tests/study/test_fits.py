import numpy as np
import pytest
from scipy import stats

from tinypod.study.fits import fit_critical_batch, fit_power_law, pareto_front

SIZES = [32.0, 64.0, 128.0, 256.0]


def test_a_power_law_without_noise_is_found_exactly() -> None:
    fit = fit_power_law(SIZES, [3.0 * size**-0.7 for size in SIZES])
    assert (fit.scale, fit.exponent.value) == pytest.approx((3.0, -0.7))
    assert (fit.exponent.low, fit.exponent.high) == pytest.approx((-0.7, -0.7), abs=1e-6)
    centre, low, high = fit.band(np.array([100.0]))
    assert centre[0] == pytest.approx(3.0 * 100**-0.7)
    assert low[0] == pytest.approx(high[0])
    assert fit.bends_p is None  # one seed a size says nothing


def test_the_interval_is_that_of_a_line_through_logarithms() -> None:
    random = np.random.default_rng(1)
    sizes = np.repeat(SIZES, 3)
    values = 2.0 * sizes**-0.4 * np.exp(0.1 * random.normal(size=len(sizes)))
    fit, line = fit_power_law(sizes, values), stats.linregress(np.log(sizes), np.log(values))
    reach = stats.t.ppf(0.975, len(sizes) - 2) * line.stderr
    assert not fit.bends
    found = (fit.exponent.value, fit.exponent.low, fit.exponent.high)
    assert found == pytest.approx((line.slope, line.slope - reach, line.slope + reach))
    assert fit.scale == pytest.approx(np.exp(line.intercept))


def test_exponents_are_covered_19_times_in_20() -> None:
    random, covered, bends = np.random.default_rng(2), 0, 0
    sizes = np.repeat(SIZES, 3)
    for _ in range(400):
        fit = fit_power_law(sizes, 2.0 * sizes**-0.5 * np.exp(0.2 * random.normal(size=len(sizes))))
        covered += fit.exponent.low <= -0.5 <= fit.exponent.high
        bends += fit.bends
    assert covered >= 367  # 380 less 3 standard errors; more is fine: a bend seen by chance widens
    assert 7 <= bends <= 33  # 20 ± 3 standard errors


def test_a_law_that_levels_off_is_said_to_bend_and_its_interval_is_wider() -> None:
    random = np.random.default_rng(3)
    sizes = np.repeat([16.0, 32.0, 64.0, 128.0, 256.0], 3)
    noise = np.exp(0.01 * random.normal(size=len(sizes)))
    fit = fit_power_law(sizes, (0.1 + 8.0 / sizes) * noise)
    assert fit.bends
    assert fit.df == 3  # five means less two parameters
    by_runs = stats.linregress(np.log(sizes), np.log((0.1 + 8.0 / sizes) * noise))
    assert fit.exponent.high - fit.exponent.value > 1.5 * stats.t.ppf(0.975, 13) * by_runs.stderr


def test_two_sizes_are_no_law() -> None:
    assert fit_power_law([1.0, 1.0, 2.0, 2.0], [4.0, 4.1, 2.0, 2.1]) is None
    assert fit_power_law([], []) is None


def test_the_critical_batch_is_found() -> None:
    batches = np.repeat([32.0, 64.0, 128.0, 256.0, 512.0, 1024.0], 3)
    random = np.random.default_rng(4)
    exact = 100.0 * (1 + 200.0 / batches)
    fit = fit_critical_batch(batches, exact)
    assert (fit.steps_min.value, fit.batch_crit.value) == pytest.approx((100.0, 200.0), rel=1e-4)
    fit = fit_critical_batch(batches, exact * np.exp(0.05 * random.normal(size=len(batches))))
    assert fit.determined
    assert fit.batch_crit.low < 200 < fit.batch_crit.high
    assert fit.batch_crit.high / fit.batch_crit.low < 1.5
    assert fit.steps_min.low < 100 < fit.steps_min.high
    assert fit.at(np.array([fit.batch_crit.value]))[0] == pytest.approx(2 * fit.steps_min.value)


def test_critical_batches_are_covered_19_times_in_20() -> None:
    random, covered = np.random.default_rng(5), 0
    batches = np.repeat([50.0, 100.0, 200.0, 400.0, 800.0], 3)
    for _ in range(200):
        fit = fit_critical_batch(
            batches, 80.0 * (1 + 200.0 / batches) * np.exp(0.05 * random.normal(size=len(batches)))
        )
        covered += fit.batch_crit.low <= 200 <= fit.batch_crit.high
    assert 180 <= covered <= 199  # 190 ± 3 standard errors


@pytest.mark.parametrize("power", [-1.0, 0.0])  # twice the batch halves the steps; or does nothing at all
def test_a_batch_size_that_cannot_be_told_is_not_told(power: float) -> None:
    batches = np.repeat([8.0, 16.0, 32.0], 3)
    noise = np.exp(0.05 * np.random.default_rng(6).normal(size=9))
    fit = fit_critical_batch(batches, 1000 * batches**power * noise)
    assert not fit.determined


def test_two_batch_sizes_are_no_curve() -> None:
    assert fit_critical_batch([1.0, 2.0, 2.0], [4.0, 3.0, 3.1]) is None


def test_the_pareto_front_by_hand() -> None:
    costs, values = [1.0, 2.0, 3.0, 4.0, 4.0], [0.5, 0.4, 0.7, 0.7, 0.9]
    assert pareto_front(costs, values, "max") == [True, False, True, False, True]
    assert pareto_front(costs, values, "min") == [True, True, False, False, False]
    assert pareto_front([1.0, 1.0], [0.5, 0.5], "max") == [True, True]  # equals do not beat each other


@pytest.mark.parametrize("steps", [[100.0] * 3, [300.0, 200.0, 100.0], [100.0, 200.0, 300.0], [1e6, 1.0, 1e6]])
def test_three_points_of_any_kind_end_in_an_answer(steps: list[float]) -> None:
    fit = fit_critical_batch([8.0, 16.0, 32.0], steps)
    assert fit is None or not fit.determined or fit.batch_crit.low <= fit.batch_crit.value <= fit.batch_crit.high
