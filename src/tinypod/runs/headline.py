"""The metrics of a run that people read. Here, because whoever lists runs does not wait for their tasks and JAX."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """A metric that people read: logged as `train/NAME` and `eval/NAME`."""

    name: str
    label: str
    direction: Literal["max", "min"]
    format: str  # of Python's format(), like ".2%"

    def show(self, value: float) -> str:
        return format(value, self.format)
