import pytest

from tinypod.study import numbers
from tinypod.study.fits import Interval
from tinypod.study.numbers import MetricNumbers
from tinypod.study.statistics import Difference, Spread


def test_shares_and_plain_metrics() -> None:
    share, plain = MetricNumbers(".2%"), MetricNumbers(".3f")
    assert share.value(0.98527) == "98.53%"
    assert share.spread(Spread(3, 0.98527, 0.00421)) == "98.53 ± 0.42%"
    assert share.spread(Spread(1, 0.98527, None)) == "98.53%"
    assert share.spread(None) == "–"
    assert share.change(0.012) == "+1.20 pp"
    assert share.change(-0.012) == "−1.20 pp"
    assert share.change(-0.00001) == share.change(0.0) == "0.00 pp"
    assert share.interval(Difference(0.0, -0.003, 0.012, 0.5, 3.0)) == "−0.30 to +1.20 pp"
    assert plain.spread(Spread(3, 12.3456, 0.5)) == "12.346 ± 0.500"
    assert plain.interval(Difference(0.0, -1.0, 2.0, 0.5, 3.0)) == "−1.000 to +2.000"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (-1.2345, "−1.23"),
        (99.96, "100"),
        (12.345, "12.3"),
        (1234.5, "1,230"),
        (1e-7, "1.00e−07"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert numbers.significant(value) == text


def test_quantities() -> None:
    assert numbers.quantity(1.2e12, "FLOP") == "1.20 TFLOP"
    assert numbers.quantity(999.9) == "1.00 k"
    assert numbers.quantity(12.0, "FLOP") == "12.0 FLOP"
    assert numbers.quantity(None) == "–"
    assert [numbers.count(n) for n in (96, 1024, 9999, 12_300, 6_830_000)] == [
        "96",
        "1,024",
        "9,999",
        "12.3 k",
        "6.83 M",
    ]
    assert [numbers.tick(n) for n in (0.5, 1.0, 20.0, 0.05)] == ["0.5", "1", "20", "0.05"]
    assert numbers.seconds(95.0) == "1 min 35 s"
    assert numbers.between(Interval(0.5, 0.25, 1.0)) == "0.500 (0.250 to 1.00)"
    assert numbers.between(Interval(1500.4, 900.0, 2100.0), "steps") == "1,500 (900 to 2,100)"
