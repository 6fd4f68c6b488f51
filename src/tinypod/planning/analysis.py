"""What a compiled step needs and does, on whatever devices it was compiled for: the facts that plans are made of.

What a step needs is what the compiler counts. The state's parts in it are exact; `activations` is what tracing says
that the forward pass keeps for the backward pass; `temporaries` is the rest. All numbers are for one device and one
step.
"""

import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from pydantic import BaseModel, ConfigDict

from tinypod import sharding
from tinypod.experiment import Experiment
from tinypod.health.memory import is_out_of_memory, step_bytes
from tinypod.planning.hlo.program import Program, read
from tinypod.step import bind_loss, differentiated, draw_batch

_NEEDED = re.compile(r"\(([\d.]+)([KMGT])\) exceeds available HBM")  # as the TPU compiler says it
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Memory(Facts):
    """Bytes of a device; the parts add up to what is needed."""

    needed: int
    weights: int
    optimizer: int
    averages: int
    carry: int
    data: int
    activations: int
    temporaries: int

    def parts(self) -> dict[str, int]:
        return {name: size for name, size in self if name != "needed"}

    @property
    def state(self) -> int:
        """What stays from step to step, however small the batch is cut."""
        return self.weights + self.optimizer + self.averages + self.carry + self.data


class Analysis(Facts):
    """Of one config on one set of devices. `work` is None where the compiler ran out of memory."""

    mesh: dict[str, int]
    # Of the mesh's devices, in the topology of their TPU slice, or on the hosts of planned GPUs; elsewhere none.
    coordinates: tuple[tuple[int, ...], ...]
    memory: Memory
    work: Program | None
    compile_s: float  # tracing and lowering, too
    stand_in: str | None = None  # why the CPU's compiler made the program, where it did so for a GPU


def analyse(experiment: Experiment, places: Sequence[tuple[int, ...]] | None = None) -> tuple[Analysis, Any]:
    """Compile the training step; also the compiled step itself, None where it does not fit. `places`: the coordinates
    of all devices, where they do not say so themselves."""
    experiment.check_batch()
    mesh = dict(experiment.mesh.shape)
    places = coordinates(experiment.mesh) if places is None else tuple(places[: experiment.mesh.size])
    began = time.perf_counter()
    try:
        compiled = experiment.compile_step(experiment.abstract_inputs[3])
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = _NEEDED.search(str(error))
        memory = split_memory(experiment, int(float(found[1]) * _UNITS[found[2]]) if found else None)
        compile_s = time.perf_counter() - began
        return Analysis(mesh=mesh, coordinates=places, memory=memory, work=None, compile_s=compile_s), None
    compile_s = time.perf_counter() - began
    memory = split_memory(experiment, step_bytes(compiled))
    work = read(compiled.as_text(), mesh, places, sharding.num_slices(experiment.mesh.devices.flat))
    return Analysis(mesh=mesh, coordinates=places, memory=memory, work=work, compile_s=compile_s), compiled


def coordinates(mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    devices = list(mesh.devices.flat)
    if not all(hasattr(device, "coords") and device.platform == "tpu" for device in devices):
        return ()
    return tuple(tuple(device.coords) for device in devices)


def split_memory(experiment: Experiment, needed: int | None) -> Memory:
    """`needed`: by the compiler; None: it does not say, and the parts that are known make the least it can be."""
    state = experiment.abstract_state
    parts = {
        "weights": _bytes(state.params),
        "optimizer": _bytes(state.opt_state),
        "averages": _bytes(state.ema),
        "carry": _bytes(state.carry),
        "data": _bytes(experiment.abstract_inputs[3]),
    }
    known, kept = sum(parts.values()), kept_for_backward(experiment)
    needed = known + kept if needed is None else needed
    rest = max(0, needed - known)
    activations = min(rest, kept)
    return Memory(needed=needed, **parts, activations=activations, temporaries=rest - activations)


def _bytes(tree: Any) -> int:
    """On one device."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def kept_for_backward(experiment: Experiment) -> int:
    """Bytes that differentiating one part of a batch keeps, on one device; found by tracing alone."""
    task = experiment.task
    state, settings, number, feed = experiment.abstract_inputs
    batch = jax.eval_shape(lambda *inputs: draw_batch(task, *inputs), settings, number, feed)

    prepared = jax.eval_shape(lambda params: task.lower(task.prepare(params)), state.params)
    wanted = differentiated(task, state.params)

    def pullback(prepared: Any, carry: Any, batch: Any, varied: Any) -> Any:
        loss, arguments, _ = bind_loss(task, prepared, wanted, carry, batch, varied)
        return jax.vjp(loss, *arguments, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(pullback)(prepared, state.carry, batch, settings.task).jaxpr
    given = {id(var) for var in jaxpr.invars}  # weights, and the carry: there already
    kept = {id(var): var.aval for var in jaxpr.outvars if id(var) not in given}
    size = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept.values() if hasattr(aval, "shape"))
    # A pipeline keeps what every part of the batch leaves behind, each stage of its own layers.
    stages = experiment.mesh.shape["pipeline"]
    parts = experiment.config.accumulation if stages == 1 else stages
    return size // (sharding.num_batch_shards(experiment.mesh) * parts)
