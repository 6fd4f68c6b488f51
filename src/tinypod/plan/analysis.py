"""What a compiled step needs and does, on whatever devices it was compiled for: the facts that plans are made of.

What a step needs is what the compiler counts. The state's parts in it are exact; `activations` is what tracing says
that the forward pass keeps for the backward pass; `temporaries` is the rest. All numbers are for one device and one
step.
"""

import math
import re
import time
from typing import Any

import jax
from pydantic import BaseModel, ConfigDict

from tinypod import sharding
from tinypod.experiment import Experiment
from tinypod.health.memory import is_out_of_memory, step_bytes
from tinypod.plan import hlo
from tinypod.step import bind_loss, draw_batch

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


class Traffic(Facts):
    """Collectives of one kind over the same axes, in one step."""

    op: str
    axes: tuple[str, ...]
    group_size: int
    runs: int
    payload_bytes: float
    wire_bytes: float  # sent by a device, if its group is a ring


class KernelGroup(Facts):
    """Kernels with the same work, in one step."""

    runs: int
    flops: float
    hbm_bytes: float
    cycles: int | None

    def roofline_s(self, flops: float, bandwidth: float) -> float:
        return max(self.flops / flops, self.hbm_bytes / bandwidth)


class Work(Facts):
    kernels: tuple[KernelGroup, ...]
    collectives: tuple[Traffic, ...]
    arguments: int
    donated: int  # arguments whose memory an output takes over
    unknown_loops: int  # counted once
    opaque_calls: tuple[str, ...]  # whose products are not counted
    unwanted: tuple[str, ...]  # float64, calls of the host, shapes that are known only at run time

    @property
    def flops(self) -> float:
        return sum(kernel.runs * kernel.flops for kernel in self.kernels)

    @property
    def hbm_bytes(self) -> float:
        return sum(kernel.runs * kernel.hbm_bytes for kernel in self.kernels)

    def roofline_s(self, flops: float, bandwidth: float) -> float:
        """Kernel after kernel, each limited by its products at so many FLOP/s or its bytes at so many bytes/s."""
        return sum(kernel.runs * kernel.roofline_s(flops, bandwidth) for kernel in self.kernels)

    def notes(self) -> list[str]:
        """What the numbers leave out, and what should not be in a step."""
        notes = [f"the program has a {what}" for what in self.unwanted[:3]]
        if self.unknown_loops:
            notes.append(f"{self.unknown_loops} loops whose number of turns cannot be read are counted once")
        if self.opaque_calls:
            notes.append(f"the arithmetic inside {', '.join(sorted(set(self.opaque_calls)))} is not counted")
        return notes

    @property
    def kernel_runs(self) -> int:
        return sum(kernel.runs for kernel in self.kernels)


class Analysis(Facts):
    """Of one config on one set of devices. `work` is None where the compiler ran out of memory."""

    mesh: dict[str, int]
    memory: Memory
    work: Work | None
    compile_s: float  # tracing and lowering, too


def analyse(experiment: Experiment) -> tuple[Analysis, Any]:
    """Compile the training step; also the compiled step itself, None where it does not fit."""
    experiment.check_batch()
    mesh = dict(experiment.mesh.shape)
    began = time.perf_counter()
    lowered = experiment.train_step.lower(*experiment.abstract_inputs)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found = _NEEDED.search(str(error))
        memory = split_memory(experiment, int(float(found[1]) * _UNITS[found[2]]) if found else None)
        return Analysis(mesh=mesh, memory=memory, work=None, compile_s=time.perf_counter() - began), None
    compile_s = time.perf_counter() - began
    memory = split_memory(experiment, step_bytes(compiled))
    work = _work(hlo.read(compiled.as_text(), mesh))
    return Analysis(mesh=mesh, memory=memory, work=work, compile_s=compile_s), compiled


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

    def pullback(params: Any, carry: Any, batch: Any, varied: Any) -> Any:
        loss, arguments, _ = bind_loss(task, params, carry, batch, varied)
        return jax.vjp(loss, *arguments, has_aux=True)[1]

    jaxpr = jax.make_jaxpr(pullback)(state.params, state.carry, batch, settings.task).jaxpr
    given = {id(var) for var in jaxpr.invars}  # weights, and the carry: there already
    kept = {id(var): var.aval for var in jaxpr.outvars if id(var) not in given}
    size = sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in kept.values() if hasattr(aval, "shape"))
    return size // (sharding.num_batch_shards(experiment.mesh) * experiment.config.accumulation)


def _work(program: hlo.Program) -> Work:
    kernels: dict[tuple[Any, ...], int] = {}
    for kernel in program.kernels:
        work = (kernel.flops, kernel.hbm_bytes, kernel.cycles)
        kernels[work] = kernels.get(work, 0) + kernel.runs
    collectives: dict[tuple[str, tuple[str, ...], int], list[hlo.Collective]] = {}
    for collective in program.collectives:
        if collective.group_size > 1:
            kind = (collective.op, collective.axes, collective.group_size)
            collectives.setdefault(kind, []).append(collective)
    return Work(
        kernels=tuple(
            KernelGroup(runs=runs, flops=flops, hbm_bytes=hbm_bytes, cycles=cycles)
            for (flops, hbm_bytes, cycles), runs in kernels.items()
        ),
        collectives=tuple(
            Traffic(
                op=op,
                axes=axes,
                group_size=size,
                runs=sum(one.runs for one in found),
                payload_bytes=sum(one.runs * one.payload_bytes for one in found),
                wire_bytes=sum(one.runs * one.wire_bytes for one in found),
            )
            for (op, axes, size), found in collectives.items()
        ),
        arguments=program.num_parameters,
        donated=len(program.aliased),
        unknown_loops=len(program.unknown_loops),
        opaque_calls=program.opaque_calls,
        unwanted=(
            *(f"float64: {name}" for name in program.float64),
            *(f"call of the host: {name}" for name in program.host_calls),
            *(f"dynamic shape: {name}" for name in program.dynamic_shapes),
        ),
    )
