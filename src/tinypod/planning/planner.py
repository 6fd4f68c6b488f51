"""Plans: will a config fit a slice, how fast should it be, and what will the run cost?

A plan is the analysis of the compiled step (`analysis.py`), which is kept in a cache, and a prediction from it:

* on the chip, for each kernel, a time between its roofline (matrix products by peak speed, bytes by HBM bandwidth) and
  the TPU compiler's own estimate of its cycles; how far between was fitted to published measurements
  (`calibration.py`). Of our own kernels the compiler has no estimate: they state their products and the share of the
  peak that its schedules leave them. What is fetched ahead costs nothing as long as the kernels last;
* between chips, each collective by its kind and the links that it has (`interconnect.py`), without what the kernels
  between its start and its end hide.

On GPUs there are no cycles. A kernel lies between its roofline at the speeds that the card is sold with, and its
products and its bytes one after the other at the speeds that a card reaches, plus its launch. Of a program that the
CPU's compiler made in place of the GPU's, only the products are believed: the step lies between these at peak speed and
the CPU's kernels on the card, in the middle of the two on a logarithmic scale.

`docs/performance.md` compares predictions with what others measured on TPUs, and with an H200.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tinypod import config as configs
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig, describe_task
from tinypod.planning import cache, interconnect
from tinypod.planning import compiler as tpu_compiler
from tinypod.planning.analysis import Analysis, Facts
from tinypod.planning.calibration import calibration
from tinypod.planning.gpus import Cards
from tinypod.planning.hardware import Hardware
from tinypod.planning.hlo.kinds import KINDS, Kind
from tinypod.planning.hlo.program import Collective, Kernel, Program
from tinypod.planning.prices import Prices
from tinypod.planning.slices import Slice
from tinypod.runs.terminal import duration, say, size
from tinypod.sharding import AXES
from tinypod.tasks.task import Task


class Prediction(Facts):
    """Of one step: what to expect, and what it lies between."""

    step_s: float
    least_s: float  # every kernel at its roofline, every link at its full speed, and all that could be hidden is
    most_s: float  # every kernel as the compiler estimates it, and nothing overlaps
    on_chip_s: float
    compute_s: float  # matrix products at peak speed
    hbm_s: float  # bytes at full bandwidth
    interconnect_s: float | None  # all of it; None: its speed is not known
    hidden_s: float  # of that, what other work hides
    shares: dict[str, float]  # of the step, by kind of kernel; "interconnect": what is not hidden
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
    peak_flops: float | None  # a second, of all devices
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
    def utilisation(self) -> float | None:
        """Of the peak of all devices, by the model's own products (MFU)."""
        if self.prediction is None or self.peak_flops is None:
            return None
        return self.model_flops / self.prediction.step_s / self.peak_flops

    @property
    def ratio(self) -> float | None:
        """Predicted by measured."""
        return None if self.step_s is None or self.measured_s is None else self.step_s / self.measured_s


class Planner:
    """Makes plans of variants of one config; shows what it compiles on `console`."""

    def __init__(self, config: ExperimentConfig, prices: Prices, console: Console, *, fresh: bool = False) -> None:
        self.config, self.prices, self.console, self.fresh = config, prices, console, fresh
        describe_task(config)  # data that are neither there nor described are an error now

    def plan(self, target: Hardware, overrides: tuple[str, ...] = ()) -> Plan:
        config = changed(self.config, overrides)
        check(config, target)
        task = describe_task(config)
        key = cache.cache_key(config, task, target)
        found = None if self.fresh else cache.read(key)
        analysis = found or self._compile(config, target, overrides, key)
        prediction = None if analysis.work is None else _predict(analysis, analysis.work, target, config.model.dtype)
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
            peak_flops=target.peak_bf16,
            usable_bytes=int(target.generation.usable_bytes),
            fits=prediction is not None and analysis.memory.needed <= target.generation.usable_bytes,
            cached=found is not None,
        )
        plan = plan.model_copy(update={"notes": (*_about_cards(analysis, target), *plan.notes)})
        return self._priced(plan, target)

    def _priced(self, plan: Plan, target: Hardware) -> Plan:
        name, chip_hours = target.generation.name, None if plan.hours is None else plan.hours * target.chips
        prices = {"dollars": self.prices.on_demand.get(name), "dollars_spot": self.prices.spot_price(name)}
        known = {} if chip_hours is None else {k: chip_hours * v for k, v in prices.items() if v is not None}
        return plan.model_copy(update=known)

    def _compile(self, config: ExperimentConfig, target: Hardware, overrides: tuple[str, ...], key: str) -> Analysis:
        devices = f"{target.devices} device{'s' * (target.devices > 1)}"
        what = f"compiling for {target.name} ({devices}){with_overrides(overrides)}"
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


def check(config: ExperimentConfig, target: Hardware) -> None:
    """What can be said without compiling: whether the mesh divides the slice, and the batch the mesh."""
    if isinstance(target, Slice) and config.mesh.slices != target.count:
        raise ConfigError(f"mesh.slices={config.mesh.slices} on {target.name}: set mesh.slices={target.count}")
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
    model_flops = float(task.flops(True) * config.batch_size)
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
        model_flops=model_flops,
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


def _about_cards(analysis: Analysis, target: Hardware) -> list[str]:
    """Where the numbers of a plan for GPUs come from."""
    if not isinstance(target, Cards):
        return []
    if analysis.stand_in is None:
        return ["compiled by XLA's GPU compiler, without a card"]
    return [
        f"compiled for the CPU at hand, not for the GPU. {analysis.stand_in}",
        "the memory is the CPU's compiler's, for TRM recipes 2 to 5 times what the GPU's needs; the time is a guess",
    ]


def _predict(analysis: Analysis, work: Program, target: Hardware, dtype: str) -> Prediction:
    made = predict_for(work, target, dtype)
    return made if analysis.stand_in is None else _guess(made)


def predict_for(work: Program, target: Hardware, dtype: str = "bfloat16") -> Prediction:
    """`dtype`: in which matrices are multiplied."""
    known, clock, reached = calibration(), None, None
    share = known.link_share
    sent = [seconds for one in work.collectives if (seconds := interconnect.seconds(one, target, known)) is not None]
    if isinstance(target, Cards):
        card, part = target.generation, 0.5 if dtype == "float32" else 1.0
        peak, bandwidth = part * card.peak_bf16, card.bandwidth
        reached = Reached(part * card.chip.reached_bf16, card.reached_bandwidth)
        share = min(card.chip.link_share, interconnect.NETWORK_SHARE)
    else:
        chip = target.generation
        work = replace(work, kernels=tuple(known.with_shares(kernel, chip.name) for kernel in work.kernels))
        peak, bandwidth = (x / chip.devices_per_chip for x in (chip.peak_bf16, chip.hbm_bandwidth))
        clock = chip.clock
    all_known = sent if len(sent) == len(work.collectives) else None
    return predict(work, peak, bandwidth, clock, all_known, reached, share)


def _guess(made: Prediction) -> Prediction:
    """Of another compiler's program: what it multiplies, and hardly more, is the same."""
    exposed = made.step_s - made.on_chip_s
    if not (made.compute_s and made.on_chip_s):
        return made
    on_chip = math.sqrt(made.compute_s * (made.most_s - (made.interconnect_s or 0.0)))
    step_s, shares = on_chip + exposed, dict(made.shares)
    for name, share in made.shares.items():
        seconds = share * made.step_s * (1.0 if name == "interconnect" else on_chip / made.on_chip_s)
        shares[name] = seconds / step_s
    update = {"step_s": step_s, "on_chip_s": on_chip, "least_s": made.compute_s, "shares": shares}
    return made.model_copy(update=update | {"estimated_share": 0.0})


class Reached(NamedTuple):
    """What the kernels of a GPU reach, a second."""

    flops: float
    bandwidth: float


def predict(
    work: Program,
    peak: float,
    bandwidth: float,
    clock: float | None,
    sent: Sequence[float] | None,
    reached: Reached | None = None,
    link_share: float = 1.0,
) -> Prediction:
    """At so many FLOP/s and bytes/s of a device; without a `clock`, the compiler's cycles are left aside. `sent`: the
    seconds of each collective, at that share of the links' speed; None where they are not known. `reached`: of a
    GPU."""
    kernels = [_time(kernel, peak, bandwidth, clock, reached) for kernel in work.kernels]
    parts: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for kernel in kernels:
        parts[kernel.kind] += 0.0 if kernel.ahead else kernel.expected_s
    together_s, ahead_s = sum(parts.values()), sum(one.expected_s for one in kernels if one.ahead)
    parts["element-wise"] += max(0.0, ahead_s - together_s)  # prefetches run beside the kernels, as far as these last
    took = [(one, one.runs * seconds) for one, seconds in zip(work.collectives, sent or (), strict=sent is not None)]
    by_links = defaultdict(list)  # those over other axes of the mesh, and those the other way, use other links
    for one, seconds in took:
        by_links[one.axes, one.span.backward].append((one, seconds))
    hidden_s = sum(_hidden_s(kernels, shared) for shared in by_links.values())
    longest_s = max((sum(seconds for _, seconds in shared) for shared in by_links.values()), default=0.0)
    on_chip_s, sent_s = sum(parts.values()), sum(seconds for _, seconds in took)
    parts["interconnect"] = sent_s - hidden_s
    step_s = sum(parts.values())
    return Prediction(
        step_s=step_s,
        least_s=max(sum(one.roofline_s for one in kernels if not one.ahead), link_share * longest_s),
        most_s=sum(max(one.roofline_s, one.estimate_s or 0.0) for one in kernels) + sent_s,
        on_chip_s=on_chip_s,
        compute_s=work.flops / peak,
        hbm_s=work.hbm_bytes / bandwidth,
        interconnect_s=None if sent is None else sent_s,
        hidden_s=hidden_s,
        shares={name: seconds / step_s for name, seconds in parts.items() if seconds},
        estimated_share=sum(one.expected_s for one in kernels if one.estimate_s is not None and not one.ahead)
        / (on_chip_s or 1.0),
    )


class _Timed(NamedTuple):
    """A kernel, all of its runs."""

    kind: Kind
    ahead: bool
    roofline_s: float
    estimate_s: float | None  # the compiler's, or the kernel's own, or what a GPU reaches
    expected_s: float


def _hidden_s(kernels: Sequence[_Timed], took: Iterable[tuple[Collective, float]]) -> float:
    """Of what these collectives took, what runs beside kernels. They share their links, so that a kernel hides no more
    of them than it lasts; who ends first comes first."""
    left, hidden_s = [0.0 if one.ahead else one.expected_s for one in kernels], 0.0
    waiting = [(one.during, seconds) for one, seconds in took if one.during is not None]
    for (first, end), seconds in sorted(waiting, key=lambda one: one[0][1]):
        for at in range(first, end):
            part = min(left[at], seconds)
            left[at], seconds, hidden_s = left[at] - part, seconds - part, hidden_s + part
    return hidden_s


def _time(kernel: Kernel, peak: float, bandwidth: float, clock: float | None, reached: Reached | None) -> _Timed:
    roofline = kernel.runs * max(kernel.flops / peak, kernel.hbm_bytes / bandwidth)
    estimate, known = None, calibration()
    if reached is not None:
        apart = kernel.flops / reached.flops + kernel.hbm_bytes / reached.bandwidth
        estimate = kernel.runs * (apart + known.gpus.launch_s)
        expected = known.between(roofline, estimate, known.gpus.toward_reached[kernel.kind])
        return _Timed(kernel.kind, kernel.ahead, roofline, estimate, expected)
    if kernel.share is not None:
        estimate = kernel.runs * kernel.flops / peak / kernel.share
    elif clock is not None and kernel.cycles is not None:
        estimate = kernel.runs * kernel.cycles / clock
    expected = known.expected_s(kernel.kind, roofline, estimate)
    return _Timed(kernel.kind, kernel.ahead, roofline, estimate, expected)
