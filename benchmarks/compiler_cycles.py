"""What the TPU compiler's estimates assume of a large product and of a pass over memory, against the chip's data sheet.

    python benchmarks/compiler_cycles.py

Needs the extra `plan`, no TPU; nothing is run. At a share of 100 % the compiler expects what the sheet promises.
"""

import datetime
import os
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from tinypod.planning import slices
from tinypod.planning.compiler import ALONE
from tinypod.planning.hlo.program import read

os.environ.update(ALONE)  # before JAX starts

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

SIDE, ELEMENTS = 8192, 2**28


def cycles_of(function: Callable[..., Any], *shapes: tuple[int, ...], device: Any) -> int:
    sharding = SingleDeviceSharding(device)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes]
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    return read(text, {"data": 1}).cycles


def main() -> None:
    print(f"jax {version('jax')}, libtpu {version('libtpu')}, {datetime.date.today()}\n")
    print("| TPU | clock GHz | product, share of the peak | pass, bytes a cycle | pass, share of the HBM bandwidth |")
    print("|---|---|---|---|---|")
    for name in ("v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8"):
        target = slices.find_slice(name)
        chip = target.generation
        device = topologies.get_topology_desc(**target.topology_arguments()).devices[0]
        product = cycles_of(lambda x, y: x @ y, (SIDE, SIDE), (SIDE, SIDE), device=device)
        passing = cycles_of(lambda x: x * 2 + 1, (ELEMENTS,), device=device)
        reached = 2 * SIDE**3 / (product / chip.clock) * chip.devices_per_chip / chip.peak_bf16
        a_cycle = 2 * 2 * ELEMENTS / passing
        bandwidth = a_cycle * chip.clock * chip.devices_per_chip / chip.hbm_bandwidth
        print(
            f"| {chip.name} | {chip.clock / 1e9:.2f} | {reached:.0%} | {a_cycle:,.0f} | {bandwidth:.0%} |", flush=True
        )


if __name__ == "__main__":
    main()
