"""A slice, in YAML: which one, where, how it is asked for, and what it may cost."""

import re
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from tinypod.config import Config
from tinypod.planning.prices import read_prices
from tinypod.planning.slices import Slice, find_slice

# The runtime (an image with drivers; JAX is installed on it) that Google's documentation names for each generation.
RUNTIMES = {
    "v4": "tpu-ubuntu2204-base",
    "v5e": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)", re.IGNORECASE)
_NAME = r"^[a-z]([a-z0-9-]{0,60}[a-z0-9])?$"


class OnDemand(Config):
    """Now, or not at all; not preempted."""

    kind: Literal["on_demand"] = "on_demand"


class Spot(Config):
    """Now, or not at all; cheap, and may be taken away at any time."""

    kind: Literal["spot"] = "spot"


class Queued(Config):
    """A request that waits in Cloud TPU's queue until there is capacity."""

    kind: Literal["queued"] = "queued"
    spot: bool = False
    valid_hours: PositiveFloat | None = None  # the request fails if it has waited for so long


class Disk(Config):
    """A disk that exists already, for data. Slices of several hosts can only read it."""

    name: Annotated[str, Field(pattern=_NAME)]
    mode: Literal["read-only", "read-write"] = "read-only"


class PodSpec(Config):
    """What `tinypod pod` needs to know."""

    project: Annotated[str, Field(pattern=r"^[a-z][a-z0-9.:-]{4,61}[a-z0-9]$")]
    zone: Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+\d+-[a-z]$")]
    name: Annotated[str, Field(pattern=_NAME)]
    type: str
    request: Annotated[OnDemand | Spot | Queued, Field(discriminator="kind")] = OnDemand()
    runtime_version: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")] | None = None
    service_account: Annotated[str, Field(pattern=r"^[\w.-]+@[\w.-]+$")] | None = None
    disk: Disk | None = None
    internal_ip: bool = False  # no external addresses; then this machine must be in the same network
    spending_limit_dollars: PositiveFloat | None = None
    dollars_per_chip_hour: NonNegativeFloat | None = None  # None: the package's table; 0 under a grant
    environment: dict[str, str] = Field(default_factory=dict)  # for the training processes
    python: str | None = None  # an interpreter on the workers that has all packages; None: one is set up
    code: list[str] = Field(default_factory=list)  # folders whose modules and configs go along
    poll_s: PositiveFloat = 10.0  # between two looks at the slice and its workers
    retry_s: PositiveFloat = 30.0  # before asking again for a slice that was not to be had; doubles, up to half an hour

    @field_validator("type")
    @classmethod
    def _is_offered(cls, name: str) -> str:
        if find_slice(name).generation.name == "tpu7x":
            raise ValueError(f"{name} comes with GKE only: see `tinypod pod manifest --slice {name}`")
        return name

    @field_validator("environment")
    @classmethod
    def _no_secrets(cls, variables: dict[str, str]) -> dict[str, str]:
        for name in variables:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError(f"{name!r} cannot be the name of a variable")
            if _SECRET_NAME.search(name):
                raise ValueError(
                    f"{name} looks like a secret, and would be seen on command lines. Let the service account have "
                    "the access, or read it on the workers from Secret Manager"
                )
        return variables

    @model_validator(mode="after")
    def _fits_together(self) -> "PodSpec":
        if self.disk is not None and self.disk.mode == "read-write" and self.slice.hosts > 1:
            raise ValueError(f"disk.mode: {self.type} has {self.slice.hosts} hosts, which can only share it read-only")
        if self.spending_limit_dollars is not None and self.hourly_dollars is None:
            raise ValueError(
                f"spending_limit_dollars: no price of {self.type} is known; give dollars_per_chip_hour, as your "
                "console shows it"
            )
        return self

    @property
    def slice(self) -> Slice:
        return find_slice(self.type)

    @property
    def accelerator_type(self) -> str:
        """As the Cloud TPU API calls it."""
        return re.sub(r"^v5e-", "v5litepod-", self.slice.name)

    @property
    def runtime(self) -> str:
        return self.runtime_version or RUNTIMES[self.slice.generation.name]

    @property
    def is_queued(self) -> bool:
        return isinstance(self.request, Queued)

    @property
    def is_spot(self) -> bool:
        return isinstance(self.request, Spot) or (isinstance(self.request, Queued) and self.request.spot)

    @property
    def valid_hours(self) -> float | None:
        return self.request.valid_hours if isinstance(self.request, Queued) else None

    @property
    def hourly_dollars(self) -> float | None:
        """Of the whole slice, while it is up; None if nobody knows."""
        price, generation = self.dollars_per_chip_hour, self.slice.generation.name
        if price is None:
            prices = read_prices(None)
            price = prices.spot_price(generation) if self.is_spot else prices.on_demand.get(generation)
        return None if price is None else price * self.slice.chips

    @property
    def owner(self) -> str:
        """Who the run belongs to while this slice trains it: the same after the slice was lost and granted again."""
        return f"pod {self.project}/{self.zone}/{self.name}"
