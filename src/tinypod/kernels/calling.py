"""What is around a kernel: neither the partitioner nor the planner looks into one, so that here its rows are taken
apart over the devices, and it says what it computes."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec

from tinypod.sharding import Placement, free_axes


def splits_width(placement: Placement) -> bool:
    """Whether devices share the widths of a layer, so that none has all that its kernel needs."""
    return placement.mesh is not None and placement.mesh.shape["tensor"] > 1


def by_rows(kernel: Callable[..., Array], placement: Placement, num_weights: int) -> Callable[..., Array]:
    """A kernel of whole weights and then of arrays whose first dimension the devices share; where they cannot (one
    puzzle to solve), each computes all of it."""
    mesh, axes = free_axes(placement.mesh)
    if not axes:
        return kernel

    def on_each(*arrays: Array) -> Array:
        shared = tuple(axis for axis in ("data", "fsdp") if axis in axes)
        divides = arrays[-1].shape[0] % math.prod(mesh.shape[axis] for axis in shared) == 0
        rows = PartitionSpec(shared if shared and divides else None)
        specs = [PartitionSpec()] * num_weights + [rows] * (len(arrays) - num_weights)
        return jax.shard_map(
            kernel, mesh=mesh, axis_names=set(axes), in_specs=tuple(specs), out_specs=rows, check_vma=False
        )(*arrays)

    return on_each


def stated_share(share: float) -> dict[str, str]:
    """Of the chip's peak, as metadata of a TPU kernel, whose cost states the products; the planner reads it."""
    return {"share_of_peak": f"{share:.3f}"}


def stated_cost(multiplications: int) -> dict[str, str]:
    """Of matrix products, as metadata of a Triton kernel, which has no other place for them; the planner reads it."""
    return {"flops": str(2 * multiplications)}


def stating_cost(multiplications: int) -> AbstractContextManager[Any]:
    """As `stated_cost`, of what is called inside: Mosaic GPU drops the metadata of its kernels, the call keeps them."""
    return set_xla_metadata(kernel_metadata=json.dumps(stated_cost(multiplications)))
