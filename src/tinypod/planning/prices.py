"""What chips cost: a dated table that comes with the package, or the user's own."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeFloat, model_validator

from tinypod import config as configs
from tinypod.config import Config
from tinypod.errors import UserError
from tinypod.planning.slices import GENERATIONS

DEFAULT = Path(__file__).with_name("prices.yaml")


class Prices(Config):
    """US dollars a chip and hour, by generation."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    source: str
    on_demand: dict[str, NonNegativeFloat]
    spot: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    spot_fraction: NonNegativeFloat | None = None  # of the price on demand, where `spot` names none

    @model_validator(mode="after")
    def _known(self) -> "Prices":
        unknown = [name for name in (*self.on_demand, *self.spot) if name not in GENERATIONS]
        if unknown:
            raise ValueError(f"no TPU generation {', '.join(unknown)}; expected {', '.join(GENERATIONS)}")
        return self

    def spot_price(self, generation: str) -> float | None:
        on_demand = self.on_demand.get(generation)
        if generation in self.spot:
            return self.spot[generation]
        return None if on_demand is None or self.spot_fraction is None else on_demand * self.spot_fraction

    def describe(self) -> str:
        spot = "" if self.spot_fraction is None else f"; spot taken as {self.spot_fraction:.0%} of on demand"
        return f"{self.source}, {self.date}{spot}"


def read_prices(path: Path | None, *, grant: bool = False) -> Prices:
    """`grant`: every chip is free."""
    if path is not None and not path.is_file():
        raise UserError(f"--prices: no file {path}; copy {DEFAULT} and change it")
    prices = configs.load(path or DEFAULT, [], Prices)
    free = dict.fromkeys(GENERATIONS, 0.0)
    changes = {"source": "a grant, nothing is charged", "on_demand": free, "spot": free, "spot_fraction": None}
    return prices.model_copy(update=changes) if grant else prices
