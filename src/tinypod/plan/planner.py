"""Plans: will a config fit a slice, how fast should it be, and what will the run cost?

A plan is the analysis of the compiled step (`analysis.py`), which is kept in a cache, and a prediction from it:

* on the chip, for each kernel, the TPU compiler's own estimate of its cycles, but never less than its roofline (matrix
  products by peak speed, bytes by HBM bandwidth), which also stands in where the compiler has no estimate;
* between chips, what each sends as if nothing else happened meanwhile: the compiler overlaps some of it.

The method has not been held against a TPU. `docs/performance.md` holds the roofline against an H200.
"""

import hashlib
import json
import math
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh
from pydantic import ValidationError
from rich.console import Console
from rich.status import Status

from tinypod import config as configs
from tinypod.errors import ConfigError
from tinypod.experiment import ExperimentConfig, describe_task
from tinypod.plan import compiler as tpu_compiler
from tinypod.plan import slices
from tinypod.plan.analysis import Analysis, Facts, Work
from tinypod.plan.prices import Prices
from tinypod.runs import storage
from tinypod.runs.terminal import say
from tinypod.sharding import AXES
from tinypod.tasks.task import Task

# Of JAX's settings in the environment, those that cannot change a program.
_HARMLESS = (
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE",
    "JAX_PERSISTENT_CACHE",
    "JAX_LOGGING",
    "JAX_DEBUG",
    "JAX_TRACEBACK",
)
# Of the config, what the compiled step does not depend on.
_IRRELEVANT = {"seed", "steps", "eval", "checkpoint", "log", "health", "nonfinite", "compile_cache"}


class Prediction(Facts):
    """Of one step. The parts are lower bounds, each as if it were alone; `step_s` is what to expect."""

    step_s: float
    on_chip_s: float
    compute_s: float  # matrix products at peak speed
    hbm_s: float  # bytes at full bandwidth
    interconnect_s: float | None  # None: its speed is not known
    bound: Literal["compute", "HBM", "interconnect", "latency"]  # latency: many small kernels, each far from a limit
    estimated_share: float  # of `on_chip_s`: kernels for which the compiler has an estimate


class Plan(Facts):
    """One config on one slice."""

    slice: str
    generation: str
    chips: int
    hosts: int
    devices: int
    overrides: tuple[str, ...]  # besides those the user gave
    batch_size: int
    rows_per_device: int  # at a time: of one part of the accumulation
    usable_bytes: int
    model_flops: float  # of a step, all devices
    analysis: Analysis
    prediction: Prediction | None  # None: it does not fit
    steps: int
    train_hours: float | None
    eval_hours: float | None  # None also where the number of held-out puzzles is not known
    dollars: float | None
    dollars_spot: float | None
    cached: bool

    @property
    def fits(self) -> bool:
        return self.prediction is not None

    def notes(self) -> list[str]:
        """Where the numbers come from, and what they leave out."""
        work, prediction = self.analysis.work, self.prediction
        if work is None or prediction is None:
            return []
        notes = [
            f"{prediction.estimated_share:.0%} of the time on the chip is the compiler's estimate, the rest roofline"
        ]
        if prediction.interconnect_s is None:
            notes.append("exchange between chips is left out: its speed is not known")
        if self.eval_hours is None:
            notes.append("evaluation is left out: how many rows are held out is not known (eval.limit)")
        return notes + work.notes()

    @property
    def hours(self) -> float | None:
        return None if self.train_hours is None else self.train_hours + (self.eval_hours or 0.0)

    @property
    def step_s(self) -> float | None:
        return None if self.prediction is None else self.prediction.step_s

    @property
    def examples_per_s(self) -> float | None:
        return None if self.step_s is None else self.batch_size / self.step_s


class Planner:
    """Makes plans of variants of one config; shows what it compiles on `console`."""

    def __init__(
        self, config: ExperimentConfig, prices: Prices, console: Console, *, grant: bool = False, fresh: bool = False
    ) -> None:
        self.config, self.prices, self.console, self.grant, self.fresh = config, prices, console, grant, fresh
        describe_task(config)  # data that are neither there nor described are an error now

    def plan(self, target: slices.Slice, overrides: tuple[str, ...] = ()) -> Plan:
        config = changed(self.config, overrides)
        check(config, target)
        task = describe_task(config)
        analysis, cached = self._analysis(config, task, target, overrides)
        return make_plan(config, task, target, analysis, self.prices, overrides, grant=self.grant, cached=cached)

    def _analysis(
        self, config: ExperimentConfig, task: Task, target: slices.Slice, overrides: tuple[str, ...]
    ) -> tuple[Analysis, bool]:
        path = cache_folder() / f"{cache_key(config, task, target)}.json"
        found = None if self.fresh else _read_cached(path)
        if found is not None:
            return found, True
        what = f"compiling for {target.name} ({target.devices} devices)" + (
            f" with {' '.join(overrides)}" * bool(overrides)
        )
        with Status(what, console=self.console) as status:
            analysis = tpu_compiler.compile_for(
                config, target, tick=lambda seconds: status.update(f"{what}: {seconds:.0f} s")
            )
        fits = "" if analysis.work is not None else ", does not fit"
        say(self.console, f"{what}: {analysis.compile_s:.0f} s{fits}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            storage.replace_file(path, analysis.model_dump_json().encode())
        except OSError as error:  # the answer is there all the same
            say(self.console, f"not kept for the next time: {path}: {error.strerror}", "yellow")
        return analysis, False


def changed(config: ExperimentConfig, overrides: tuple[str, ...]) -> ExperimentConfig:
    """The config with `a.b=value` overrides applied."""
    tree = config.model_dump()
    for text in overrides:
        tree = configs.merge(tree, configs.parse_override(text))
    return configs.validate(tree, ExperimentConfig, "plan")


def check(config: ExperimentConfig, target: slices.Slice) -> None:
    """What can be said without compiling: whether the mesh divides the slice, and the batch the mesh."""
    try:
        sizes = dict(zip(("data", "fsdp", "tensor"), config.mesh.shape(target.devices), strict=True))
    except ConfigError as error:
        raise ConfigError(f"{target.name}: {error}. About {target.name}: {target.describe()}") from None
    shards, rows = sizes["data"] * sizes["fsdp"], config.batch_size // config.accumulation
    if rows % shards:
        too_small = f"the batch is too small for {target.name}: " if rows < shards else f"on {target.name}, "
        raise ConfigError(
            f"{too_small}batch_size / accumulation = {rows} rows do not divide over {shards} devices "
            f"(data={sizes['data']} × fsdp={sizes['fsdp']}); choose a multiple of {shards}"
        )


def make_plan(
    config: ExperimentConfig,
    task: Task,
    target: slices.Slice,
    analysis: Analysis,
    prices: Prices,
    overrides: tuple[str, ...] = (),
    *,
    grant: bool = False,
    cached: bool = False,
) -> Plan:
    generation, mesh = target.generation, analysis.mesh
    prediction = None if analysis.work is None else predict(analysis.work, target)
    train_hours = None if prediction is None else config.steps * prediction.step_s / 3600
    evaluations = _eval_steps(config, task)
    eval_hours = None if prediction is None or evaluations is None else evaluations * prediction.step_s / 3600
    hours = None if train_hours is None else train_hours + (eval_hours or 0.0)
    return Plan(
        slice=target.name,
        generation=generation.name,
        chips=target.chips,
        hosts=target.hosts,
        devices=target.devices,
        overrides=overrides,
        batch_size=config.batch_size,
        rows_per_device=config.batch_size // config.accumulation // (mesh["data"] * mesh["fsdp"]),
        usable_bytes=int(generation.usable_bytes),
        model_flops=float(task.flops(True) * config.batch_size),
        analysis=analysis,
        prediction=prediction,
        steps=config.steps,
        train_hours=train_hours,
        eval_hours=eval_hours,
        dollars=_dollars(hours, target, 0.0 if grant else prices.on_demand.get(generation.name)),
        dollars_spot=_dollars(hours, target, 0.0 if grant else prices.spot_price(generation.name)),
        cached=cached,
    )


def _dollars(hours: float | None, target: slices.Slice, price: float | None) -> float | None:
    return None if hours is None or price is None else hours * target.chips * price


def _eval_steps(config: ExperimentConfig, task: Task) -> float | None:
    """All evaluations of a run, in training steps with as much arithmetic.

    Where the number of held-out rows is not known, `eval.limit` stands for it; None where there is no limit either.
    """
    known = [rows for rows in (config.eval.limit, task.held_out_rows) if rows]
    if not known:
        return None
    times = 1 if config.eval.every_steps is None else math.ceil(config.steps / config.eval.every_steps)
    return times * min(known) * task.flops(False) / (task.flops(True) * config.batch_size)


def predict(work: Work, target: slices.Slice) -> Prediction:
    generation = target.generation
    peak = generation.peak_bf16 / generation.devices_per_chip
    bandwidth = generation.hbm_bandwidth / generation.devices_per_chip
    on_chip_s = estimated_s = 0.0
    for kernel in work.kernels:
        seconds = max(kernel.roofline_s(peak, bandwidth), (kernel.cycles or 0) / generation.clock)
        on_chip_s += kernel.runs * seconds
        estimated_s += kernel.runs * seconds * (kernel.cycles is not None)
    interconnect_s = _interconnect_s(work, target)
    parts = {
        "compute": work.flops / peak,
        "HBM": work.hbm_bytes / bandwidth,
        "interconnect": interconnect_s or 0.0,
    }
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


def _interconnect_s(work: Work, target: slices.Slice) -> float | None:
    """Groups of all devices use every axis of the topology; smaller ones are taken to use one link of one axis."""
    if not work.collectives:
        return 0.0
    link, together = target.generation.ici_link, target.reduce_bandwidth
    if link is None or together is None:
        return None
    return sum(
        traffic.wire_bytes / (together if traffic.group_size == target.devices else link)
        for traffic in work.collectives
    )


def cache_folder() -> Path:
    return storage.cache_root() / "plans"


def cache_key(config: ExperimentConfig, task: Task, target: slices.Slice) -> str:
    """Everything that the compiled step depends on, and nothing else: other rates, another seed or more steps ask for
    no new compilation."""
    tree = {name: value for name, value in config.model_dump(mode="json").items() if name not in _IRRELEVANT}
    tree["optimizer"], tree["task"] = _without_numbers(tree["optimizer"]), _without_numbers(tree["task"])
    tree["ema_decay"] = tree["ema_decay"] is not None
    tree["data"] = {name: value for name, value in tree["data"].items() if name not in ("path", "expected")}
    tree["mesh"] = config.mesh.shape(target.devices)
    parts = (tree, _shapes(task), target.topology_arguments(), _versions())
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _without_numbers(tree: Any) -> Any:
    """Rates, decays and the warm-up are arguments of the program; other numbers cost the same whatever they are."""
    if isinstance(tree, dict):
        return {name: _without_numbers(value) for name, value in tree.items() if name != "warmup_steps"}
    return "a number" if isinstance(tree, float) else tree


def _shapes(task: Task) -> list[str]:
    """Of weights and data, which depend on the data."""
    params = jax.eval_shape(lambda: task.init_params(jax.random.key(0)))
    feed = task.abstract_feed(AbstractMesh((1,) * len(AXES), AXES))
    leaves = jax.tree_util.tree_leaves_with_path((params, feed))
    return [f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in leaves]


def _versions() -> dict[str, str]:
    settings = {
        name: value
        for name, value in os.environ.items()
        if name == "LIBTPU_INIT_ARGS" or (name.startswith("JAX_") and not name.startswith(_HARMLESS))
    }
    return {
        "source": _source_hash(),
        "jax": version("jax"),
        "jaxlib": version("jaxlib"),
        "optax": version("optax"),
        "compiler": tpu_compiler.compiler_version(),
    } | settings


@cache
def _source_hash() -> str:
    """Of the whole package: what is compiled, and how it is read, may depend on any of it."""
    package, source = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        source.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return source.hexdigest()


def _read_cached(path: Path) -> Analysis | None:
    try:
        return Analysis.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None  # not there, or of another version
