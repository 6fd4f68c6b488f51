"""Plans for the device at hand, and what they are worth: prediction beside measurement.

The device is probed: a large matrix product in the model's dtype, and one pass over a large array. The prediction adds
up, over the kernels of the compiled step, products at the first speed and bytes at the second: on a GPU kernels follow
one another, and each is either one or the other for most of its time. Exchange between devices is not in it.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tinypod.analysis import GIB, Analysis, Facts, Work, analyse
from tinypod.errors import UserError
from tinypod.experiment import Experiment, ExperimentConfig, build, describe_data
from tinypod.models import trm

MEASURED_STEPS = 10
_PROBE_S = 0.3  # how long each probe goes on, at least


class Probe(Facts):
    """What one device reaches, as measured here and now."""

    device_kind: str
    devices: int
    flops: float  # a second, in matrix products
    bandwidth: float  # bytes a second, read and written
    memory_bytes: int | None  # for arrays; None: the device does not say


class LocalPlan(Facts):
    probe: Probe
    batch_size: int
    rows_per_device: int
    model_flops: float
    analysis: Analysis
    fits: bool | None  # None: the device does not say how much it has
    compute_s: float
    memory_s: float
    predicted_s: float
    bound: Literal["compute", "memory"]
    hours: float  # of training, as predicted
    measured_s: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s


def plan_here(config: ExperimentConfig, console: Console, *, measure: bool) -> LocalPlan:
    """Compile for the local devices and predict; `measure`: run ten steps, too."""
    experiment = build(config, info=describe_data(config))
    with Status("compiling for the device at hand", console=console):
        analysis, compiled = analyse(experiment)
    if compiled is None or analysis.work is None:
        raise UserError(
            f"the step needs {analysis.memory.needed / GIB:.2f} GiB a device, which is more than there is; raise "
            "accumulation, or set model.remat=true"
        )
    with Status("probing the device", console=console):
        probe = probe_device(config.model.dtype)
    plan = make_local_plan(experiment, analysis, analysis.work, probe)
    if not measure:
        return plan
    if plan.fits is False:
        raise UserError(f"it does not fit: {_memory(plan)}; raise accumulation, or set model.remat=true")
    with Status(f"running {MEASURED_STEPS} steps", console=console):
        measured_s = measure_step(experiment, compiled)
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return plan.model_copy(update={"measured_s": measured_s, "measured_peak_bytes": peak})


def make_local_plan(experiment: Experiment, analysis: Analysis, work: Work, probe: Probe) -> LocalPlan:
    config, mesh = experiment.config, analysis.mesh
    compute_s, memory_s = work.flops / probe.flops, work.hbm_bytes / probe.bandwidth
    fits = None if probe.memory_bytes is None else analysis.memory.needed <= probe.memory_bytes
    return LocalPlan(
        probe=probe,
        batch_size=config.batch_size,
        rows_per_device=config.batch_size // config.accumulation // (mesh["data"] * mesh["fsdp"]),
        model_flops=float(trm.count_matmul_flops(config.model, experiment.shape) * config.batch_size),
        analysis=analysis,
        fits=fits,
        compute_s=compute_s,
        memory_s=memory_s,
        predicted_s=compute_s + memory_s,
        bound="compute" if compute_s > memory_s else "memory",
        hours=config.steps * (compute_s + memory_s) / 3600,
    )


def probe_device(dtype: str) -> Probe:
    """The first local device; CPU devices of one process share its cores, so that each has its part of the speed."""
    device = jax.local_devices()[0]
    on_cpu = device.platform == "cpu"
    side, elements = (1024, 2**25) if on_cpu else (8192, 2**29)
    share = jax.local_device_count() if on_cpu else 1
    square = jax.device_put(jnp.ones((side, side), dtype), device)
    row = jax.device_put(jnp.ones((elements,), dtype), device)
    product_s = _seconds(jax.jit(lambda x: x @ x), square)
    pass_s = _seconds(jax.jit(lambda x: x + 1), row)
    return Probe(
        device_kind=device.device_kind,
        devices=jax.device_count(),
        flops=2 * side**3 / product_s / share,
        bandwidth=2 * row.nbytes / pass_s / share,
        memory_bytes=_memory_bytes(device, share),
    )


def _seconds(function: Callable[[Any], Any], argument: Any) -> float:
    """Of one call, by the median over rounds of several in a row."""
    jax.block_until_ready(function(argument))
    times: list[float] = []
    while sum(times) < _PROBE_S or len(times) < 3:
        began = time.perf_counter()
        for _ in range(4):
            result = function(argument)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - began) / 4)
    return statistics.median(times)


def _memory_bytes(device: Any, share: int) -> int | None:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None or device.platform != "cpu":
        return limit
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // share
    except (ValueError, OSError):
        return None


def measure_step(experiment: Experiment, compiled: Any) -> float:
    """Seconds a step, over ten after two that warm up. Where there is no dataset yet, on noise of its shape."""
    state, source = experiment.init(), _source(experiment)
    for number in range(2 + MEASURED_STEPS):
        if number == 2:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, _ = compiled(state, source)
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / MEASURED_STEPS


def _source(experiment: Experiment) -> Any:
    if (experiment.dataset / "dataset.json").exists():
        return experiment.put_source(experiment.read_split(experiment.config.data.train_split))
    random = np.random.default_rng(0)
    arrays = {name: np.zeros(x.shape, x.dtype) for name, x in experiment.abstract_source.items()}
    for name in ("inputs", "labels"):
        arrays[name] = random.integers(1, experiment.info.vocab_size, arrays[name].shape).astype(arrays[name].dtype)
    return jax.device_put(arrays, jax.tree.map(lambda x: x.sharding, experiment.abstract_source))


def render(plan: LocalPlan) -> RenderableType:
    probe, work = plan.probe, plan.analysis.work
    assert work is not None
    table = Table(title=f"{probe.devices} × {probe.device_kind}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {
        "probed: matrix products": f"{probe.flops / 1e12:,.2f} TFLOP/s",
        "probed: memory": f"{probe.bandwidth / 1e9:,.1f} GB/s",
        "rows a device": f"{plan.rows_per_device:,}",
        "memory": _memory(plan),
        "TFLOP a step, by the model": f"{plan.model_flops / 1e12:,.3f}",
        "TFLOP a step, as compiled": f"{work.flops * probe.devices / 1e12:,.3f}",
        "GB moved a step and device": f"{work.hbm_bytes / 1e9:,.2f}",
        "products": f"{1e3 * plan.compute_s:,.1f} ms",
        "memory traffic": f"{1e3 * plan.memory_s:,.1f} ms",
        "predicted step": f"{1e3 * plan.predicted_s:,.1f} ms, most of it {plan.bound}",
        "predicted examples/s": f"{plan.batch_size / plan.predicted_s:,.0f}",
        "predicted training": f"{plan.hours:,.2f} h",
    }
    if plan.measured_s is not None and plan.ratio is not None:
        rows |= {
            "measured step": f"{1e3 * plan.measured_s:,.1f} ms",
            "measured examples/s": f"{plan.batch_size / plan.measured_s:,.0f}",
            "predicted / measured": f"{plan.ratio:.2f}",
        }
        if plan.measured_peak_bytes is not None:
            rows["measured peak memory"] = f"{plan.measured_peak_bytes / GIB:,.2f} GiB"
    for name, value in rows.items():
        table.add_row(name, value)
    how = "The prediction is a roofline from the two probed speeds: products and memory traffic, one after the other."
    return Group(table, Text(how, style="dim"))


def _memory(plan: LocalPlan) -> str:
    needed, there = plan.analysis.memory.needed / GIB, plan.probe.memory_bytes
    return f"{needed:,.2f} GiB" if there is None else f"{needed:,.2f} of {there / GIB:,.2f} GiB"
