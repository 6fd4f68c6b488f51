"""Plans for the device at hand, and what they are worth: prediction beside measurement.

The device is probed: a large matrix product in the model's dtype, and one pass over a large array. The prediction is
the roofline of the compiled step's kernels, one after the other, at these two speeds. Exchange between devices is not
in it.
"""

import logging
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console, Group, RenderableType
from rich.status import Status
from rich.table import Table
from rich.text import Text

from tinypod import sharding
from tinypod.errors import DataError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health.memory import device_bytes
from tinypod.plan.analysis import Analysis, Facts, analyse
from tinypod.plan.planner import changed
from tinypod.plan.search import find_fit
from tinypod.plan.slices import GIB
from tinypod.plan.tables import traffic_text, work_as_json

MEASURED_STEPS = 10
_PROBE_S = 0.3  # how long each probe goes on, at least
_LESS = 0.9  # of what a step needed that ran out of memory, although by the numbers it fits: a suggestion's most

logger = logging.getLogger(__name__)


class Probe(Facts):
    """What one device reaches, as measured here and now."""

    device_kind: str
    devices: int
    flops: float  # a second, in matrix products
    bandwidth: float  # bytes a second, read and written
    memory_bytes: int | None  # for arrays; None: the device does not say


class LocalPlan(Facts):
    overrides: tuple[str, ...]  # besides those the user gave
    probe: Probe
    batch_size: int
    rows_per_device: int
    model_flops: float
    analysis: Analysis
    fits: bool  # True also where the device does not say how much memory it has
    compute_s: float
    memory_s: float
    predicted_s: float
    hours: float  # of training, as predicted
    measured_s: float | None = None
    measured_peak_bytes: int | None = None

    @property
    def devices(self) -> int:
        return self.probe.devices

    @property
    def usable_bytes(self) -> int:
        return self.probe.memory_bytes or sys.maxsize

    @property
    def step_s(self) -> float | None:
        return self.predicted_s if self.fits else None

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        return None if self.measured_s is None else self.predicted_s / self.measured_s


def plan_here(
    config: ExperimentConfig,
    console: Console,
    *,
    measure: bool,
    overrides: tuple[str, ...] = (),
    probe: Probe | None = None,
) -> LocalPlan:
    """Compile for the local devices and predict; `measure`: run ten steps, too, if they fit. Without a `probe` the
    device is probed."""
    config = changed(config, overrides)
    experiment = build(config, planned=True)
    what = f" with {' '.join(overrides)}" * bool(overrides)
    with Status(f"compiling for the device at hand{what}", console=console):
        analysis, compiled = analyse(experiment)
    measured: dict[str, Any] = {}
    there = device_bytes()
    if measure and compiled is not None and (there is None or analysis.memory.needed <= there):
        with Status(f"running {MEASURED_STEPS} steps", console=console):
            measured["measured_s"] = measure_step(experiment, compiled)
        # Before the probe, whose arrays would count, too.
        measured["measured_peak_bytes"] = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if probe is None:
        with Status("probing the device", console=console):
            probe = probe_device(config.model.dtype)
    return make_local_plan(experiment, analysis, probe, overrides).model_copy(update=measured)


def find_fit_here(config: ExperimentConfig, failed: LocalPlan, console: Console, *, measure: bool) -> LocalPlan | None:
    """The fastest variant found that fits, measured if asked for."""
    probe = failed.probe
    found = find_fit(
        config,
        failed,
        lambda overrides: plan_here(config, console, measure=False, overrides=overrides, probe=probe),
    )
    if found is None or not measure:
        return found
    return plan_here(config, console, measure=True, overrides=found.overrides, probe=probe)


def suggest(config: ExperimentConfig, console: Console | None = None) -> str | None:
    """For a config whose step ran out of memory here: overrides with which it fits, like `accumulation=4
    model.remat=true`; None where none were found.

    Variants are compiled, which may take minutes, and none is run. The caller should have let go of its arrays: on a
    GPU compiling takes memory, too. It raises nothing. In a run of several processes it is None: the others may have
    ended, and a compiler that waits for them would wait for ever.
    """
    try:
        if jax.process_count() > 1:
            return None
        quiet = console or Console(quiet=True)
        # The speeds only rank what fits. They are typical ones, as a full device has no room for a probe.
        flops, bandwidth = (1e11, 1e10) if jax.default_backend() == "cpu" else (3e14, 2e12)
        probe = Probe(
            device_kind=jax.local_devices()[0].device_kind,
            devices=jax.device_count(),
            flops=flops,
            bandwidth=bandwidth,
            memory_bytes=device_bytes(),
        )
        failed = plan_here(config, quiet, measure=False, probe=probe)
        if failed.fits:  # but it did not
            less = probe.model_copy(update={"memory_bytes": int(_LESS * failed.analysis.memory.needed)})
            failed = failed.model_copy(update={"probe": less, "fits": False})
        found = find_fit_here(config, failed, quiet, measure=False)
    except Exception as error:  # whatever it is, the error to report is the one that the caller has
        logger.warning("looking for a variant that fits failed: %s", str(error).partition("\n")[0])
        return None
    return " ".join(found.overrides) if found else None


def make_local_plan(
    experiment: Experiment, analysis: Analysis, probe: Probe, overrides: tuple[str, ...] = ()
) -> LocalPlan:
    config, mesh, work = experiment.config, analysis.mesh, analysis.work
    room = probe.memory_bytes is None or analysis.memory.needed <= probe.memory_bytes
    predicted_s = 0.0 if work is None else work.roofline_s(probe.flops, probe.bandwidth)
    return LocalPlan(
        overrides=overrides,
        probe=probe,
        batch_size=config.batch_size,
        rows_per_device=config.batch_size // config.accumulation // (mesh["data"] * mesh["fsdp"]),
        model_flops=float(experiment.task.flops(True) * config.batch_size),
        analysis=analysis,
        fits=work is not None and room,
        compute_s=0.0 if work is None else work.flops / probe.flops,
        memory_s=0.0 if work is None else work.hbm_bytes / probe.bandwidth,
        predicted_s=predicted_s,
        hours=config.steps * predicted_s / 3600,
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
        memory_bytes=device_bytes(),
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


def measure_step(experiment: Experiment, compiled: Any) -> float:
    """Seconds a step, over ten after two that warm up. Where there are no data yet, on zeros of their shape."""
    state, settings, feed = experiment.init(), experiment.put_settings(), _feed(experiment)
    for number in range(2 + MEASURED_STEPS):
        if number == 2:
            jax.block_until_ready(state)
            began = time.perf_counter()
        state, _ = compiled(state, settings, experiment.put(np.int32(number)), feed(number))
    jax.block_until_ready(state)
    return (time.perf_counter() - began) / MEASURED_STEPS


def _feed(experiment: Experiment) -> Callable[[int], Any]:
    try:
        return experiment.task.open_feed(experiment.mesh)
    except DataError:
        shapes = experiment.abstract_inputs[3]
        zeros = jax.tree.map(lambda x: sharding.put(np.zeros(x.shape, x.dtype), x.sharding), shapes)
        return lambda number: zeros


def render(plan: LocalPlan) -> RenderableType:
    probe, work = plan.probe, plan.analysis.work
    changes = f" with {' '.join(plan.overrides)}" * bool(plan.overrides)
    table = Table(title=f"{probe.devices} × {probe.device_kind}{changes}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows = {"rows a device": f"{plan.rows_per_device:,}", "memory": _memory(plan)} | _memory_parts(plan)
    if plan.fits and work is not None:
        rows |= {
            "TFLOP a step, by the model": f"{plan.model_flops / 1e12:,.3f}",
            "TFLOP a step, as compiled": f"{work.flops * probe.devices / 1e12:,.3f}",
            "GB moved a step and device": f"{work.hbm_bytes / 1e9:,.2f}",
            "collectives": "\n".join(map(traffic_text, work.collectives)) or "none",
            "matrix products alone": f"{1e3 * plan.compute_s:,.1f} ms at {probe.flops / 1e12:,.2f} TFLOP/s, as probed",
            "memory traffic alone": f"{1e3 * plan.memory_s:,.1f} ms at {probe.bandwidth / 1e9:,.0f} GB/s, as probed",
            "predicted step": f"{1e3 * plan.predicted_s:,.1f} ms, {plan.batch_size / plan.predicted_s:,.0f} examples/s",
            "predicted training": f"{plan.hours:,.2f} h",
        }
    if plan.measured_s is not None and plan.ratio is not None:
        rows["measured step"] = f"{1e3 * plan.measured_s:,.1f} ms, {plan.batch_size / plan.measured_s:,.0f} examples/s"
        rows["predicted / measured"] = f"{plan.ratio:.2f}"
        if plan.measured_peak_bytes is not None:
            rows["measured peak memory"] = f"{plan.measured_peak_bytes / GIB:,.2f} GiB"
    for name, value in rows.items():
        table.add_row(name, value)
    notes = [
        "The prediction is a roofline: kernel after kernel, each at the one of the two probed speeds that limits it."
    ]
    notes += [] if work is None else work.notes()
    if work is not None and work.collectives:
        notes.append("Exchange between devices is not in it.")
    return Group(table, Text("\n".join(notes), style="dim"))


def _memory(plan: LocalPlan) -> str | Text:
    needed, there = plan.analysis.memory.needed / GIB, plan.probe.memory_bytes
    text = f"{needed:,.2f} GiB" if there is None else f"{needed:,.2f} of {there / GIB:,.2f} GiB"
    if not plan.fits and plan.analysis.memory.needed <= plan.usable_bytes:
        text = f"at least {text}"  # the compiler ran out of memory and did not say more
    return text if plan.fits else Text(f"{text}: does not fit", style="bold red")


def _memory_parts(plan: LocalPlan) -> dict[str, str | Text]:
    return {f"  {name}": f"{size / 2**20:,.1f} MiB" for name, size in plan.analysis.memory.parts().items()}


def as_json(plan: LocalPlan) -> dict[str, Any]:
    tree = plan.model_dump(mode="json")
    if plan.analysis.work is not None:
        tree["analysis"]["work"] = work_as_json(plan.analysis.work)
    return tree | {"predicted_by_measured": plan.ratio}
