"""What chips cost: a dated table that comes with the package, or the user's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeFloat, field_validator, model_validator

from tinypod import config as configs
from tinypod.config import Config
from tinypod.errors import UserError
from tinypod.planning.gpus import CARDS
from tinypod.planning.slices import GENERATIONS

DEFAULT = Path(__file__).with_name("prices.yaml")


class Prices(Config):
    """US dollars a chip or card and hour, by generation."""

    date: Annotated[str, Field(pattern=r"^\d{4}-\d{2}-\d{2}$")]
    source: str
    on_demand: dict[str, NonNegativeFloat]
    spot: dict[str, NonNegativeFloat] = Field(default_factory=dict)
    spot_fraction: dict[str, Annotated[list[NonNegativeFloat], Field(min_length=2, max_length=2)]] = Field(
        default_factory=dict  # of the price on demand, in the cheapest zone and the dearest; where `spot` names none
    )

    @field_validator("on_demand", "spot", "spot_fraction", mode="before")
    @classmethod
    def _named(cls, prices: Any) -> Any:
        """YAML reads the name of a 4090 as a number."""
        return {str(name): price for name, price in prices.items()} if isinstance(prices, dict) else prices

    @model_validator(mode="after")
    def _known(self) -> "Prices":
        unknown = [name for name in (*self.on_demand, *self.spot, *self.spot_fraction)]
        unknown = [name for name in unknown if name not in GENERATIONS and name not in CARDS]
        if unknown:
            expected = ", ".join((*GENERATIONS, *CARDS))
            raise ValueError(f"no TPU generation or GPU {', '.join(unknown)}; expected {expected}")
        return self

    def spot_price(self, generation: str) -> float | None:
        """In the dearest zone."""
        on_demand, fraction = self.on_demand.get(generation), self.spot_fraction.get(generation)
        if generation in self.spot:
            return self.spot[generation]
        return None if on_demand is None or fraction is None else on_demand * fraction[1]

    def describe(self, generations: Sequence[str]) -> str:
        shared = self.spot_fraction.keys() - self.spot.keys()
        ranges = {name: self.spot_fraction[name] for name in generations if name in shared}
        by_zone = [f"{name} {low:.0%} to {high:.0%}" for name, (low, high) in ranges.items() if low < high]
        spot = f"; spot in the dearest zone (of on demand, by zone: {', '.join(by_zone)})" if by_zone else ""
        return f"{self.source}, {self.date}{spot}"


def read_prices(path: Path | None, *, grant: bool = False) -> Prices:
    """`grant`: every chip is free."""
    if path is not None and not path.is_file():
        raise UserError(f"--prices: no file {path}; copy {DEFAULT} and change it")
    prices = configs.load(path or DEFAULT, [], Prices)
    free = dict.fromkeys((*GENERATIONS, *prices.on_demand), 0.0)
    changes = {"source": "a grant, nothing is charged", "on_demand": free, "spot": free, "spot_fraction": {}}
    return prices.model_copy(update=changes) if grant else prices
