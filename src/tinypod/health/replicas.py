"""Copies of a weight that should be equal to the bit, compared: memory that lies does not raise an error by itself.

Every device computes a checksum of its own shard of every weight, inside one compiled function; all of them are
gathered to all. Nothing but integers is compared, and nothing but 4 bytes a weight and device is fetched.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinypod.errors import CorruptionError
from tinypod.runs.checksums import checksum, flatten
from tinypod.sharding import axes_of, path_of

_SHOWN = 5  # weights and devices that an error names


def make_replica_check(mesh: Mesh, specs: Any) -> Callable[[Any], None]:
    """A function that raises CorruptionError where copies differ. `specs`: a PartitionSpec for each leaf.

    Collective: all processes call it, and all of them raise. The first call compiles.
    """
    leaves = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    flat_specs: dict[str, PartitionSpec] = {path_of(path): spec for path, spec in leaves}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in flat_specs.items()}

    def of_this_device(flat: dict[str, Array]) -> Array:
        sums = jnp.stack([checksum(flat[name]) for name in flat_specs])
        return jax.lax.all_gather(sums, mesh.axis_names)

    # Nothing here proves to JAX that the copies are equal (check_vma): that is the question.
    gathered = jax.jit(
        jax.shard_map(of_this_device, mesh=mesh, in_specs=(flat_specs,), out_specs=PartitionSpec(), check_vma=False),
        in_shardings=(shardings,),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )

    def check(tree: Any) -> None:
        sums = np.asarray(jax.device_get(gathered(flatten(tree)))).reshape(*mesh.devices.shape, len(flat_specs))
        wrong = {
            name: reason
            for number, (name, spec) in enumerate(flat_specs.items())
            if (reason := _compare(sums[..., number], spec, mesh)) is not None
        }
        if wrong:
            raise _error(wrong, len(flat_specs))

    return check


def _compare(sums: np.ndarray, spec: PartitionSpec, mesh: Mesh) -> str | None:
    """Which devices hold a copy unlike the others; along the axes that split the array nothing is a copy."""
    split = {axis for entry in spec for axis in axes_of(entry)}
    order = sorted(range(sums.ndim), key=lambda dim: mesh.axis_names[dim] not in split)
    shards = int(np.prod([sums.shape[dim] for dim in order if mesh.axis_names[dim] in split]))
    sums, devices = (array.transpose(order).reshape(shards, -1) for array in (sums, mesh.devices))
    odd: list[Any] = []
    undecided = False
    for copies, holders in zip(sums, devices, strict=True):
        (usual, count), *others = Counter(copies.tolist()).most_common()
        if others and 2 * count <= len(copies):
            undecided = True
            odd += list(holders)
        else:
            odd += [device for device, copy in zip(holders, copies, strict=True) if copy != usual]
    if not odd:
        return None
    named = ", ".join(f"{device} of process {device.process_index}" for device in odd[:_SHOWN])
    more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
    return f"{named}{more} {'differ, and there is no majority' if undecided else 'against the majority'}"


def _error(wrong: dict[str, str], count: int) -> CorruptionError:
    lines = [f"  {name}: {reason}" for name, reason in list(wrong.items())[:_SHOWN]]
    more = [f"  and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
    return CorruptionError(
        "\n".join([f"copies of {len(wrong)} of {count} weights differ between devices:", *lines, *more])
        + "\nThe memory or arithmetic of a device is at fault. Resume from the last checkpoint without that machine; "
        "checkpoints since the last replica check that passed may hold the fault"
    )
