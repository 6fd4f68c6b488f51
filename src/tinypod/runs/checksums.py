"""A number for each array that any changed bit changes; integers, computed where it lies, the same on any mesh."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tinypod.sharding import path_of


def flatten(tree: Any) -> dict[str, Any]:
    return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def checksums(flat: dict[str, Array]) -> Array:
    """One for each array, in the order of the names; on every device."""
    return _jitted_checksums(replicated_like(flat.values()))(flat)


def make_checksums(abstract: dict[str, Any]) -> Callable[[dict[str, Array]], Array]:
    """`checksums`, compiled now for arrays of these shapes and shardings; for others it compiles when they come."""
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in abstract.items()}
    compiled = _jitted_checksums(replicated_like(shapes.values())).lower(shapes).compile()

    def compute(flat: dict[str, Array]) -> Array:
        try:
            return compiled(flat)
        except (TypeError, ValueError):  # of other shapes, or laid out otherwise
            return checksums(flat)

    return compute


@functools.cache
def _jitted_checksums(sharding: Sharding | None) -> Any:
    def all_of(flat: dict[str, Array]) -> Array:
        return jnp.stack([checksum(flat[name]) for name in sorted(flat)])

    return jax.jit(all_of, out_shardings=sharding)


def checksum(x: Array) -> Array:
    """Of one array, wherever its parts lie."""
    if x.dtype == bool:
        words = x.astype(jnp.uint32)
    else:
        unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        words = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    # Each element's place in memory, so that order counts, too; made without a reshape, which would gather the shards.
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for dim in reversed(range(x.ndim)):
        place += jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= x.shape[dim]
    return jnp.sum(words * ((2 * place + 1) * jnp.uint32(2654435761)), dtype=jnp.uint32)


def replicated_like(leaves: Iterable[Any]) -> Sharding | None:
    """The sharding that puts a whole array on every device that holds a part of these."""
    leaves = list(leaves)
    for leaf in leaves:
        if isinstance(leaf.sharding, NamedSharding):
            return NamedSharding(leaf.sharding.mesh, PartitionSpec())
    return leaves[0].sharding if leaves else None
