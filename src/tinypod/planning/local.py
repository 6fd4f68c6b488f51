"""Plans for the device at hand, and what they are worth: prediction beside measurement.

The device is probed: a large matrix product in the model's dtype, and one pass over a large array. The prediction is
the roofline of the compiled step's kernels, one after the other, at these two speeds. Exchange between devices is not
in it.
"""

import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.status import Status
from rich.text import Text

from tinypod import sharding
from tinypod.errors import DataError, DeviceMemoryError
from tinypod.experiment import Experiment, ExperimentConfig, build
from tinypod.health.memory import device_bytes
from tinypod.planning.analysis import Analysis, analyse
from tinypod.planning.planner import Plan, Probe, changed, make_plan, predict, with_overrides
from tinypod.planning.search import find_fit
from tinypod.runs.terminal import say

MEASURED_STEPS = 10
_PROBE_S = 0.3  # of each probe, at least
_LESS = 0.9  # of what a step needed that ran out of memory, although by the numbers it fits: a suggestion's most

logger = logging.getLogger(__name__)


def plan_local(config: ExperimentConfig, console: Console, *, measure: bool, search: bool = True) -> Plan:
    """Where it does not fit, with what is proposed instead."""
    plan = plan_here(config, console, measure=measure)
    if plan.fits or not search:
        return plan
    return plan.model_copy(update={"proposal": find_fit_here(config, plan, console, measure=measure)})


def plan_here(
    config: ExperimentConfig,
    console: Console,
    *,
    measure: bool,
    overrides: tuple[str, ...] = (),
    probe: Probe | None = None,
) -> Plan:
    """Compile for the local devices and predict; `measure`: run ten steps, too, if they fit. Without a `probe` the
    device is probed."""
    config = changed(config, overrides)
    experiment = build(config, planned=True)
    with Status(Text(f"compiling for the device of this machine{with_overrides(overrides)}"), console=console):
        analysis, compiled = analyse(experiment)
    measured: dict[str, Any] = {}
    if measure and _fits(analysis, device_bytes()):
        with Status(f"running {MEASURED_STEPS} steps", console=console):
            measured["measured_s"] = measure_step(experiment, compiled)
        # Before the probe, whose arrays would count, too.
        measured["measured_peak_bytes"] = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if probe is None:
        with Status("probing the device", console=console):
            probe = probe_device(config.model.dtype)
    return make_local_plan(experiment, analysis, probe, overrides).model_copy(update=measured)


def _fits(analysis: Analysis, there: int | None) -> bool:
    """True also where the device does not say how much memory it has."""
    return analysis.work is not None and (there is None or analysis.memory.needed <= there)


def make_local_plan(experiment: Experiment, analysis: Analysis, probe: Probe, overrides: tuple[str, ...] = ()) -> Plan:
    work, devices, prediction = analysis.work, experiment.mesh.size, None
    if work is not None:
        unsent = [0.0] * len(work.collectives)
        prediction = predict(work, probe.flops, probe.bandwidth, clock=None, sent=None if work.exchanges() else unsent)
    return make_plan(
        experiment.config,
        experiment.task,
        analysis,
        prediction,
        overrides,
        slice=f"{devices} × {jax.local_devices()[0].device_kind}",
        devices=devices,
        peak_flops=devices * probe.flops,
        usable_bytes=probe.memory_bytes,
        fits=_fits(analysis, probe.memory_bytes),
        probe=probe,
    )


def find_fit_here(config: ExperimentConfig, failed: Plan, console: Console, *, measure: bool) -> Plan | None:
    """The fastest variant found that fits, measured if asked for."""

    def attempt(overrides: tuple[str, ...], measure: bool = False) -> Plan:
        return plan_here(config, console, measure=measure, overrides=overrides, probe=failed.probe)

    found = find_fit(config, failed, attempt)
    return attempt(found.overrides, measure=True) if found is not None and measure else found


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
        probe = Probe(flops=flops, bandwidth=bandwidth, memory_bytes=device_bytes())
        failed = plan_here(config, quiet, measure=False, probe=probe)
        if failed.fits:  # but it did not
            less = probe.model_copy(update={"memory_bytes": int(_LESS * failed.analysis.memory.needed)})
            failed = failed.model_copy(update={"probe": less, "usable_bytes": less.memory_bytes, "fits": False})
        found = find_fit_here(config, failed, quiet, measure=False)
    except Exception as error:  # whatever it is, the error to report is the one that the caller has
        logger.warning("looking for a variant that fits failed: %s", str(error).partition("\n")[0])
        return None
    return " ".join(found.overrides) if found else None


def with_advice(error: DeviceMemoryError, config: ExperimentConfig, console: Console) -> DeviceMemoryError:
    """The error of a run that ran out of memory here, with what would fit by the planner's own search."""
    say(console, "out of memory; looking for a variant that fits")
    found = suggest(config, console)
    advice = f"this fits: {found}" if found else "no accumulation, rematerialisation or FSDP that was tried fits"
    return type(error)(f"{error}\n{advice}")


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
