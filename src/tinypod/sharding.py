"""Where arrays lie. One mesh axis, `data`: the rows of a batch are split over it, everything else is replicated."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinypod.errors import ConfigError


def make_mesh(devices: list[Any] | None = None) -> Mesh:
    return Mesh(np.asarray(devices if devices is not None else jax.devices()), ("data",))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec("data"))


def check_divides(mesh: Mesh, rows: int, key: str) -> None:
    if rows % mesh.size:
        raise ConfigError(
            f"{key}: {rows} rows do not divide over {mesh.size} devices; choose a multiple of {mesh.size}"
        )
