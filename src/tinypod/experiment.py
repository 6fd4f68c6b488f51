"""The schema of an experiment, and `build`, which turns a config into everything that runs it.

`train`, `eval`, `plan`, `check` and the tests all use this one `build`: what is checked is what runs. Nothing here
knows what a puzzle or a text is: `tinypod.tasks` has the kinds of task.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from rich.console import Console

from tinypod import sharding, step
from tinypod.config import Config
from tinypod.errors import ConfigError
from tinypod.optim import Optimizer, OptimizerConfig, build_optimizer
from tinypod.tasks import KINDS, DataConfig, ModelConfig, TaskConfig
from tinypod.tasks.task import Metric, Task

# What `steps_per_dispatch: auto` puts into one dispatch: steps that take about as long as the host needs for one.
DISPATCH_FLOPS = 1e12  # some milliseconds of a small model
MOST_STEPS = 50


class EvalConfig(Config):
    every_steps: PositiveInt | None = 1000  # null: only at the end
    batch_size: PositiveInt = 1024
    limit: PositiveInt | None = None  # the first rows only (a split is stored in random order)
    weights: Literal["ema", "live"] = "ema"


class BestConfig(Config):
    """Which checkpoint is kept as the best; by default, by the first metric that the task reports."""

    metric: str | None = None  # like eval/exact_accuracy
    mode: Literal["max", "min"] | None = None


class CheckpointConfig(Config):
    every_steps: PositiveInt | None = 1000
    every_minutes: PositiveFloat | None = 10.0
    keep_last: PositiveInt = 2
    keep_every_hours: PositiveFloat | None = None  # besides the last and the best, one of each so many hours
    best: BestConfig | None = BestConfig()


class NonFiniteConfig(Config):
    """A step whose loss or gradients are not finite changes nothing and is counted; too many in a row, and the run goes
    back to the last checkpoint before them and leaves their batches out."""

    rollback_after: PositiveInt = 10  # such steps in a row
    max_rollbacks: NonNegativeInt = 3  # in a whole run; then it ends


class WandbConfig(Config):
    """Where W&B shows a run; it chooses an `entity` and a `name` where none is given."""

    project: str
    entity: str | None = None
    name: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"


class LogConfig(Config):
    every_steps: PositiveInt = 50
    tensorboard: bool = True
    wandb: WandbConfig | None = None


class HealthConfig(Config):
    heartbeat_s: PositiveFloat = 5.0  # between two writes of a process's heartbeat file
    start_timeout_s: PositiveFloat = 300.0  # until all processes are there; also a wait for data without a beat
    restore_timeout_s: PositiveFloat = 900.0  # to read a checkpoint
    compile_timeout_s: PositiveFloat = 1800.0  # to compile, or to load what was compiled before
    step_timeout_s: PositiveFloat = 300.0  # for one step, or those of one dispatch
    evaluate_timeout_s: PositiveFloat = 900.0  # for one batch of an evaluation
    save_timeout_s: PositiveFloat = 900.0  # to save a checkpoint, and to end
    close_timeout_s: PositiveFloat = 1800.0  # to close metrics and checkpoints at the end; W&B may upload for minutes
    on_recompile: Literal["stop", "warn"] = "stop"  # when a function is compiled again after warm-up
    replica_check_every_steps: PositiveInt | None = None  # compare the copies of the weights; null: never

    @model_validator(mode="after")
    def _beats_often_enough(self) -> "HealthConfig":
        timeouts = [key for key in type(self).model_fields if key.endswith("_timeout_s")]
        key = min(timeouts, key=lambda key: float(getattr(self, key)))
        if 4 * self.heartbeat_s > getattr(self, key):  # else a silent process would look like a live one
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s} must be at most a quarter of the shortest timeout, "
                f"{key}={getattr(self, key)}"
            )
        return self


class ExperimentConfig(Config):
    seed: NonNegativeInt = 0
    steps: PositiveInt
    batch_size: PositiveInt
    accumulation: PositiveInt = 1  # parts that a batch is computed in, one after the other
    mesh: sharding.MeshConfig = sharding.MeshConfig()
    # At most so many are given to the devices at a time; auto: many where they are short, and not on CPUs.
    steps_per_dispatch: PositiveInt | Literal["auto"] = "auto"
    compile_cache: str | None = "auto"  # a folder or gs:// URL; auto: in the user's cache folder; null: none
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = 0.999
    data: DataConfig
    model: ModelConfig
    task: TaskConfig
    optimizer: OptimizerConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    nonfinite: NonFiniteConfig = NonFiniteConfig()
    log: LogConfig = LogConfig()
    health: HealthConfig = HealthConfig()

    @model_validator(mode="before")
    @classmethod
    def _kinds_go_together(cls, tree: Any) -> Any:
        """Before their keys are looked at: those of a wrong kind would all seem to be wrong."""
        if not isinstance(tree, dict):
            return tree
        kinds = {name: _kind_of(tree.get(name)) for name in ("task", "data", "model")}
        kind = KINDS.get(kinds["task"] or "")
        for name in ("data", "model") if kind else ():
            wanted = getattr(kind, name).model_fields["kind"].default
            others = {getattr(other, name).model_fields["kind"].default for other in KINDS.values()}
            if kinds[name] != wanted and kinds[name] in others:
                raise ValueError(f"task.kind={kinds['task']} goes with {name}.kind={wanted}, not {kinds[name]}")
        return tree

    @model_validator(mode="after")
    def _fits_together(self) -> "ExperimentConfig":
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"batch_size={self.batch_size} does not divide into accumulation={self.accumulation} parts"
            )
        if self.eval.weights == "ema" and self.ema_decay is None:
            raise ValueError("eval.weights=ema needs ema_decay; set it, or eval.weights=live")
        if self.seed >= 2**31:
            raise ValueError(f"seed={self.seed} must be below 2**31")
        if self.steps_per_dispatch not in ("auto", 1) and not KINDS[self.task.kind].resident:
            raise ValueError(
                f"steps_per_dispatch={self.steps_per_dispatch}: the host reads each batch of a task of kind "
                f"{self.task.kind}, so that steps are given to the devices one at a time; leave it out"
            )
        return self

    @property
    def doubts(self) -> list[str]:
        """What is allowed, and most likely a mistake."""
        warmup = self.optimizer.schedule.warmup_steps
        if warmup <= self.steps:
            return []
        return [
            f"optimizer.schedule.warmup_steps={warmup} is longer than the run (steps={self.steps}): the learning rate "
            f"only gets to {self.steps / warmup:.0%} of its full value"
        ]


def _kind_of(section: Any) -> str | None:
    kind = section.get("kind") if isinstance(section, dict) else getattr(section, "kind", None)
    return kind if isinstance(kind, str) else None


@dataclass(frozen=True)
class Experiment:
    """A config made runnable. `init_state` and `train_step` are compiled with explicit shardings, once."""

    config: ExperimentConfig
    mesh: Mesh
    task: Task
    optimizer: Optimizer
    specs: Any  # of the parameters
    state_shardings: Any
    settings: step.Settings  # on the host
    init_state: Callable[[step.Settings], step.TrainState]
    train_step: Any  # (state, settings, number, feed) -> state, sums
    train_steps: Any  # (state, settings, numbers, feed) -> state, sums of each

    def init(self) -> step.TrainState:
        """The state of step 0."""
        return self.init_state(self.settings)

    def init_carry(self, params: Any) -> Any:
        """What a run begins with beside its parameters: every row takes a new example at the next step."""
        return jax.jit(self.task.init_carry, out_shardings=self.state_shardings.carry)(params)

    def put_settings(self, **changes: float) -> step.Settings:
        """The settings on the devices; `changes` to those of the optimizer."""
        changed: dict[str, Any] = self.settings.optimizer | {k: np.float32(v) for k, v in changes.items()}
        return self.put(self.settings._replace(optimizer=changed))

    def put(self, tree: Any) -> Any:
        """Host values, replicated on all devices."""
        return sharding.put(tree, sharding.replicated(self.mesh))

    @cached_property
    def abstract_state(self) -> step.TrainState:
        """Shapes, dtypes and shardings of the state; nothing is computed."""
        shapes = jax.eval_shape(self.init_state, self.settings)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings
        )

    @cached_property
    def abstract_params(self) -> Any:
        """Those of the state; also on a mesh over which its batch does not divide."""
        shapes = jax.eval_shape(self.task.init_params, jax.random.key(0))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings.params
        )

    @cached_property
    def abstract_inputs(self) -> tuple[Any, ...]:
        """Of the step: state, settings, number and feed, without reading data."""
        whole = sharding.replicated(self.mesh)

        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=whole)

        settings, number = jax.tree.map(abstract, (self.settings, np.int32(0)))
        return self.abstract_state, settings, number, self.task.abstract_feed(self.mesh)

    def compile_step(self, fed: Any) -> Any:
        """For what the feed gives, or its shapes."""
        return self.train_step.lower(*self.abstract_inputs[:3], fed).compile()

    def compile_steps(self, fed: Any, count: int) -> Any:
        """The program of so many steps."""
        state, settings, number, _ = self.abstract_inputs
        numbers = jax.ShapeDtypeStruct((count,), number.dtype, sharding=number.sharding)
        return self.train_steps.lower(state, settings, numbers, fed).compile()

    @cached_property
    def steps_per_dispatch(self) -> int:
        """As many as the config allows that whatever is done every so many steps falls between two dispatches."""
        config, most = self.config, 1
        if config.steps_per_dispatch != "auto":
            most = config.steps_per_dispatch
        elif KINDS[config.task.kind].resident and self.mesh.devices.flat[0].platform != "cpu":
            flops = self.task.flops(True) * config.batch_size / self.mesh.size
            most = max(1, min(MOST_STEPS, int(DISPATCH_FLOPS / max(flops, 1.0))))
        every = (config.log.every_steps, config.eval.every_steps, config.checkpoint.every_steps)
        between = math.gcd(*(x for x in (*every, config.health.replica_check_every_steps) if x is not None))
        return max(count for count in range(1, min(most, between) + 1) if between % count == 0)

    @cached_property
    def best(self) -> Metric | None:
        """The metric by which the best checkpoint is kept."""
        wanted = self.config.checkpoint.best
        if wanted is None:
            return None
        known = {f"eval/{metric.name}": metric for metric in self.task.headline}
        name = wanted.metric or f"eval/{self.task.headline[0].name}"
        if name not in known:
            raise ConfigError(f"checkpoint.best.metric={name}: the task reports {', '.join(known)}")
        metric = known[name]
        return Metric(name, metric.label, wanted.mode or metric.direction, metric.format)

    @property
    def num_weights(self) -> int:
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(self.abstract_params))

    def check_batch(self) -> None:
        """Training only: evaluation pads its batches."""
        rows = self.config.batch_size // self.config.accumulation
        sharding.check_divides(self.mesh, rows, "batch_size / accumulation")


def build(
    config: ExperimentConfig,
    devices: Sequence[Any] | None = None,
    *,
    planned: bool = False,
    console: Console | None = None,
    dataset: Mapping[str, Any] | None = None,
) -> Experiment:
    """Reads what the data say about themselves, not their arrays. `planned`: they need not be there if the config
    describes them; with `dataset`, what a run remembers of them (`Task.dataset`), they are not looked at."""
    kind = KINDS[config.task.kind]
    if dataset is None or kind.recall is None:
        opened = kind.open(config, planned, console)
    else:
        opened = kind.recall(config, dataset)
    mesh = sharding.make_mesh(config.mesh, devices)
    task = kind.build(config, opened, sharding.ANYWHERE)
    shapes = jax.eval_shape(task.init_params, jax.random.key(0))
    specs = sharding.param_specs(task.rules, shapes, mesh)
    prepared_specs = sharding.param_specs(task.prepared_rules, jax.eval_shape(task.prepare, shapes), mesh)
    _check_stages(config, mesh, specs)
    task = kind.build(config, opened, sharding.place(mesh, prepared_specs))
    if config.optimizer.kind == "muon" and not task.matrices:
        raise ConfigError(
            f"optimizer.kind=muon: which weights of a model of kind {config.model.kind} are matrices is not known; "
            "choose adamw, adam_atan2 or lion"
        )
    optimizer = build_optimizer(config.optimizer, config.batch_size, config.steps, task.matrices, mesh)
    ema = config.ema_decay is not None
    settings = step.make_settings(task, optimizer, config.seed, config.ema_decay)
    init = step.make_init(task, optimizer, ema)
    train_step = step.make_train_step(task, optimizer, config.accumulation, ema, mesh, specs)
    shardings = _state_shardings(jax.eval_shape(init, settings), specs, mesh)
    whole = sharding.replicated(mesh)
    compiled: Any = {
        "donate_argnums": 0,
        "in_shardings": (shardings, whole, whole, None),  # None: as the feed has put them
        "out_shardings": (shardings, whole),
    }
    experiment = Experiment(
        config=config,
        mesh=mesh,
        task=task,
        optimizer=optimizer,
        specs=specs,
        state_shardings=shardings,
        settings=settings,
        init_state=jax.jit(init, out_shardings=shardings),
        train_step=jax.jit(train_step, **compiled),
        train_steps=jax.jit(step.make_train_steps(train_step), **compiled),
    )
    assert experiment.best is None or experiment.best.name  # an unknown metric is an error now, not after the training
    return experiment


def describe_task(config: ExperimentConfig) -> Task:
    """The task of a config without devices, for plans: its functions that compute are not to be used."""
    kind = KINDS[config.task.kind]
    return kind.build(config, kind.open(config, True, None), sharding.ANYWHERE)


def _check_stages(config: ExperimentConfig, mesh: Mesh, specs: Any) -> None:
    stages = mesh.shape["pipeline"]
    if stages == 1:
        return
    staged = [spec for spec in jax.tree.leaves(sharding.stage_specs(specs), is_leaf=sharding.is_spec) if any(spec)]
    if not staged:
        raise ConfigError(f"mesh.pipeline={stages}: a model of kind {config.model.kind} has no stages; set it to 1")
    if config.accumulation % stages:
        raise ConfigError(
            f"accumulation={config.accumulation}: the parts of a batch pass the {stages} stages of mesh.pipeline one "
            f"after the other; choose a multiple of {stages}, and several times that to keep them busy"
        )


def _state_shardings(shapes: Any, specs: Any, mesh: Mesh) -> Any:
    over_batch = sharding.over_batch(mesh)
    return shapes._replace(
        step=sharding.replicated(mesh),
        params=sharding.named(mesh, specs),
        opt_state=sharding.named(mesh, sharding.specs_like(specs, shapes.opt_state)),
        ema=sharding.named(mesh, sharding.specs_like(specs, shapes.ema)),
        carry=jax.tree.map(lambda _: over_batch, shapes.carry),
    )
