"""What the estimates of a TPU's compiler are worth, kernel by kernel: numbers fitted to published measurements.

A kernel takes at least its roofline. The compiler's own estimate of its cycles is longer, and so, mostly, too long. The
time to expect lies between the two: as far from the roofline, on a logarithmic scale, as `toward_cycles` says for its
kind. Sources and what was left for testing are in the file; `benchmarks/published.py` makes the comparison.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat

from tinypod import config as configs
from tinypod.config import Config
from tinypod.planning.hlo.kinds import Kind
from tinypod.planning.hlo.products import SPLASH_BACKWARD, SPLASH_FORWARD
from tinypod.planning.hlo.program import Kernel

FILE = Path(__file__).with_name("calibration.yaml")
Share = Annotated[float, Field(gt=0, le=1)]


class Source(Config):
    """A measurement that a number was fitted to."""

    what: str
    measured_ms: NonNegativeFloat
    link: str
    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]


class Attention(Config):
    """Shares of a chip's peak."""

    forward: Share
    backward: Share


class GpuCalibration(Config):
    """How far toward what a card reaches, products and bytes one after the other, a kernel's time lies."""

    toward_reached: dict[Kind, Annotated[float, Field(ge=0, le=1)]]
    launch_s: NonNegativeFloat  # of a kernel
    sources: list[Source]


class Calibration(Config):
    toward_cycles: dict[Kind, Annotated[float, Field(ge=0, le=1)]]
    splash_attention: dict[str, Attention]  # by the generation of the chip
    link_share: Share  # of a link's speed that large collectives reach
    hop_s: NonNegativeFloat
    sources: list[Source]
    gpus: GpuCalibration

    def expected_s(self, kind: Kind, roofline_s: float, cycles_s: float | None) -> float:
        return self.between(roofline_s, cycles_s, self.toward_cycles[kind])

    @staticmethod
    def between(least_s: float, most_s: float | None, share: float) -> float:
        """So far from the first toward the second, on a logarithmic scale."""
        if most_s is None or most_s <= least_s or not least_s:
            return max(least_s, most_s or 0.0)
        return float(least_s * (most_s / least_s) ** share)

    def with_shares(self, kernel: Kernel, generation: str) -> Kernel:
        """Attention's kernel is not ours, and does not say what part of the peak it reaches."""
        known = self.splash_attention.get(generation)
        if known is None or kernel.share is not None:
            return kernel
        if kernel.name.startswith(SPLASH_FORWARD):
            return replace(kernel, share=known.forward)
        return replace(kernel, share=known.backward) if kernel.name.startswith(SPLASH_BACKWARD) else kernel


@cache
def calibration() -> Calibration:
    return configs.load(FILE, [], Calibration)
