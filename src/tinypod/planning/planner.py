"""Plans: will a config fit a slice, how fast should it be, and what will the run cost?

A plan is the analysis of the compiled step (`analysis.py`), which is kept in a cache, and a prediction from it:

* on the chip, for each kernel, the TPU compiler's own estimate of its cycles, but never less than its roofline (matrix
  products by peak speed, bytes by HBM bandwidth). Of our own kernels it has no estimate: they state their products
  and the share of the peak that its schedules leave them;
* between chips, what each sends as if nothing else happened meanwhile: the compiler overlaps some of it.

The method has not been compared with a TPU. `docs/performance.md` compares the roofline with an H200.
"""

import math
from typing import Any, Literal

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tinypod import config as configs
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig, describe_task
from tinypod.planning import cache
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning.analysis import Analysis, Facts
from tinypod.planning.hlo.program import Program
from tinypod.planning.prices import Prices
from tinypod.planning.slices import Slice
from tinypod.runs.terminal import duration, say, size
from tinypod.sharding import AXES
from tinypod.tasks.task import Task


class Prediction(Facts):
    """Of one step. The parts are lower bounds, each as if it were alone; `step_s` is what to expect."""

    step_s: float
    on_chip_s: float
    compute_s: float  # matrix products at peak speed
    hbm_s: float  # bytes at full bandwidth
    interconnect_s: float | None  # None: its speed is not known
    bound: Literal["compute", "HBM", "interconnect", "latency"]  # latency: many small kernels, each far from a limit
    estimated_share: float  # of `on_chip_s`: kernels for which the compiler, or the kernel itself, has an estimate


class Probe(Facts):
    """What the device at hand reaches, as measured here and now."""

    flops: float  # a second, in matrix products
    bandwidth: float  # bytes a second, read and written
    memory_bytes: int | None  # for arrays; None: the device does not say


class Plan(Facts):
    """One config on one slice, or on the devices at hand."""

    slice: str  # or the devices at hand, like "8 × cpu"
    devices: int
    chips: int | None = None  # None, as `hosts` and the dollars: the devices at hand
    hosts: int | None = None
    overrides: tuple[str, ...]  # besides those the user gave
    batch_size: int
    rows_per_device: int  # at a time: of one part of the accumulation
    usable_bytes: int | None  # of a device; None: it does not say
    bubble: float  # share of a step in which a stage of a pipeline waits for the others
    model_flops: float  # of a step, all devices
    analysis: Analysis
    fits: bool
    prediction: Prediction | None  # None: the compiler ran out of memory
    steps: int
    train_hours: float | None
    eval_hours: float | None  # None also where the number of held-out rows is not known
    hours: float | None
    dollars: float | None = None
    dollars_spot: float | None = None
    notes: tuple[str, ...]  # where the numbers come from, and what they leave out
    cached: bool = False
    probe: Probe | None = None
    measured_s: float | None = None
    measured_peak_bytes: int | None = None
    proposal: "Plan | None" = None  # a variant that fits, where this does not and one was found

    def __str__(self) -> str:
        """One line, not its kernels."""
        there = "" if self.usable_bytes is None else f" of {size(self.usable_bytes)}"
        memory = f"{size(self.analysis.memory.needed)}{there} per device"
        if not self.fits:
            instead = "" if self.proposal is None else f"; {' '.join(self.proposal.overrides)} fits"
            return f"{self.slice}: does not fit, needs {memory}{instead}"
        times = "" if self.step_s is None or self.hours is None else f", {duration(self.step_s)} per step"
        times += f", {duration(3600 * self.hours)} for {self.steps:,} steps" if self.hours is not None else ""
        costs = ((self.dollars, "on demand"), (self.dollars_spot, "spot"))
        return f"{self.slice}: fits, needs {memory}{times}" + "".join(
            f", ${price:,.2f} {how}" for price, how in costs if price is not None
        )

    __repr__ = __str__

    @property
    def step_s(self) -> float | None:
        return None if self.prediction is None else self.prediction.step_s

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        return None if self.step_s is None or self.measured_s is None else self.step_s / self.measured_s


class Planner:
    """Makes plans of variants of one config; shows what it compiles on `console`."""

    def __init__(self, config: ExperimentConfig, prices: Prices, console: Console, *, fresh: bool = False) -> None:
        self.config, self.prices, self.console, self.fresh = config, prices, console, fresh
        describe_task(config)  # data that are neither there nor described are an error now

    def plan(self, target: Slice, overrides: tuple[str, ...] = ()) -> Plan:
        config = changed(self.config, overrides)
        check(config, target)
        task = describe_task(config)
        key = cache.cache_key(config, task, target)
        found = None if self.fresh else cache.read(key)
        analysis = found or self._compile(config, target, overrides, key)
        prediction = None if analysis.work is None else predict_for(analysis.work, target)
        plan = make_plan(
            config,
            task,
            analysis,
            prediction,
            overrides,
            slice=target.name,
            devices=target.devices,
            chips=target.chips,
            hosts=target.hosts,
            usable_bytes=int(target.generation.usable_bytes),
            fits=prediction is not None,
            cached=found is not None,
        )
        return self._priced(plan, target)

    def _priced(self, plan: Plan, target: Slice) -> Plan:
        name, chip_hours = target.generation.name, None if plan.hours is None else plan.hours * target.chips
        prices = {"dollars": self.prices.on_demand.get(name), "dollars_spot": self.prices.spot_price(name)}
        known = {} if chip_hours is None else {k: chip_hours * v for k, v in prices.items() if v is not None}
        return plan.model_copy(update=known)

    def _compile(self, config: ExperimentConfig, target: Slice, overrides: tuple[str, ...], key: str) -> Analysis:
        what = f"compiling for {target.name} ({target.devices} devices){with_overrides(overrides)}"
        with Status(Text(what), console=self.console) as status:
            analysis = tpu_compiler.compile_for(
                config, target, tick=lambda seconds: status.update(Text(f"{what}: {duration(seconds, whole=True)}"))
            )
        fits = "" if analysis.work is not None else ", does not fit"
        say(self.console, f"{what}: {duration(analysis.compile_s, whole=True)}{fits}")
        try:
            cache.write(key, analysis)
        except OSError as error:  # the answer is there all the same
            say(self.console, f"not kept for the next time: {cache.folder()}: {error.strerror}", "yellow")
        return analysis


def with_overrides(overrides: tuple[str, ...]) -> str:
    return f" with {' '.join(overrides)}" * bool(overrides)


def changed(config: ExperimentConfig, overrides: tuple[str, ...]) -> ExperimentConfig:
    """The config with `a.b=value` overrides applied."""
    tree = config.model_dump()
    for text in overrides:
        tree = configs.merge(tree, configs.parse_override(text))
    return configs.validate(tree, ExperimentConfig, "plan")


def check(config: ExperimentConfig, target: Slice) -> None:
    """What can be said without compiling: whether the mesh divides the slice, and the batch the mesh."""
    try:
        mesh = dict(zip(AXES, config.mesh.shape(target.devices), strict=True))
    except ConfigError as error:
        raise ConfigError(f"{target.name}: {error}. About {target.name}: {target.describe()}") from None
    data, fsdp, rows = mesh["data"], mesh["fsdp"], config.batch_size // config.accumulation
    shards = data * fsdp
    if rows % shards:
        too_small = f"the batch is too small for {target.name}: " if rows < shards else f"on {target.name}, "
        raise ConfigError(
            f"{too_small}batch_size / accumulation = {rows} rows do not divide over {shards} devices "
            f"(data={data} × fsdp={fsdp}); choose a multiple of {shards}"
        )


def make_plan(
    config: ExperimentConfig,
    task: Task,
    analysis: Analysis,
    prediction: Prediction | None,
    overrides: tuple[str, ...],
    **hardware: Any,
) -> Plan:
    """`hardware`: the fields of a plan that depend on the slice or the devices at hand."""
    train_hours = eval_hours = None
    notes = [*task.notes, *([] if analysis.work is None else analysis.work.notes())]
    stages, parts = analysis.mesh["pipeline"], config.accumulation
    bubble = (stages - 1) / (parts + stages - 1)
    if stages > 1:
        notes.insert(0, f"pipeline: {parts} parts pass {stages} stages; each stage waits {bubble:.1%} of its turns")
    if prediction is not None:
        evaluations = _eval_steps(config, task)
        train_hours = config.steps * prediction.step_s / 3600
        eval_hours = None if evaluations is None else evaluations * prediction.step_s / 3600
        if eval_hours is None:
            notes.insert(0, "evaluation is left out: how many rows are held out is not known (eval.limit)")
        if prediction.interconnect_s is None:
            notes.insert(0, "exchange between devices is left out: its speed is not known")
    return Plan(
        overrides=overrides,
        batch_size=config.batch_size,
        rows_per_device=config.batch_size // config.accumulation // (analysis.mesh["data"] * analysis.mesh["fsdp"]),
        bubble=bubble,
        model_flops=float(task.flops(True) * config.batch_size),
        analysis=analysis,
        prediction=prediction,
        steps=config.steps,
        train_hours=train_hours,
        eval_hours=eval_hours,
        hours=None if train_hours is None else train_hours + (eval_hours or 0.0),
        notes=tuple(notes),
        **hardware,
    )


def _eval_steps(config: ExperimentConfig, task: Task) -> float | None:
    """All evaluations of a run, in training steps with as much arithmetic.

    Where the number of held-out rows is not known, `eval.limit` stands for it; None where there is no limit either.
    """
    known = [rows for rows in (config.eval.limit, task.held_out_rows) if rows]
    if not known:
        return None
    times = 1 if config.eval.every_steps is None else math.ceil(config.steps / config.eval.every_steps)
    return times * min(known) * task.flops(False) / (task.flops(True) * config.batch_size)


def predict_for(work: Program, target: Slice) -> Prediction:
    generation = target.generation
    peak, bandwidth = (x / generation.devices_per_chip for x in (generation.peak_bf16, generation.hbm_bandwidth))
    return predict(work, peak, bandwidth, generation.clock, _interconnect_s(work, target))


def predict(
    work: Program, peak: float, bandwidth: float, clock: float | None, interconnect_s: float | None
) -> Prediction:
    """At so many FLOP/s and bytes/s of a device; without a `clock`, the compiler's cycles are left aside."""
    on_chip_s = estimated_s = 0.0
    for kernel in work.kernels:
        estimate_s = kernel.cycles / clock if clock is not None and kernel.cycles is not None else None
        if kernel.share is not None:
            estimate_s = kernel.flops / peak / kernel.share
        seconds = kernel.runs * max(kernel.flops / peak, kernel.hbm_bytes / bandwidth, estimate_s or 0.0)
        on_chip_s += seconds
        estimated_s += seconds * (estimate_s is not None)
    parts = {"compute": work.flops / peak, "HBM": work.hbm_bytes / bandwidth, "interconnect": interconnect_s or 0.0}
    step_s = on_chip_s + parts["interconnect"]
    bound: Any = max(parts, key=lambda name: parts[name])
    return Prediction(
        step_s=step_s,
        on_chip_s=on_chip_s,
        compute_s=parts["compute"],
        hbm_s=parts["HBM"],
        interconnect_s=interconnect_s,
        bound=bound if parts[bound] > step_s / 5 else "latency",
        estimated_share=estimated_s / on_chip_s if on_chip_s else 0.0,
    )


def _interconnect_s(work: Program, target: Slice) -> float | None:
    """Groups of all devices use every axis of the topology; smaller ones are taken to use one link of one axis."""
    exchanges, link, together = work.exchanges(), target.generation.ici_link, target.reduce_bandwidth
    if link is None or together is None:
        return None if exchanges else 0.0
    return sum(one.wire_bytes / (together if one.group_size == target.devices else link) for one in exchanges)
