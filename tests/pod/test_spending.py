"""What a run has cost, over all its slices and all who watched them."""

from pathlib import Path

import pytest
from specs import make_spec

from tinypod.pod.spending import Spending
from tinypod.runs.folder import Run

HOUR = 3600.0


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_every_slice_counts_from_its_creation(tmp_path: Path) -> None:
    clock, run = Clock(), Run(tmp_path)
    spec = make_spec(dollars_per_chip_hour=1.0, spending_limit_dollars=30.0)  # 8 chips: $8 an hour
    first = Spending(spec, run, clock)
    first.seen(clock.now - HOUR)  # it was up before anybody watched
    assert first.dollars == pytest.approx(8)
    clock.now += HOUR
    first.seen(clock.now - 2 * HOUR)
    assert first.dollars == pytest.approx(16)
    assert not first.exhausted

    clock.now += HOUR / 2  # nobody watched; then another machine does
    second = Spending(spec, run, clock)
    second.seen(1_000_000.0 - HOUR)
    assert second.dollars == pytest.approx(20)

    clock.now += 10 * HOUR  # it was lost, and another one is granted
    second.seen(clock.now)
    assert second.dollars == pytest.approx(20)
    clock.now += 1.25 * HOUR
    second.seen(clock.now - 1.25 * HOUR)
    assert second.dollars == pytest.approx(30)
    assert second.exhausted
    assert [grant.until - grant.since for grant in second.grants] == [2.5 * HOUR, 1.25 * HOUR]
    assert second.describe() == "$30.00 of $30.00 for 3 h 45 min on v4-16 (list price)"


def test_a_slice_without_a_time_of_creation_is_one_slice(tmp_path: Path) -> None:
    clock = Clock()
    spending = Spending(make_spec(dollars_per_chip_hour=1.0), Run(tmp_path), clock)
    for _ in range(3):
        spending.seen(None)
        clock.now += HOUR
    assert len(spending.grants) == 1
    assert spending.dollars == pytest.approx(16)
    assert not spending.exhausted  # without a limit
