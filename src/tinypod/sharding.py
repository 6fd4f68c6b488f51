"""Where arrays lie: the mesh, and rules from a parameter's path to its split over the mesh.

Four axes. The rows of a batch are split over `data` and `fsdp`; `fsdp` also splits weights, their optimizer state and
their averages, which are made whole where a layer uses them; `tensor` splits heads and the inner width of MLPs;
`pipeline` splits a stack of layers into stages, which the parts of a batch pass one after the other. Devices are
ordered host by host with `tensor` innermost, so that the axes that talk most stay inside a host. Where a mesh spans
several TPU slices, they are ordered slice by slice, and `data` alone crosses the network between them: once a step,
with gradients.

A rule is `(pattern, PartitionSpec)`; the pattern must match a whole path (`layers.mlp.down`), the first match counts.
Rules stand beside the model. A parameter without a rule, or a rule without a parameter, is an error.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from pydantic import Field, PositiveInt, model_validator

from tinypod.config import Config
from tinypod.errors import ConfigError, DeviceError

AXES = ("data", "pipeline", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")  # the axes that the rows of a batch are split over

Rules = Sequence[tuple[str, PartitionSpec]]
Tree = Any


class Gather(Protocol):
    """Makes weights whole that lie split over `fsdp`, and splits their gradients again at once."""

    def __call__(self, name: str, tree: Tree, dtype: DTypeLike | None = None) -> Tree:
        """`tree`: what has a top-level name among the parameters, all or one layer of it. `dtype`: in which they are
        sent and used; as they are stored where it is None."""


class Placement(NamedTuple):
    """What a model is told of where it runs."""

    mesh: Mesh | None = None
    gather: Gather | None = None  # None: nothing is split over `fsdp`

    @property
    def kernels(self) -> Literal["cuda", "hopper", "tpu"] | None:
        """Those that its devices can run; Hopper (H100, H200) takes what other NVIDIA GPUs take, and has more room."""
        if self.mesh is None:
            return None
        device = self.mesh.devices.flat[0]
        generation = str(getattr(device, "compute_capability", "")).partition(".")[0]  # "9" of "9.0"; AMD's are names
        if device.platform == "gpu" and generation.isdigit() and int(generation) >= 8:
            return "hopper" if generation == "9" else "cuda"
        return "tpu" if device.platform == "tpu" else None

    @property
    def on_cpu(self) -> bool:
        return self.mesh is not None and self.mesh.devices.flat[0].platform == "cpu"


ANYWHERE = Placement()


AxisSize = Annotated[int, Field(ge=-1)]


class MeshConfig(Config):
    """Devices along each axis; one of them may be -1: all that are left."""

    data: AxisSize = -1
    pipeline: AxisSize = 1
    fsdp: AxisSize = 1
    tensor: AxisSize = 1
    slices: PositiveInt = 1  # that the mesh spans, a part of `data` in each; the other axes stay inside a slice
    devices: PositiveInt | None = None  # use the first so many of those there are; null: all

    @model_validator(mode="after")
    def _one_is_free(self) -> "MeshConfig":
        sizes = [getattr(self, axis) for axis in AXES]
        if 0 in sizes:
            raise ValueError("an axis has at least 1 device, or -1 for all that are left")
        if sizes.count(-1) > 1:
            raise ValueError("only one axis can be -1 (all devices that are left)")
        if self.slices > 1 and self.devices is not None:
            raise ValueError(
                "`devices` takes the first ones, not some of each slice; leave it null, or set `slices` to 1"
            )
        return self

    def shape(self, num_devices: int) -> tuple[int, ...]:
        """Sizes of the axes where there are so many devices."""
        if self.devices is not None and self.devices > num_devices:
            raise ConfigError(f"mesh.devices={self.devices}: there are only {num_devices}")
        num_devices = self.devices or num_devices
        sizes = [getattr(self, axis) for axis in AXES]
        written = " × ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        fixed = math.prod(size for size in sizes if size != -1)
        if -1 in sizes:
            if num_devices % fixed:
                raise ConfigError(f"mesh: {written} does not divide the {num_devices} devices there are")
            sizes[sizes.index(-1)] = num_devices // fixed
        elif fixed != num_devices:
            raise ConfigError(
                f"mesh: {written} makes {fixed} devices, but there are {num_devices}; set one axis to -1 to take all"
            )
        if sizes[0] % self.slices:
            raise ConfigError(
                f"mesh.slices={self.slices}: only `data` crosses slices, and data={sizes[0]} is not a multiple of "
                f"{self.slices}: the other axes have to fit into one slice"
            )
        return tuple(sizes)


def all_devices() -> list[Any]:
    """Of all processes; an error that says what to do where there are none."""
    try:
        return list(jax.devices())
    except (RuntimeError, AssertionError) as error:  # JAX asserts where a plugin is missing
        asked = os.environ.get("JAX_PLATFORMS") or "not set"
        why = (str(error).strip().splitlines() or ["its plugin is not installed"])[0][:300]
        raise DeviceError(
            f"no device of the platform that was asked for (JAX_PLATFORMS={asked}): {why}. Install its plugin (pip "
            "install 'tinypod[cuda]' or 'tinypod[tpu]') on a machine that has such a device, or take what is here: "
            "JAX_PLATFORMS=cpu"
        ) from None


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    found = list(all_devices() if devices is None else devices)
    ordered = sorted(found, key=lambda device: (slice_of(device) or 0, device.process_index, device.id))
    shape = config.shape(len(ordered))
    used = ordered[: math.prod(shape)]
    if idle := {device.process_index for device in ordered} - {device.process_index for device in used}:
        raise ConfigError(
            f"mesh.devices={config.devices} leaves process {min(idle)} without a device; start fewer processes, or "
            "take more devices"
        )
    _check_slices(config, used)
    return Mesh(np.asarray(used).reshape(shape), AXES)


def slice_of(device: Any) -> int | None:
    """The number of a TPU's slice, which devices of the only one need not have; None for other devices. (JAX gives
    GPUs such a number, too: by host.)"""
    return getattr(device, "slice_index", 0) if device.platform == "tpu" else None


def num_slices(devices: Iterable[Any]) -> int:
    return len({slice_of(device) for device in devices})


def _check_slices(config: MeshConfig, used: Sequence[Any]) -> None:
    """Axes that cross slices unasked would be slow, and nobody would know why. Devices that are in no slice are taken
    for equal parts, in their order."""
    sizes = Counter(map(slice_of, used))
    if None in sizes:
        return
    if len(sizes) != config.slices:
        more = ", so that only `data` crosses them"
        fewer = ", or start the command on every host of every slice"
        raise ConfigError(
            f"mesh.slices={config.slices}, but the devices are of {len(sizes)} slice{'s' * (len(sizes) > 1)}; set "
            f"mesh.slices={len(sizes)}{more if len(sizes) > config.slices else fewer}"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(str(size) for _, size in sorted(sizes.items()))
        raise ConfigError(f"mesh.slices={config.slices}: the slices have {listed} devices; they must be of one size")


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """The axes that have more than one device: `data 4 × fsdp 2`."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def over_batch(mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def num_batch_shards(mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def check_divides(mesh: Mesh, rows: int, key: str) -> None:
    shards = num_batch_shards(mesh)
    if rows % shards:
        raise ConfigError(
            f"{key}: {rows} rows do not divide over {shards} devices (mesh: data={mesh.shape['data']} × "
            f"fsdp={mesh.shape['fsdp']}); choose a multiple of {shards}"
        )


def path_of(key_path: tuple[Any, ...]) -> str:
    """A leaf's name: `layers.mlp.down`. It is its checkpoint key and its sharding key."""
    return jax.tree_util.keystr(key_path, simple=True, separator=".")


def param_specs(rules: Rules, params: Tree, mesh: Mesh) -> Tree:
    """The spec of every parameter, as long as the parameter has dimensions."""
    unused = [pattern for pattern, _ in rules]

    def spec_of(key_path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        path = path_of(key_path)
        for pattern, spec in rules:
            if re.fullmatch(pattern, path):
                if pattern in unused:
                    unused.remove(pattern)
                _check_fits(path, leaf.shape, spec, mesh)
                return PartitionSpec(*spec, *[None] * (len(leaf.shape) - len(spec)))
        raise ConfigError(f"no sharding rule matches the parameter {path}; add one beside its model")

    specs = jax.tree_util.tree_map_with_path(spec_of, params)
    if unused:
        raise ConfigError(f"sharding rules that match no parameter: {', '.join(unused)}; correct or remove them")
    return specs


def _check_fits(path: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh) -> None:
    if len(spec) > len(shape):
        raise ConfigError(f"the sharding rule {spec} has more dimensions than {path}, which is {list(shape)}")
    for dim, entry in enumerate(spec):
        axes = axes_of(entry)
        split = math.prod(mesh.shape[axis] for axis in axes)
        if shape[dim] % split:
            sizes = " × ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
            raise ConfigError(
                f"{sizes} does not divide dimension {dim} of {path}, which is {list(shape)}; "
                "choose a divisor of it, or a wider model"
            )


def axes_of(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def specs_like(specs: Tree, tree: Tree) -> Tree:
    """Specs for a tree that holds copies of parameters at the end of longer paths (moments, averages): each takes its
    parameter's; anything else must be a scalar, and is replicated."""
    by_path = {path_of(key): spec for key, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)}

    def spec_of(key_path: tuple[Any, ...], leaf: Any) -> PartitionSpec:
        path = path_of(key_path)
        for start in [0, *(match.end() for match in re.finditer(r"\.", path))]:
            spec = by_path.get(path[start:])
            if spec is not None and len(spec) == len(leaf.shape):
                return spec
        if leaf.shape:
            raise ConfigError(f"{path} {list(leaf.shape)} belongs to no parameter, so that no sharding is known for it")
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec_of, tree)


def is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def named(mesh: Mesh, specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def put(tree: Tree, shardings: Tree) -> Tree:
    """Host arrays, the same on every process, as global arrays; each process hands its devices only their parts."""

    def place(x: Any, sharding: NamedSharding) -> Array:
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda x: place(x, shardings), tree)
    return jax.tree.map(place, tree, shardings)


def constrain(x: Array, spec: PartitionSpec, mesh: Mesh | None = None) -> Array:
    """`mesh` is not needed where an axis is already taken apart (step.py): there, JAX wants the mesh that says so."""
    inside = jax.sharding.get_abstract_mesh()
    found = mesh if inside.empty else inside
    return x if found is None else jax.lax.with_sharding_constraint(x, NamedSharding(found, spec))


def free_axes(mesh: Mesh | None) -> tuple[Any, list[str]]:
    """The mesh as it is at this place of a program, and its axes that are not taken apart yet; none on one device."""
    inside = jax.sharding.get_abstract_mesh()
    found = mesh if inside.empty else inside
    taken = () if inside.empty else inside.manual_axes
    return found, [] if found is None or found.size == 1 else [axis for axis in AXES if axis not in taken]


def place(mesh: Mesh, specs: Tree) -> Placement:
    return Placement(mesh, make_gather(mesh, specs))


def make_gather(mesh: Mesh, specs: Tree) -> Gather | None:
    """None where nothing is split over `fsdp`. Inside a loop over layers only one layer is whole at a time."""
    if mesh.shape["fsdp"] == 1:
        return None

    def gather_one(dtype: DTypeLike | None, weight: Array, spec: PartitionSpec) -> Array:
        stored = PartitionSpec(*spec[len(spec) - weight.ndim :])  # one layer has no dimension for the layers
        used = PartitionSpec(*(_without_fsdp(entry) for entry in stored))

        @jax.custom_vjp
        def gather(x: Array) -> Array:
            return constrain(constrain(x.astype(dtype or x.dtype), stored, mesh), used, mesh)

        gather.defvjp(
            lambda x: (gather(x), None),
            lambda _, grad: (constrain(grad.astype(weight.dtype), stored, mesh),),
        )
        return gather(weight)

    def gather(name: str, tree: Tree, dtype: DTypeLike | None = None) -> Tree:
        return jax.tree.map(partial(gather_one, dtype), tree, specs[name])

    return gather


def _without_fsdp(entry: Any) -> Any:
    return tuple(axis for axis in axes_of(entry) if axis != "fsdp") or None


def in_stages(mesh: Mesh, specs: Tree, function: Callable[[Tree, Tree], Tree]) -> Callable[[Tree, Tree], Tree]:
    """A function of parameters and a batch as each stage of the `pipeline` axis computes it, with its own layers; what
    it returns is added over the stages."""
    if mesh.shape["pipeline"] == 1:
        return function

    def one_stage(params: Tree, batch: Tree) -> Tree:
        return jax.lax.psum(function(params, batch), "pipeline")

    whole = PartitionSpec()
    return jax.shard_map(
        one_stage,
        mesh=mesh,
        axis_names={"pipeline"},
        in_specs=(stage_specs(specs), whole),
        out_specs=whole,
        check_vma=False,
    )


def stage_specs(specs: Tree) -> Tree:
    """Of each spec what it says about the `pipeline` axis."""

    def of_pipeline(spec: PartitionSpec) -> PartitionSpec:
        return PartitionSpec(*("pipeline" if "pipeline" in axes_of(entry) else None for entry in spec))

    return jax.tree.map(of_pipeline, specs, is_leaf=is_spec)
