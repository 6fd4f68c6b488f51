"""How a report writes numbers: the same in tables, sentences and figures."""

from dataclasses import dataclass

from tinypod.runs.terminal import duration
from tinypod.study.fits import Interval
from tinypod.study.statistics import Difference, Spread

NONE = "–"
_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class MetricNumbers:
    """Of the study's metric, by its format (of Python's format(), like ".2%")."""

    format: str

    @property
    def is_share(self) -> bool:
        return self.format.endswith("%")

    def value(self, value: float) -> str:
        return format(value, self.format)

    def spread(self, found: Spread | None) -> str:
        """`98.53 ± 0.42%`; one value stands alone."""
        if found is None:
            return NONE
        if found.sd is None:
            return self.value(found.mean)
        return f"{self.value(found.mean).removesuffix('%')} ± {self.value(found.sd)}"

    def change(self, value: float) -> str:
        """With its sign; of shares in percentage points."""
        text = format(value, "+" + self.format)
        if not any(digit in text for digit in "123456789"):  # what rounds to nothing has no sign
            text = text.lstrip("+-")
        return text.replace("-", "−").replace("%", " pp")

    def interval(self, found: Difference) -> str:
        """`−0.30 to +1.20 pp`."""
        return f"{self.change(found.low).removesuffix(' pp')} to {self.change(found.high)}"


def significant(value: float) -> str:
    """Three significant digits: `0.0123`, `1.23`, `12.3`, `1,230`."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    if not 1e-4 <= abs(rounded) < 1e9:
        return f"{rounded:.2e}".replace("-", "−")
    digits = max(0, 2 - _exponent(rounded))
    return f"{rounded:,.{digits}f}".replace("-", "−")


def tick(value: float) -> str:
    """Of an axis: as `significant`, without zeros at the end."""
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def quantity(value: float | None, unit: str = "") -> str:
    """Three significant digits with a prefix: `12.3 k`, `1.20 TFLOP`."""
    if value is None:
        return NONE
    for size, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * size:
            return f"{significant(value / size)} {prefix}{unit}"
    return f"{significant(value)} {unit}".strip()


def count(value: float | None) -> str:
    """Of sizes: whole below ten thousand, then with a prefix."""
    return f"{value:,.0f}" if value is not None and value < 9_999.5 and float(value).is_integer() else quantity(value)


def seconds(value: float | None) -> str:
    return NONE if value is None else duration(value)


def steps(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def between(found: Interval, write: str = "significant") -> str:
    """`0.52 (0.44 to 0.60)`."""
    show = significant if write == "significant" else steps
    return f"{show(found.value)} ({show(found.low)} to {show(found.high)})"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])
